"""Initial weights that do not depend on the number of ranks, though no rank holds the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import product
from typing import TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec

__all__ = ["Fill", "check_fill", "initialised"]

Fill: TypeAlias = Callable[[torch.Tensor, torch.Generator], object]

# Of two dimensions and more, the first two are cut; a vector is cut into as many elements.
_ROWS, _COLUMNS = 64, 256


def initialised(
    shape: Sequence[int],
    spec: ShardSpec | None,
    fill: Fill,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return this rank's part of a random weight that is the same on any number of ranks.

    The whole is cut into tiles of 64 x 256, each drawn by a generator of its own; of these a rank
    draws the ones that meet its part, on the CPU, so that all devices get the same numbers.

    Parameters
    ----------
    shape : sequence of int
        Of the whole.
    spec : ShardSpec, optional
        How it is sharded; None draws the whole.
    fill : callable
        ``fill(tensor, generator)`` draws each element of a tensor in place, all from the same
        distribution, e.g. ``lambda t, g: t.uniform_(-a, a, generator=g)``.
    seed : int
        The same on all ranks, and another one for each weight:
        :func:`~varcomm.tensor_parallel.agreement.module_seed`.
    dtype : torch.dtype, optional
        Floats narrower than 4 bytes are drawn in fp32 and rounded. None is torch's default.
    device : torch.device or str, optional
        Where the result is to be; None is torch's default. Nothing is drawn for ``"meta"``.

    Raises
    ------
    ArgumentError
        If `spec` is of a tensor of another size.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.initial import initialised
    >>> from varcomm.sharding import ShardSpec
    >>> normal = lambda tensor, generator: tensor.normal_(generator=generator)
    >>> def fn(rank):
    ...     spec = ShardSpec.of([1, 2])
    ...     return spec.gather(initialised((3, 2), spec, normal, seed=5))
    >>> torch.equal(varcomm.launch(fn, 2)[0], initialised((3, 2), None, normal, seed=5))
    True
    """
    if not shape:
        return initialised((1,), spec, fill, seed, dtype, device).view(())
    shape = tuple(shape)
    dim, own, local = 0, [(0, shape[0])], list(shape)
    if spec is not None:
        dim, own = spec.dim, spec.ranges(spec.group.rank)
        if dim >= len(shape) or shape[dim] != spec.total:
            raise ArgumentError(f"{spec} is of {spec.total} rows along dim {dim}; got {shape}.")
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
    """Yield the tiles that meet ``start...stop`` along `dim`: number, where it begins, extent."""
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


def check_fill(init: object) -> None:
    """Raise ArgumentError if a layer's `init` is neither None nor a function."""
    if init is not None and not callable(init):
        raise ArgumentError(f"init must be a function of a tensor and a generator; got {init!r}.")


def _drawn(
    shape: Sequence[int], fill: Fill, seed: int, number: int, dtype: torch.dtype
) -> torch.Tensor:
    """Draw one tile."""
    # torch's CPU generators use 32 bits of a seed. A hash of seed and number would give some tiles
    # of a large weight the same numbers; of these sums no two are equal within a weight.
    hashed = int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
    generator = torch.Generator("cpu").manual_seed((hashed + number) % 2**32)
    values = torch.empty(tuple(shape), dtype=accumulation_dtype(dtype, True), device="cpu")
    with torch.no_grad():
        fill(values, generator)
    return values
