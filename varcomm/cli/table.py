"""Aligned columns of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines of aligned columns, of which the first `left` ones align to the left.

    >>> aligned([["a", "b", "c"], ["long", "b", "300"]], left=2)
    ['a     b    c', 'long  b  300']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in rows]
