"""Initial weights that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec

Fill: TypeAlias = Callable[[Tensor, torch.Generator], object]

_TILE = 64, 256


def initialised(
    shape: Sequence[int],
    spec: ShardSpec | None,
    fill: Fill,
    seed: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Tensor:
    """Return this rank's shard of a random weight that is the same on any number of ranks.

    The full weight, of one or two dimensions, is cut into tiles of 64 x 256, each drawn by its own
    generator from `seed`, which is different for each weight. A rank draws only the tiles that meet
    its shard, always on the CPU, so that all devices get the same numbers. Floats narrower than 4
    bytes are drawn in fp32 and rounded. ``fill(tensor, generator)`` draws each element in place.
    """
    whole = (1, *shape)[-2:]  # a vector is one row
    dim, own, local = 0, [(0, whole[0])], list(whole)
    if spec is not None:
        dim, own = spec.dim + 2 - len(shape), spec.ranges(spec.group.rank)
        local[dim] = spec.local
    weight = torch.empty(local, dtype=dtype, device=device)
    if weight.is_meta:
        return weight.view(weight.shape[2 - len(shape) :])
    corners = product(range(0, whole[0], _TILE[0]), range(0, whole[1], _TILE[1]))
    for number, corner in enumerate(corners):
        extent = [min(t, n - c) for t, n, c in zip(_TILE, whole, corner, strict=True)]
        low, tile, placed = corner[dim], None, 0
        for start, stop in own:
            first, last = max(start, low), min(stop, low + extent[dim])
            if first < last:
                tile = _drawn(extent, fill, seed, number, weight.dtype) if tile is None else tile
                into = weight.narrow(1 - dim, corner[1 - dim], extent[1 - dim])
                into = into.narrow(dim, placed + first - start, last - first)
                into.copy_(tile.narrow(dim, first - low, last - first))
            placed += stop - start
    return weight.view(weight.shape[2 - len(shape) :])


def _drawn(shape: Sequence[int], fill: Fill, seed: int, number: int, dtype: torch.dtype) -> Tensor:
    # torch's CPU generators use 32 bits of a seed. Hashing seed and number together could give two
    # tiles of one weight the same seed; these sums are distinct within a weight.
    hashed = int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
    generator = torch.Generator("cpu").manual_seed((hashed + number) % 2**32)
    values = torch.empty(tuple(shape), dtype=accumulation_dtype(dtype, True), device="cpu")
    with torch.no_grad():
        fill(values, generator)
    return values
