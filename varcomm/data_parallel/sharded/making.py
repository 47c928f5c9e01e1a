"""What all ranks do together before the first step: agree, make rows and pieces, and be equal."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.data_parallel.ending import tokens
from varcomm.data_parallel.sharded.arrivals import NAME, Arrivals
from varcomm.data_parallel.sharded.given import Given, read
from varcomm.data_parallel.sharded.inner_optimizer import Factory, made, options
from varcomm.data_parallel.sharded.settings import Settings
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.data_parallel.sharded.split import splits
from varcomm.data_parallel.sharded.traffic import Traffic
from varcomm.data_parallel.values import compare, make_equal
from varcomm.ops import packing
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.engine import wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group
from varcomm.transport.auxiliary_group import free_lanes, take_lane

__all__ = ["Made", "make"]

_WHAT = f"data_parallel.{NAME}"


@dataclass(frozen=True)
class Made:
    """What a ShardedGradients is made of."""

    settings: Settings
    given: Given
    shards: list[Shard]
    pieces: dict[str, Piece]
    optimizer: torch.optim.Optimizer
    arrivals: Arrivals


def make(params: object, factory: Factory, group: Group, module: object, asked: Settings) -> Made:
    """Make it on all ranks, or raise on all; collective."""

    def begin() -> tuple[Settings, Given, list[Shard]]:
        given = read(params, module)
        checked = asked.checked(given.module, group.size)
        given.check(group)
        values = list(given.parameters.values())
        found = splits(values, checked.sizes, group.size, checked.bucket_bytes)
        shards = [Shard(split, dict(enumerate(values)), group.rank) for split in found]
        return checked, given, shards

    def tell(begun: tuple[Settings, Given, list[Shard]]) -> dict[str, Any]:
        words = {"arguments": begun[0].describe(), **begun[1].describe()}
        return {"words": words, "free lanes": free_lanes(group), "token": next(tokens)}

    (settings, given, shards), told = agree_and_share(_WHAT, begin, tell, group)
    compare(_WHAT, [rank["words"] for rank in told])
    _make_equal(given, shards, group, settings.bucket_bytes)
    names = list(given.parameters)
    for shard in shards:
        shard.cut_pieces(names, settings.whole, *settings.of_pieces(shard.row))
    pieces = {piece.name: piece for shard in shards for piece in shard.pieces}
    optimizer, same = agree_and_share(
        f"{_WHAT}: optimizer_factory",
        lambda: made(factory, given, pieces, settings.whole),
        lambda one: {"the optimizer": {"kind": type(one).__name__, **options(one)}},
        group,
    )
    compare(_WHAT, same)
    lane = take_lane(group, [rank["free lanes"] for rank in told])
    arrivals = Arrivals(
        names,
        list(given.parameters.values()),
        shards,
        Traffic(group, lane),
        settings.scaling(group.size),
        settings.count,
        told[0]["token"],
        given.module is not None,
    )
    if lane is not None:
        weakref.finalize(arrivals, lane.give_back).atexit = False
    return Made(settings, given, shards, pieces, optimizer, arrivals)


def _make_equal(given: Given, shards: list[Shard], group: Group, bucket_bytes: int) -> None:
    """Overwrite parameters and buffers by those of rank 0, all that the module has."""
    with explained("ShardedGradients", group):
        for shard in shards:
            wait_for(packing.broadcast("broadcast", group, shard.row, 0))
    make_equal([value for _, value in given.written()], group, bucket_bytes)
