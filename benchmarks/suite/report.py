"""Table, condensed tables and picture of results."""

from suite.peers import PEERS
from suite.task import COPY, FLOOR, OURS, PEER

from varcomm.cli.bench import microseconds

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
WIDTHS = {"operation": -20, "pass": -8, "ranks": 5, "dtype": 5, "bytes": 10, "shards": 7}
WIDTHS |= {"skew": 5, "us": 8, "quartiles": 15, "algbw": 7, "busbw": 7, "wire": 5}
WIDTHS |= {"floor us": 8, "schedule": -17, "/floor": 6} | {n: max(6, len(n)) for n in PEERS}
# Colours for readers who confuse red and green; varcomm is drawn last, in black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#5e3c99")
LINES = {FLOOR: "--", PEER: "-.", COPY: ":"}


def short_bytes(count):
    """Return a number of bytes as 768, 16K or 1.5M."""
    number, unit = float(count), ""
    for bigger in "KMG":
        if number < 1024:
            break
        number, unit = number / 1024, bigger
    return f"{number:.3g}{unit}"


def direction(result):
    return "backward" if result["backward"] else "forward"


def floor(result):
    """Return the name and timing of the fastest bare schedule, or None."""
    floors = [(n, t) for n, t in result["timings"].items() if t["kind"] == FLOOR]
    return min(floors, key=lambda each: each[1]["seconds"], default=None)


def line(cells):
    """Join cells into one line; a negative width aligns its cell to the left."""
    sides = zip(cells, WIDTHS.values(), strict=True)
    return "  ".join(c.ljust(-w) if w < 0 else c.rjust(w) for c, w in sides).rstrip()


def head():
    return line(WIDTHS)


def row(result):
    """Return the line of a result; a peer's column has its time over varcomm's."""
    ours, bare = result["timings"][OURS], floor(result)
    peers = (result["timings"].get(name) for name in PEERS)
    cells = [
        *(result["operation"], direction(result), str(result["world"])),
        SHORT.get(result["dtype"], result["dtype"]),
        *(str(result["nbytes"]), result["skew"], f"{result['largest_over_mean']:.2f}"),
        microseconds(ours["seconds"]),
        f"{microseconds(ours['low'])}-{microseconds(ours['high'])}",
        *(f"{result['algbw']:.3g}", f"{result['busbw']:.3g}", f"{result['wire']:.2f}"),
        *(
            (microseconds(bare[1]["seconds"]), bare[0], f"{bare[1]['ratio']:.2f}")
            if bare
            else "---"
        ),
        *(f"{1 / peer['ratio']:.2f}" if peer else "-" for peer in peers),
    ]
    return line(cells)


def reasons(results):
    """Return the reasons of contenders that could not run, each once."""
    said = {}
    for result in results:
        for name, reason in result["cannot"].items():
            operations = said.setdefault((name, reason), {})
            operations.setdefault(result["operation"], {})[direction(result)] = None
    for (name, reason), operations in sorted(said.items()):
        what = (
            operation if len(directions) == 2 else f"{operation} {next(iter(directions))}"
            for operation, directions in operations.items()
        )
        yield f"could not run: {name}: {reason} ({', '.join(what)})"


def markdown(rows):
    first, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [first, "|" + " --- |" * len(rows[0]), *body]


def condensed(results):
    """Return Markdown tables: median times of the first shards and dtype, and ranges of ratios."""
    tables = {}
    for result in results:
        key = result["suite"], result["engine"], result["world"]
        tables.setdefault(key, []).append(result)
    for (suite, engine, world), members in tables.items():
        sizes = sorted({result["asked"] for result in members})
        cells = {}
        for result in members:
            key = f"`{result['operation']}`", direction(result)
            cells.setdefault(key, {}).setdefault(result["asked"], []).append(result)
        rows = [["operation", "pass", *map(short_bytes, sizes)]]
        rows += [[*key, *(cell(found.get(n, [])) for n in sizes)] for key, found in cells.items()]
        yield from (f"Suite `{suite}` on {engine}, {world} ranks:", "", *markdown(rows), "")


def cell(members):
    if not members:
        return ""
    ratios = sorted(floor(result)[1]["ratio"] for result in members if floor(result))
    span = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else ""
    return f"{microseconds(members[0]['seconds'])} us{span}"


def plot(results, path):
    """Draw bus bandwidth against bytes: one panel per operation and direction.

    All panels have the suite, engine, ranks, dtype and shards of the most uneven result.
    """
    from matplotlib import pyplot

    same = ("suite", "engine", "world", "dtype", "skew")
    most = max(results, key=lambda result: result["largest_over_mean"])
    panels, kinds = {}, {}
    for result in results:
        if all(result[name] == most[name] for name in same):
            panels.setdefault((result["operation"], direction(result)), []).append(result)
            kinds |= {name: timing["kind"] for name, timing in result["timings"].items()}
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    size = (4.2 * across + 0.6, 3.1 * down + 1.4)
    figure, grid = pyplot.subplots(
        down, across, squeeze=False, sharex=True, figsize=size, layout="constrained"
    )
    colours = iter(COLOURS * len(kinds))
    order = sorted(kinds, key=lambda name: (OURS, FLOOR, PEER, COPY).index(kinds[name]))
    styles = {}
    for name in order:
        kind, marker = kinds[name], {FLOOR: ".", PEER: "x"}.get(kinds[name], "")
        styles[name] = {"color": "0.6", "linestyle": LINES.get(kind), "marker": marker}
        if kind in (FLOOR, PEER):
            styles[name]["color"] = next(colours)
    styles[OURS] = {"color": "black", "linewidth": 2.2, "marker": "o", "zorder": 3}
    for axes, (key, members) in zip(grid.flat, panels.items(), strict=False):
        for name in order:
            points = [
                (result["nbytes"], result["busiest"] / result["timings"][name]["seconds"] / 1e9)
                for result in members
                if name in result["timings"] and result["busiest"]
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), label=name, **styles[name])
        axes.set(title=", ".join(key), xscale="log", yscale="log", xlabel="bytes")
        ticks = sorted({result["nbytes"] for result in members})
        axes.set_xticks(ticks, [short_bytes(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("bus bandwidth, GB/s")
    shards = "one shard empty" if most["skew"] == "empty" else f"shards {most['skew']}"
    figure.suptitle(f"{most['engine']}, {most['world']} ranks, {most['dtype']}, {shards}")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    drawn = [name for name in order if name in lines]
    columns, place = max(1, min(len(drawn), 3 * across)), "outside lower center"
    handles = [lines[name] for name in drawn]
    figure.legend(handles, drawn, loc=place, ncols=columns, frameon=False)
    figure.savefig(path, dpi=130)
