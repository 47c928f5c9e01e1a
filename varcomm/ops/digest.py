"""Digests of values, which ranks compare in place of the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
import torch
from torch._subclasses.fake_tensor import is_fake

from varcomm.errors import DisagreementError
from varcomm.ops import packing


def digest(value: object) -> object:
    """Return a digest of a dense tensor, array or plain value; of others, only their type.

    Values from different seeds on different ranks would be a wrong result that no rank can see.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        if value.is_meta or is_fake(value):  # which have no values
            return str(value.dtype), tuple(value.shape)
        content = packing.as_bytes(packing.flat(value.detach().cpu())).numpy()
        return str(value.dtype), tuple(value.shape), crc32(content.data)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, crc32(value.tobytes())
    if isinstance(value, str | int | float | complex | None):
        return repr(value)  # not the value itself: NaN is NaN on all ranks
    return type(value).__name__


def differing(given: Sequence[Mapping[str, object]]) -> tuple[list[int], list[str]]:
    """Return the ranks whose digests differ from those of rank 0, and the names that differ."""
    others = [rank for rank, parts in enumerate(given) if parts != given[0]]
    names = dict.fromkeys(name for parts in given for name in parts)
    absent = object()
    return others, [
        name
        for name in names
        if any(parts.get(name, absent) != given[0].get(name, absent) for parts in given)
    ]


def require_equal(what: str, given: Sequence[Mapping[str, object]]) -> None:
    """Raise DisagreementError if the words of ranks differ; without communication."""
    _, names = differing(given)
    if names:
        each = [f"rank {rank} has {words.get(names[0])}" for rank, words in enumerate(given)]
        raise DisagreementError(f"{what}: ranks disagree on {names[0]}: {'; '.join(each)}.")
