"""Initial weights that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from inspect import Parameter, signature
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops.broadcast import broadcast
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import ShardSpec
from varcomm.transport.group import Group

Fill: TypeAlias = Callable[[Tensor, torch.Generator], object]

_TILE = 64, 256

# Two shapes of equal length, and of other sums, maxima and minima.
_PROBES = (16, 64), (8, 128)


def drawing(init: Any) -> Fill:
    """Return `init` as ``fill(tensor, generator)``; ArgumentError if it cannot draw tiles.

    `init` gets the generator by keyword if it has a parameter of this name, and otherwise in second
    place if it needs two arguments. Other functions draw from torch's default generator, which has
    the state of the generator during the call.
    """
    if not callable(init):
        raise ArgumentError(f"init must be init(tensor, generator) or init(tensor); got {init!r}.")
    fill = _with_generator(init)
    with ThreadPoolExecutor(1) as threads:  # FakeTensorMode, without values, is of one thread
        depends_on_shape = threads.submit(_depends_on_shape, fill).result()
    if depends_on_shape:
        inner = init.func if isinstance(init, partial) else init
        raise ArgumentError(
            f"init draws each element by itself, and {getattr(inner, '__name__', inner)} needs the "
            f"shape of the full weight: tensors of shapes {_PROBES[0]} and {_PROBES[1]} got other "
            "values from the same generator. Write init(tensor, generator), as lambda x, "
            "generator: x.normal_(0, std, generator=generator), with the std of the full shape."
        )
    return fill


def _depends_on_shape(fill: Fill) -> bool:
    with torch.device("cpu"), torch.no_grad():
        one, other = (torch.zeros(shape) for shape in _PROBES)
        for probe in (one, other):
            fill(probe, torch.Generator("cpu").manual_seed(0))
        return not torch.allclose(one.view(-1), other.view(-1), rtol=0, atol=0, equal_nan=True)


def _with_generator(init: Any) -> Fill:
    try:
        parameters = signature(init).parameters
    except (TypeError, ValueError):  # of a function in C, as torch.Tensor.zero_
        return partial(_from_default, init)
    if "generator" in parameters:
        return lambda tensor, generator: init(tensor, generator=generator)
    places = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    needed = [p for p in parameters.values() if p.kind in places and p.default is p.empty]
    several = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
    return init if len(needed) > 1 or several else partial(_from_default, init)


def _from_default(init: Callable[[Tensor], object], tensor: Tensor, generator: Any) -> None:
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        init(tensor)
    finally:
        torch.set_rng_state(before)


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
    # torch's CPU generators use 32 bits of a seed. Hashing seed and number together could return
    # equal seeds for two tiles of one weight the same seed; these sums are distinct within a
    # weight.
    hashed = int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
    generator = torch.Generator("cpu").manual_seed((hashed + number) % 2**32)
    values = torch.empty(tuple(shape), dtype=accumulation_dtype(dtype, True), device="cpu")
    with torch.no_grad():
        fill(values, generator)
    return values


@contextmanager
def numbers_of_first(group: Group, device: torch.device) -> Iterator[None]:
    """Draw on all ranks what the default generator of the first rank draws; collective.

    Ranks whose generator has another state have that state again after the block.
    """
    is_cpu = device.type in ("cpu", "meta")
    source = torch.random if is_cpu else torch.get_device_module(device)
    place = () if is_cpu else (device,)
    own = source.get_rng_state(*place)
    first = broadcast(own.to(group.device()), group=group.process_group).cpu()
    source.set_rng_state(first, *place)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            source.set_rng_state(own, *place)
