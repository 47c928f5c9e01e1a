"""Draw images/collectives/*.svg: the rows that each collective moves between three ranks.

python docs/draw_collectives.py

Marked rows pass through real calls, so each picture shows a run.
"""

import sys
from math import prod
from pathlib import Path

import torch

import varcomm as vc
from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import ON_DARK, twin

FOLDER = Path(__file__).parent / "images" / "collectives"
SIZES = [3, 0, 1]
BLOCKS = [[1, 2, 0], [1, 0, 1], [0, 1, 1]]  # BLOCKS[i][j]: rows from rank i to rank j
CHOSEN = [[[], [2, 0], [2]], [[1], [], [1]], [[], [0], []]]  # CHOSEN[i][j]: which ones

# pixels: of the picture, of a bar, between rows, between ranks, of the title
WIDTH, BAR, HEIGHT, PITCH, GAP, TOP = 520, 112, 20, 24, 16, 30
LEFT, RIGHT = 62, WIDTH - 62 - BAR


def all_to_all(rank, x):
    return vc.all_to_all_v(x, BLOCKS[rank], [row[rank] for row in BLOCKS])


def indexed(rank, x):
    indices = [torch.tensor(rows, dtype=torch.int64) for rows in CHOSEN[rank]]
    return vc.indexed_all_to_all_v(x, indices, [[len(rows) for rows in row] for row in CHOSEN])


def transpose(rank, x):
    cut = {"split_sizes": [1, 1, 2], "concat_sizes": [2, 1, 1]}
    return vc.transpose_v(x, split_dim=1, concat_dim=0, **cut)


def module(rank, x):
    parameters = torch.nn.ParameterList([x])
    vc.broadcast_module(parameters, src=0)
    return parameters[0].detach()


SHARDS, FULL, PAIRS = [(n, 1) for n in SIZES], [(4, 1)] * 3, [(2, 1)] * 3
CALLS = {  # a call, and the shapes of its inputs; None is a rank without input
    "all_gather_v": (lambda rank, x: vc.all_gather_v(x, SIZES), SHARDS),
    "gather_v": (lambda rank, x: vc.gather_v(x, SIZES, dst=0), SHARDS),
    "scatter_v": (lambda rank, x: vc.scatter_v(x, SIZES, src=0), [(4, 1), None, None]),
    "reduce_scatter_v": (lambda rank, x: vc.reduce_scatter_v(x, SIZES), FULL),
    "all_to_all_v": (all_to_all, [(sum(row), 1) for row in BLOCKS]),
    "indexed_all_to_all_v": (indexed, [(3, 1), (2, 1), (1, 1)]),
    "transpose_v": (transpose, [(2, 4), (1, 4), (1, 4)]),
    "shard_v": (lambda rank, x: vc.shard_v(x, SIZES), FULL),
    "all_reduce": (lambda rank, x: vc.all_reduce(x), PAIRS),
    "reduce": (lambda rank, x: vc.reduce(x, dst=0), PAIRS),
    "broadcast": (lambda rank, x: vc.broadcast(x, src=0), [(2, 1), None, None]),
    "broadcast_module": (module, PAIRS),
}


def follow(rank, name):
    """Return the entries of this rank's input and result, each as the inputs that it contains."""
    call, shapes = CALLS[name]
    counts = [prod(shape or (0,)) for shape in shapes]
    before = x = None
    if shapes[rank] is not None:
        first = sum(counts[:rank])
        before = torch.eye(sum(counts))[first : first + counts[rank]]
        x = before = before.view(*shapes[rank], sum(counts))
    return [entries(before, counts), entries(call(rank, x), counts)]


def entries(x, counts):
    """Return per row and column the (rank, place) of each input that an entry contains."""
    if x is None:
        return []
    owners = [(rank, place) for rank, count in enumerate(counts) for place in range(count)]
    return [
        [[owners[k] for k, times in enumerate(marks) for _ in range(int(times))] for marks in row]
        for row in x.tolist()
    ]


def bars(x, top, rows, unit):
    """Yield the rows of one rank as bars with a field per input, or an empty bar for zeros."""
    if not rows:
        yield f'<text x="{x + BAR / 2:g}" y="{top + 14:g}" class="pale">no rows</text>'
    for place, row in enumerate(rows):
        y = top + place * PITCH
        for column, sources in enumerate(row):
            field = (unit - 2) / max(len(sources), 1)
            for part, (rank, number) in enumerate(sources or [(None, "0")]):
                left = x + column * unit + part * field
                look = 'class="zeros"' if rank is None else f'fill="{figures.RANKS[rank]}"'
                words = "pale" if rank is None else "on"
                yield (
                    f'<rect x="{left:g}" y="{y:g}" width="{field - 1:g}" height="{HEIGHT}" rx="3" '
                    f'{look}/><text x="{left + field / 2 - 0.5:g}" y="{y + 14.5:g}" '
                    f'class="{words}">{number}</text>'
                )


def lines(found, tops, unit):
    """Yield a line from each row of an input to each row of a result that contains some of it."""
    starts = {}
    for rank, (before, _) in enumerate(found):
        for place, row in enumerate(before):
            y = tops[rank] + place * PITCH + HEIGHT / 2
            starts |= dict.fromkeys(row_sources(row), (LEFT + len(row) * unit + 1, y))
    for rank, (_, after) in enumerate(found):
        for place, row in enumerate(after):
            y = tops[rank] + place * PITCH + HEIGHT / 2
            # one line per row of the input, also where several of its entries arrive
            drawn = {starts[source]: source[0] for source in row_sources(row)}
            for (x, start), owner in drawn.items():
                end, bend = RIGHT - 3, (RIGHT - x) / 2
                colour = figures.LINES[owner]
                yield (
                    f'<path d="M{x:g} {start:g}C{x + bend:g} {start:g} {end - bend:g} {y:g} '
                    f'{end - 6:g} {y:g}" stroke="{colour}"/><path d="M{end:g} {y:g}l-8 -4v8z" '
                    f'fill="{colour}" stroke="none"/>'
                )


def row_sources(row):
    return [source for entry in row for source in entry]


def picture(found):
    """Return the SVG of the inputs and results of all ranks."""
    columns = max(len(row) for of_rank in found for rows in of_rank for row in rows)
    unit, tops, y = BAR / columns, [], TOP
    for before, after in found:
        tops.append(y)
        y += max(len(before), len(after), 1) * PITCH + GAP
    ink, pale = figures.INK, figures.PALE
    style = (
        f"text{{font:13px sans-serif;text-anchor:middle;fill:{ink}}}.on{{fill:black}}"
        f".pale{{fill:{pale}}}.zeros{{fill:none;stroke:{pale}}}path{{fill:none;stroke-width:1.6}}"
    )
    parts = [f'<text x="{LEFT + BAR / 2:g}" y="14">before</text>']
    parts.append(f'<text x="{RIGHT + BAR / 2:g}" y="14">after</text>')
    parts += lines(found, tops, unit)
    for rank, (before, after) in enumerate(found):
        parts += [
            f'<text x="{x:g}" y="{tops[rank] + 14:g}" class="pale">rank {rank}</text>'
            for x in (LEFT / 2, WIDTH - LEFT / 2)
        ]
        parts += [*bars(LEFT, tops[rank], before, unit)]
        parts += [*bars(RIGHT, tops[rank], after, unit)]
    height = y - GAP + 4
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<style>{style}</style>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def pictures(run):
    """Return the content of each file; ``run(fn, argument)`` runs a function on three ranks."""
    found = {f"{name}.svg": picture(run(follow, name)) for name in CALLS}
    return found | {str(twin(Path(name))): darkened(svg) for name, svg in found.items()}


def darkened(svg):
    """Return a picture in the colours of a dark page."""
    for light, dark in ON_DARK.items():
        svg = svg.replace(light, dark)
    return svg


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with vc.Ranks(3) as ranks:
        for name, svg in pictures(ranks.run).items():
            (FOLDER / name).write_text(svg)
