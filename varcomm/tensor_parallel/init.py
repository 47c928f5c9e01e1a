"""Initial weights that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec

Fill: TypeAlias = Callable[[Tensor, torch.Generator], object]

# A weight is cut along its first two dimensions, a vector into as many elements.
_ROWS, _COLUMNS = 64, 256


def initialised(
    shape: Sequence[int],
    spec: ShardSpec | None,
    fill: Fill,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return this rank's shard of a random weight that is the same on any number of ranks.

    The full weight, of `shape`, is cut into tiles of 64 x 256, each drawn by its own generator from
    `seed`, which is different for each weight. A rank draws only the tiles that meet its shard,
    always on the CPU, so that all devices get the same numbers; floats narrower than 4 bytes are
    drawn in fp32 and rounded. ``fill(tensor, generator)`` draws each element in place.
    """
    if not shape:
        return initialised((1,), spec, fill, seed, dtype, device).view(())
    shape = tuple(shape)
    dim, own, local = 0, [(0, shape[0])], list(shape)
    if spec is not None:
        dim, own = spec.dim, spec.ranges(spec.group.rank)
        if dim >= len(shape) or shape[dim] != spec.total:
            raise ArgumentError(f"{spec} has {spec.total} rows along dim {dim}; got {shape}.")
        local[dim] = spec.local
    weight = torch.empty(local, dtype=dtype, device=device)
    if weight.is_meta:
        return weight
    tile = (_ROWS * _COLUMNS,) if len(shape) == 1 else (_ROWS, _COLUMNS, *shape[2:])
    placed = 0
    for start, stop in own:
        for number, begins, extent in _tiles(shape, tile, dim, start, stop):
            values = _drawn(extent, fill, seed, number, weight.dtype)
            low, high = max(start, begins[dim]), min(stop, begins[dim] + extent[dim])
            into = [slice(b, b + n) for b, n in zip(begins, extent, strict=True)]
            into[dim] = slice(placed + low - start, placed + high - start)
            weight[tuple(into)] = values.narrow(dim, low - begins[dim], high - low)
        placed += stop - start
    return weight


def _tiles(
    shape: Sequence[int], tile: Sequence[int], dim: int, start: int, stop: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield number, first indices and extent of each tile that meets ``start...stop``."""
    if start == stop or 0 in shape:
        return
    counts = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
    meeting = [range(count) for count in counts]
    meeting[dim] = range(start // tile[dim], -(-stop // tile[dim]))
    for corner in product(*meeting):
        number = 0
        for place, count in zip(corner, counts, strict=True):
            number = number * count + place
        begins = [place * t for place, t in zip(corner, tile, strict=True)]
        yield number, begins, [min(t, n - b) for t, n, b in zip(tile, shape, begins, strict=True)]


def _drawn(shape: Sequence[int], fill: Fill, seed: int, number: int, dtype: torch.dtype) -> Tensor:
    # torch's CPU generators use 32 bits of a seed. Hashing seed and number together could give two
    # tiles of one weight the same seed; these sums are distinct within a weight.
    hashed = int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
    generator = torch.Generator("cpu").manual_seed((hashed + number) % 2**32)
    values = torch.empty(tuple(shape), dtype=accumulation_dtype(dtype, True), device="cpu")
    with torch.no_grad():
        fill(values, generator)
    return values
