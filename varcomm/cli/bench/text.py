"""Numbers as people read them, and columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["lines", "markdown", "seconds_text", "short_bytes"]


def short_bytes(count: int) -> str:
    """Write a number of bytes.

    >>> short_bytes(768), short_bytes(16384), short_bytes(3 * 2**20 // 2)
    ('768', '16K', '1.5M')
    """
    number, unit = float(count), ""
    for bigger in "KMG":
        if number < 1024:
            break
        number, unit = number / 1024, bigger
    return f"{number:.3g}{unit}"


def seconds_text(seconds: float) -> str:
    """Write seconds as microseconds, of three digits where there are no more.

    >>> seconds_text(1.2345e-3), seconds_text(12.345e-6)
    ('1234', '12.3')
    """
    micro = seconds * 1e6
    return f"{micro:.3g}" if micro < 1000 else f"{micro:.0f}"


def lines(rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Put cells into columns, the first `left` ones to the left and the others to the right.

    >>> lines([["a", "b", "c"], ["long", "b", "300"]])
    ['a     b    c', 'long  b  300']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Make a table of Markdown; the first row is its head.

    >>> markdown([["a", "b"], ["1", "2"]])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|" + " --- |" * len(rows[0]), *body]
