"""Tensors that share memory, which would not be one any more when one of them has moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["overlapping"]


def overlapping(
    moving: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> tuple[str, str] | None:
    """Return the names of a tensor that is to move and of another that has elements of it.

    >>> x = torch.zeros(4)
    >>> overlapping({"a": x[:3]}, {"b": x[2:]}), overlapping({"a": x[::2]}, {"b": x[1::2]})
    (('a', 'b'), None)
    """
    spans = []
    for name, value in {**others, **moving}.items():
        if value.numel() and value.layout == torch.strided and not value.is_meta:
            begin, width = value.data_ptr(), _width(value)
            spans.append((str(value.device), begin, begin + width, name, value))
    spans.sort(key=lambda span: span[:4])
    open_spans: list[tuple[str, int, int, str, torch.Tensor]] = []
    for span in spans:
        open_spans = [one for one in open_spans if one[0] == span[0] and one[2] > span[1]]
        for one in open_spans:
            if (span[3] in moving or one[3] in moving) and _meet(one[4], span[4]):
                first, second = sorted((one[3], span[3]), key=lambda name: name not in moving)
                return first, second
        open_spans.append(span)
    return None


def _width(value: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the last that a tensor has."""
    both = zip(value.shape, value.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in both)) * value.element_size()


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors, whose spans overlap, have a byte in common."""
    begin = min(a.data_ptr(), b.data_ptr())
    length = max(value.data_ptr() - begin + _width(value) for value in (a, b))
    bytes_of = torch.zeros(length, dtype=torch.bool)
    seen = []
    for value in (a, b):
        size = value.element_size()
        strides = [stride * size for stride in value.stride()]
        place = value.data_ptr() - begin
        seen.append(bytes_of.as_strided((*value.shape, size), (*strides, 1), place))
    seen[0].fill_(True)
    return bool(seen[1].any())
