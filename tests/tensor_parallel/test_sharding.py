"""How parameters are sharded, marks that stay, and pieces of uneven sizes."""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import GroupError, ShardSizes
from varcomm.sharding import ShardSpec, mark, shard_spec
from varcomm.tensor_parallel.layout import ShardedModule, param_is_not_tensor_parallel_duplicate
from varcomm.tensor_parallel.mappings import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_chunks,
    vocab_range,
)
from varcomm.testing import gradcheck, gradgradcheck
from varcomm.transport.group import resolve

BLOCKS = {
    1: [[[4]], [[3], [0], [2]]],
    2: [[[2, 2]], [[3, 0], [1, 2]], [[0, 4]]],
    3: [[[2, 2, 1]], [[2, 0, 1], [0, 0, 3], [1, 1, 1]], [[0, 5, 0], [1, 0, 0]]],
    5: [[[1, 1, 1, 1, 1]], [[0, 2, 0, 3, 1], [1, 0, 0, 0, 4]]],
}


def by_hand(whole, blocks, rank, dim):
    """This rank's part, by cutting the whole into blocks and each into parts."""
    parts, first = [], 0
    for block in blocks:
        begin = first + sum(block[:rank])
        parts += [whole.select(dim, row) for row in range(begin, begin + block[rank])]
        first += sum(block)
    return torch.stack(parts, dim) if parts else whole.narrow(dim, 0, 0)


def sharded_and_back(rank, ranks, dim):
    failures = []
    for blocks in BLOCKS[ranks]:
        spec = ShardSpec.of(blocks if len(blocks) > 1 else blocks[0], dim)
        shape = [2, 3, 2]
        shape[dim] = spec.total
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        own = spec.shard(whole)
        before = whole.clone()
        back = spec.gather(own)
        right = torch.equal(own, by_hand(whole, blocks, rank, dim))
        own += 1  # a copy: the whole does not change with it
        good = [
            right,
            torch.equal(back, before),
            torch.equal(whole, before),
            spec.local == own.shape[dim],
            [stop - start for start, stop in spec.ranges(rank)] == [b[rank] for b in blocks],
            spec.blocks == tuple(ShardSizes(block) for block in blocks),
        ]
        if not all(good):
            failures.append((blocks, good))
    return failures


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shard_and_gather(worlds, ranks, dim):
    assert worlds.run(ranks, sharded_and_back, ranks, dim) == [[]] * ranks


def gathered_once(rank):
    spec = ShardSpec.of([[2, 0, 1], [0, 1, 3]], 1)
    own = torch.randn(2, spec.local, dtype=torch.float64)
    with varcomm.trace() as calls:
        spec.gather(own)
    gradcheck(spec.gather, own)
    gradgradcheck(lambda x: spec.gather(x) ** 2, own)
    return [(call.name, call.received) for call in calls]


def test_gather_is_one_all_gather_and_differentiable(worlds):
    answers = worlds.run(3, gathered_once)
    assert answers == [
        [("all_gather_v", 8 * 2 * 5)],
        [("all_gather_v", 8 * 2 * 6)],
        [("all_gather_v", 8 * 2 * 3)],
    ]


def in_subgroup(rank):
    members = [1, 2]
    group = dist.new_group(members)
    if rank not in members:
        return None
    spec = ShardSpec.of([1, 3], group=group)
    own = torch.full((spec.local,), rank)
    first = param_is_not_tensor_parallel_duplicate(torch.zeros(2), group)
    whole, piece = spec.gather(own).tolist(), split_tensor_into_1d_chunks(torch.arange(3), group)
    return whole, piece.tolist(), gather_split_1d_tensor(piece, group=group).tolist(), first


def test_subgroup_without_rank_0(worlds):
    none, first, second = worlds.run(3, in_subgroup)
    assert none is None
    assert first == ([1, 2, 2, 2], [0, 1], [0, 1, 2], True)
    assert second == ([1, 2, 2, 2], [2], [0, 1, 2], False)


class Layer(ShardedModule):
    def __init__(self):
        super().__init__()
        self.spec = ShardSpec.of([2, 1])
        self.weight = mark(torch.nn.Parameter(torch.ones(self.spec.local, 4)), self.spec)
        self.register_parameter("none", None)
        self.bias = torch.nn.Parameter(torch.zeros(4))


def marks(rank):
    model = torch.nn.Sequential(Layer())
    spec = model[0].spec
    alike = copy.deepcopy(model)
    moved = copy.deepcopy(alike).to(torch.float64)
    models = [model, alike, moved, moved.to("meta"), moved.to_empty(device="cpu")]
    sharded = [shard_spec(m[0].weight) is spec for m in models]
    replicated = [shard_spec(m[0].bias) is None for m in models]
    counted = [param_is_not_tensor_parallel_duplicate(p) for p in model.parameters()]
    alone = alike[0].weight is not model[0].weight and type(alike[0].weight) is torch.nn.Parameter
    return all(sharded), all(replicated), alone, counted


def test_marks_stay(worlds):
    """The type stays Parameter: torch's optimizers take their fast path for no other."""
    assert worlds.run(2, marks) == [
        (True, True, True, [True, True]),
        (True, True, True, [True, False]),
    ]


def saved(rank):
    layer = Layer()
    file = io.BytesIO()
    torch.save([layer.state_dict(), layer.state_dict(keep_vars=True)], file)
    file.seek(0)
    plain, kept = torch.load(file, weights_only=True)
    try:
        pickle.dumps(layer)
    except GroupError as error:
        refused = str(error)
    return plain["weight"].shape, shard_spec(kept["weight"]), list(plain), refused


def test_state_dicts_know_nothing_of_marks(worlds):
    for rank, (shape, spec, names, refused) in enumerate(worlds.run(2, saved)):
        assert (tuple(shape), spec, names) == ((2 - rank, 4), None, ["weight", "bias"])
        assert re.search(r"tied to the ranks of its group .* Keep state_dict\(\)", refused)


def pieces(rank, ranks):
    answers = []
    for shape in ((), (0,), (2, 3), (7, 1, 2)):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x.requires_grad_()
        piece = split_tensor_into_1d_chunks(x)
        whole = gather_split_1d_tensor(piece, x.numel()).view(shape)
        asked = gather_split_1d_tensor(piece).view(shape)
        (grad,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        answers += [
            torch.equal(whole, x),
            torch.equal(asked, x),
            piece.shape == (ShardSizes.balanced(x.numel(), ranks)[rank],),
            piece.untyped_storage().nbytes() <= 8 * max(len(piece), 1),
            torch.allclose(grad, 3 * x**2),
            torch.allclose(second, 6 * x),
        ]
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_of_elements(worlds, ranks):
    for answers in worlds.run(ranks, pieces, ranks):
        assert answers == [True] * 24


def test_parts_of_the_last_dimension():
    x = torch.arange(12).view(2, 6)
    a, b, c = split_tensor_along_last_dim(x, [1, 0, 5])
    assert (a.tolist(), b.shape, c.tolist()) == ([[0], [6]], (2, 0), x[:, 1:].tolist())
    assert c.data_ptr() == x[:, 1:].data_ptr()
    copied = split_tensor_along_last_dim(x, (1, 5), contiguous=True)[1]
    assert copied.is_contiguous()
    assert copied.data_ptr() != x[:, 1:].data_ptr()


def test_ranges_of_ids():
    assert [vocab_range([5, 0, 3], rank) for rank in range(3)] == [(0, 5), (5, 5), (5, 8)]


def of_group(rank):
    return ShardSpec(resolve(None), 0, (ShardSizes([1, 2]),)) == ShardSpec.of([1, 2])


def test_specs_compare(worlds):
    assert worlds.run(2, of_group) == [True, True]
