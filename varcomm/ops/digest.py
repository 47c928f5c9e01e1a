"""Digests of values, which ranks compare in place of the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
import torch

from varcomm.errors import DisagreementError
from varcomm.ops import packing
from varcomm.ops.checks import is_fake
from varcomm.transport.engine import as_bytes
from varcomm.transport.failure import spans


def digest(value: object) -> object:
    """Return a digest of a dense tensor, array or plain value; of others, only their type.

    Values from different seeds on different ranks would be a wrong result that no rank can see.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        if value.is_meta or is_fake(value):  # which have no values
            return str(value.dtype), tuple(value.shape)
        content = as_bytes(packing.flat(value.detach().cpu())).numpy()
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
    for name in differing(given)[1]:
        values = [words.get(name, "nothing") for words in given]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        raise DisagreementError(
            f"{what}: ranks disagree on {name}: rank 0 has {values[0]}; rank {others[0]} has "
            f"{values[others[0]]}. Ranks that differ from rank 0: {spans(others)}."
        )
