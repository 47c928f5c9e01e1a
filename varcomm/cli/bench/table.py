"""The table that grows as cases are measured, and what is said around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from varcomm.cli.bench.case import Result
from varcomm.cli.bench.goals import verdicts
from varcomm.cli.bench.peers.offer import PEERS
from varcomm.cli.bench.text import lines, markdown, seconds_text, short_bytes

__all__ = ["condensed", "goals", "head", "reasons", "row"]

_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
_COLUMNS = (
    ("operation", 20),
    ("pass", -8),
    ("ranks", 5),
    ("dtype", 5),
    ("bytes", 10),
    ("shards", 7),
    ("skew", 5),
    ("us", 8),
    ("quartiles", 15),
    ("algbw", 7),
    ("busbw", 7),
    ("wire", 5),
    ("floor us", 8),
    ("schedule", -17),
    ("/floor", 6),
)


def head() -> str:
    """Return the line above the table: its columns, and the peers."""
    names = [name for name, _ in _COLUMNS] + list(PEERS)
    return _aligned(names)


def row(result: Result) -> str:
    """Return the line of a result; a peer's column says how many times as long it takes."""
    case, ours, floor = result.case, result.ours, result.floor
    peers = (result.peers.get(name) for name in PEERS)
    return _aligned(
        [
            case.operation,
            case.direction,
            str(case.world),
            _SHORT.get(case.dtype, case.dtype),
            str(result.nbytes),
            case.skew,
            f"{result.skew:.2f}",
            seconds_text(ours.seconds),
            f"{seconds_text(ours.low)}-{seconds_text(ours.high)}",
            f"{result.algbw:.3g}",
            f"{result.busbw:.3g}",
            f"{result.wire:.2f}",
            seconds_text(floor.seconds) if floor else "-",
            floor.name if floor else "-",
            f"{floor.ratio:.2f}" if floor else "-",
            *(f"{1 / peer.ratio:.2f}" if peer else "-" for peer in peers),
        ]
    )


def _aligned(cells: Sequence[str]) -> str:
    widths = [width for _, width in _COLUMNS] + [max(6, len(name)) for name in PEERS]
    widths[0] = -widths[0]
    return "  ".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def reasons(results: Sequence[Result]) -> Iterator[str]:
    """Say who could not run what, and why, each once."""
    said: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for result in results:
        for name, reason in result.cannot.items():
            operations = said.setdefault((name, reason), {})
            operations.setdefault(result.case.operation, {})[result.case.direction] = None
    for (name, reason), operations in sorted(said.items()):
        what = (
            operation if len(directions) == 2 else f"{operation} {next(iter(directions))}"
            for operation, directions in operations.items()
        )
        yield f"{name}: {reason} ({', '.join(what)})"


def goals(results: Sequence[Result], as_markdown: bool = False) -> list[str]:
    """Return the goals and how they fared, with the case that is furthest off."""
    rows = [["goal", "limit", "cases", "held", "median", "worst", "where"]]
    for verdict in verdicts(results):
        goal, unit = verdict.goal, " us" if verdict.goal.unit == "us" else ""
        rows.append(
            [
                goal.text,
                f"{goal.limit:.4g}{unit}",
                str(verdict.cases),
                str(verdict.held),
                f"{verdict.median:.2f}",
                f"{verdict.worst:.2f}",
                verdict.where,
            ]
        )
    if len(rows) == 1:
        return []
    return markdown(rows) if as_markdown else [line.rstrip() for line in lines(rows, left=1)]


def condensed(results: Sequence[Result]) -> list[str]:
    """Return tables of Markdown, one for each suite, engine and number of ranks.

    A line is an operation in one direction, a column a number of bytes; a cell has the median time
    of even shards (or of the first kind there is) of the first dtype, and the smallest and largest
    ratio to the floor over all dtypes and kinds of shards.
    """
    text: list[str] = []
    tables: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        case = result.case
        tables.setdefault((case.suite, case.engine, case.world), []).append(result)
    for (suite, engine, world), members in tables.items():
        text += [f"Suite `{suite}` on {engine}, {world} ranks:", "", *_by_bytes(members), ""]
    return text


def _by_bytes(members: Sequence[Result]) -> list[str]:
    sizes = sorted({result.case.nbytes for result in members})
    cells: dict[tuple[str, str], dict[int, list[Result]]] = {}
    for result in members:
        key = result.case.operation, result.case.direction
        cells.setdefault(key, {}).setdefault(result.case.nbytes, []).append(result)
    rows = [["operation", "pass", *map(short_bytes, sizes)]]
    for (operation, direction), found in cells.items():
        rows.append([f"`{operation}`", direction, *(_cell(found.get(size, [])) for size in sizes)])
    return markdown(rows)


def _cell(members: Sequence[Result]) -> str:
    if not members:
        return ""
    ratios = sorted(result.floor.ratio for result in members if result.floor)
    span = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else ""
    return f"{seconds_text(members[0].ours.seconds)} us{span}"
