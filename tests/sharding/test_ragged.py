"""Ragged layouts: units per rank, moves between two layouts, files of torch, and placements."""

import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Placement

import varcomm as vc
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.sharding import (
    Box,
    RaggedSpec,
    Sharded,
    ShardSpec,
    from_dtensor,
    to_dtensor,
)
from varcomm.testing import dot_test, gradcheck, gradgradcheck

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)

SHAPE = (6, 10, 2)


def layouts(ranks):
    """Rows, rows of two dimensions and elements; in even and odd units, empty ones too."""
    first, last = [1] + [0] * (ranks - 1), [0] * (ranks - 1) + [1]
    ends = list(first)
    ends[-1] += 2
    even = [1] * ranks if ranks != 5 else [1, 1, 0, 2, 2]
    found = [((0,), first), ((0,), ends), ((0, 1), last), ((0, 1, 2), even), ((0, 1), even)]
    found.append(((0, 1, 2), [113, *[0] * (ranks - 2), 7] if ranks > 1 else [8]))
    return [RaggedSpec.of(SHAPE, *each) for each in found]


@on_ranks(*WORLDS)
def test_moves_and_files(rank, ranks, tmp_path):
    whole = torch.arange(120.0).view(SHAPE)
    for number, before in enumerate(layouts(ranks)):
        own = before.shard(whole)
        assert own.shape == before.local_shape
        assert torch.equal(before.gather(own), whole)
        again = RaggedSpec.from_sharded(before.wrap(own))
        assert again.sizes == before.sizes
        assert RaggedSpec.from_sharded(again.wrap(own.view(-1))) == again
        for after in layouts(ranks):
            with vc.trace() as calls:
                found = before.redistribute(own, after)
            assert torch.equal(found, after.shard(whole))
            stays = {*before.sizes.range(rank)} & {*after.sizes.range(rank)}
            assert calls.total.sent == 4 * (before.sizes[rank] - len(stays))
        path = tmp_path / str(number)
        dcp.save({"w": before.wrap(own)}, checkpoint_id=path)
        full = {"w": torch.zeros(SHAPE)}
        dcp.load(full, checkpoint_id=path)
        assert torch.equal(full["w"], whole)
        dcp.save(full, checkpoint_id=tmp_path / f"full {number}")
        for start, after in zip((path, tmp_path / f"full {number}"), layouts(ranks), strict=False):
            target = torch.zeros(after.local_shape)
            dcp.load({"w": after.wrap(target)}, checkpoint_id=start)
            assert torch.equal(target, after.shard(whole))


def derivatives(rank):
    before, after = (RaggedSpec.of((2, 3), (0, 1), units) for units in ((1, 0, 5), (3, 2, 1)))
    own = torch.randn(before.sizes[rank], dtype=torch.float64, requires_grad=True)

    def move(x):
        return before.redistribute(x, after)

    dot_test(move, own)
    gradcheck(lambda x: move(x).exp(), own)
    gradgradcheck(lambda x: move(x).exp(), own)
    cotangent = torch.randn(after.sizes[rank], dtype=torch.float64)
    (back,) = torch.autograd.grad(move(own), own, cotangent)
    assert torch.equal(back, after.redistribute(cotangent, before))
    whole = before.gather(own)
    (gradient,) = torch.autograd.grad((whole * torch.arange(6).view(2, 3)).sum(), own)
    assert gradient.tolist() == [3.0 * element for element in before.sizes.range(rank)]


def of_other_shards(rank):
    """The fewest dimensions and units of rows, of a flat piece, and of an empty tensor."""
    spec = ShardSpec.of([4, 0, 2])
    rows = Sharded.of(torch.zeros(spec.local, 5), spec)
    found = RaggedSpec.from_sharded(rows)
    assert (found.dims, found.local_units) == ((0,), (2, 0, 1))
    flat = Sharded.elements(torch.zeros([10, 5, 0][rank]), (3, 5), [0, 10, 15][rank])
    found = RaggedSpec.from_sharded(flat)
    assert (found.dims, found.local_units) == ((0,), (2, 1, 0))
    flat = Sharded.elements(torch.zeros([8, 0, 4][rank]), (2, 3, 2), [0, 8, 8][rank])
    found = RaggedSpec.from_sharded(flat)
    assert (found.dims, found.local_units) == ((0, 1), (2, 0, 1))
    nothing = RaggedSpec.from_sharded(Sharded((4, 0), [], torch.float32))
    assert (nothing.dims, nothing.local_units) == ((0, 1), (0, 0, 0))
    assert nothing.redistribute(torch.zeros(0), nothing).shape == (0,)
    columns = ShardSpec.of([1, 1, 1], 1)
    with pytest.raises(ArgumentError, match="are not consecutive elements"):
        RaggedSpec.from_sharded(Sharded.of(torch.zeros(2, 1), columns))
    backwards = Sharded((6,), [Box((4 - 2 * rank,), torch.zeros(2))])
    with pytest.raises(ArgumentError, match="rank 0 has elements from 4 on"):
        RaggedSpec.from_sharded(backwards)
    short = Sharded((6,), [Box((rank,), torch.zeros(1))])
    with pytest.raises(ArgumentError, match="ranks have 3 of the 6 elements"):
        RaggedSpec.from_sharded(short)
    with pytest.raises(DisagreementError, match="disagree on the shape"):
        RaggedSpec.from_sharded(Sharded((rank,), [], torch.float32))
    with pytest.raises(ArgumentError, match="must be a Sharded tensor; got Tensor"):
        RaggedSpec.from_sharded(torch.zeros(2))


def refused(rank):
    for arguments, words in (
        (((6, 2), (1,), (1, 1, 1)), "must be the first dimensions"),
        (((6, 2), (), (1, 1, 1)), "must be the first dimensions"),
        (((6, 2), (0, 1, 2), (1, 1, 1)), "must be the first dimensions"),
        (((6, 2), (0,), (1, 1)), "local_units must have one entry per rank"),
        (((6, 2), (0,), (1, -1, 1)), "local_units must hold ints from 0 on"),
        (((6, 2), (0,), (2, 1, 1)), "must divide the 6 rows"),
        (((6, 2), (0,), (0, 0, 0)), "must divide the 6 rows"),
    ):
        with pytest.raises(ArgumentError, match=words):
            RaggedSpec.of(*arguments)
    spec = RaggedSpec.of((6, 2), (0,), (1, 2, 0))
    part = torch.zeros(spec.local_shape)
    with pytest.raises(ArgumentError, match="this rank's part has shape"):
        spec.gather(torch.zeros(5, 2))
    if rank == 1:
        with pytest.raises(ArgumentError, match=r"Pass local\.contiguous\(\)"):
            spec.wrap(torch.zeros(2, spec.local_shape[0]).t())
    with pytest.raises(ArgumentError, match="target must have shape"):
        spec.redistribute(part, RaggedSpec.of((6, 1), (0,), (1, 1, 1)))
    with pytest.raises(ArgumentError, match="target must be a RaggedSpec; got 'b'"):
        spec.redistribute(part, "b")
    with pytest.raises(ArgumentError, match=r"the tensor has shape \(6, 2\)"):
        spec.shard(torch.zeros(2, 6))
    other = RaggedSpec.of((6, 2), (0,), (1, 1, 1) if rank else (3, 0, 0))
    with vc.debug(), pytest.raises(DisagreementError):
        spec.redistribute(part, other)


@pytest.mark.parametrize("check", [derivatives, of_other_shards, refused])
def test_on_three_ranks(worlds, check):
    worlds.run(3, check)


@dataclasses.dataclass(frozen=True)
class RaggedShard(Placement):
    """A stand-in for the placement that torch may have."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self):
        super().__init__()  # torch 2.11 asks for it


@on_ranks(3)
def test_a_placement_that_torch_may_have(rank):
    mesh, sizes = init_device_mesh("cpu", (3,)), [2, 0, 3]
    own = torch.full((sizes[rank], 2), float(rank), requires_grad=True)
    with pytest.raises(ArgumentError, match="a DTensor has no other sizes"):
        to_dtensor(own, sizes, group=mesh)
    try:
        torch.distributed.tensor.RaggedShard = RaggedShard
        whole = to_dtensor(own, sizes, group=mesh)
        assert whole.placements == (RaggedShard((0,), (2, 0, 3)),)
        assert whole.shape == (5, 2)
        back, spec = from_dtensor(whole)
        assert (spec.dim, spec.sizes) == (0, vc.ShardSizes(sizes))
        back.square().sum().backward()
        assert torch.equal(own.grad, 2 * own)
        with pytest.raises(ArgumentError, match="a DTensor has no other sizes"):
            to_dtensor(own.detach().t(), sizes, dim=1, group=mesh)
    finally:
        del torch.distributed.tensor.RaggedShard
