"""Buckets: parameters whose gradients travel in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BUCKET_BYTES", "cut", "dense", "gradient_dtype"]

BUCKET_BYTES = 25 * 2**20


def gradient_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient; for a buffer, its own dtype."""
    return getattr(value, "grad_dtype", None) or value.dtype  # of torch 2.9 or newer


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all its zeros; itself, if it has them."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def cut(values: Sequence[torch.Tensor], order: Sequence[int], nbytes: int) -> list[list[int]]:
    """Cut `values`, in `order`, into lists of indices of at most `nbytes` bytes.

    Each list has one dtype and device; a larger value has a list to itself. Lists are sorted by
    the place of their last value in `order`.

    >>> x, y, z = torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)
    >>> cut([x, y, z], [2, 1, 0], nbytes=28), cut([x, y, z], [2, 1, 0], nbytes=27)
    ([[1], [2, 0]], [[2], [1], [0]])
    >>> cut([x[:0], x], [0, 1], nbytes=8)
    [[0], [1]]
    """
    lists: list[list[int]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in order:
        value = values[index]
        key = gradient_dtype(value), value.device
        size = value.numel() * key[0].itemsize
        members, room = current.get(key, ([], 0))
        if size > room or not members:  # the first may have no elements
            members, room = [], nbytes
            lists.append(members)
        members.append(index)
        current[key] = members, room - size
    place = {index: number for number, index in enumerate(order)}
    return sorted(lists, key=lambda members: place[members[-1]])
