"""ColumnParallelLinear and RowParallelLinear against torch.nn.Linear: what they compute and are."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import varcomm
from tests.ops.comparing import Failures
from tests.tensor_parallel.twins import REPLICATED, SPLITS, Sharded, compare_all, drawn, split
from tests.worlds import WORLDS, group_of_one, on_ranks
from varcomm import GroupError
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    shard_spec,
)
from varcomm.transport.group import resolve

IN, OUT = 4, 5
DOUBLE = torch.float64
KINDS = (ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True)
class InBlocks(Sharded):
    """Each rank has a part of each block, one after the other."""

    blocks: tuple = ()

    def cut(self, whole, rank):
        blocks = whole.split([sum(block) for block in self.blocks], self.dim)
        pairs = zip(blocks, self.blocks, strict=True)
        return torch.cat([b.split(list(n), self.dim)[rank] for b, n in pairs], self.dim)


def bound_to(layer, *names, call=None):
    """The layer as a function of its input and parameters."""

    def fn(x, *values):
        given = dict(zip(names, values, strict=True))
        return functional_call(layer, given, (x,), call or {})

    return fn


def cases(ranks, pattern):
    """Return layers with all options: function, twin, inputs with their shards, and output."""
    sizes, others = split(pattern, ranks), split("uneven", ranks)
    sequence = split("one empty" if pattern == "uneven" else "uneven", ranks)
    blocks = (sizes, others, sizes[::-1])
    width, fused, length = sum(sizes), sum(sum(block) for block in blocks), sum(sequence)
    part, parts = Sharded(0, sequence), {"sequence_sizes": sequence}
    later = {"call": parts, "sequence_sizes": [1] * ranks}  # replaced at the call
    first, last, kept = Sharded(0, sizes), Sharded(2, sizes), Sharded(1, sizes)
    x, of_part = (drawn(1, 2, 3, IN), REPLICATED), (drawn(1, length, IN), part)
    own = [(drawn(2, width, IN), first), (drawn(3, width), first)]
    rows, columns, lasts = (InBlocks(dim, blocks=blocks) for dim in (0, 1, 2))
    of_blocks = [(drawn(5, fused, IN), rows), (drawn(6, fused), rows)]
    across, added = (drawn(2, OUT, width), Sharded(1, sizes)), (drawn(3, OUT), REPLICATED)
    wide, stacked = drawn(4, length, 2, width), drawn(7, 2, 3, fused)
    of_rank, everything, whole = (wide, last), (wide, REPLICATED), REPLICATED
    down, of_columns = [across, added], [(drawn(5, OUT, fused), columns), added]
    found = {}

    def layer(name, kind, inputs, output, call=None, sizes=sizes, **options):
        shape = inputs[1][0].shape[::-1]
        names = ("weight", "bias")[: len(inputs) - 1]
        made = kind(*shape, "bias" in names, sizes, dtype=DOUBLE, **options)
        found[name] = bound_to(made, *names, call=call), functional.linear, inputs, output

    column, row = KINDS
    fuse = {"sizes": blocks}
    given = {"input_is_parallel": False}
    gathered = {"gather_output": True}
    layer("column", column, [x, *own], last)
    layer("column, no bias", column, [x, own[0]], last)
    layer("column, gathered", column, [x, *own], whole, **gathered)
    layer("column of a sequence", column, [of_part, *own], kept, **parts)
    layer("column, kept", column, [of_part, *own], kept, save="gathered", **parts)
    layer("column of a sequence at call time", column, [of_part, *own], kept, **later)
    layer("column of blocks", column, [x, *of_blocks], lasts, **fuse)
    layer("blocks, gathered", column, [x, *of_blocks], whole, **fuse, **gathered)
    layer("row", row, [of_rank, *down], whole)
    layer("row, no bias", row, [of_rank, across], whole)
    layer("row, given all", row, [everything, *down], whole, **given)
    layer("row to a sequence", row, [of_rank, *down], part, **parts)
    layer("row to a sequence at call time", row, [of_rank, *down], part, **later)
    layer("row of blocks", row, [(stacked, lasts), *of_columns], whole, **fuse)
    layer("blocks, given all", row, [(stacked, REPLICATED), *of_columns], whole, **fuse, **given)
    return found


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@on_ranks()
def test_values_and_derivatives(rank, pattern):
    return compare_all(cases(dist.get_world_size(), pattern))


SIZES = {
    ColumnParallelLinear: {1: [7], 2: [2, 5], 3: [3, 0, 4], 5: [1, 0, 0, 6, 0]},
    RowParallelLinear: {1: [6], 2: [6, 0], 3: [1, 2, 3], 5: [0, 2, 3, 1, 0]},
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(*WORLDS)
def test_from_linear_to_linear(rank, kind):
    failures, ranks = Failures(), dist.get_world_size()
    for bias, frozen, blocks in ((True, True, False), (False, False, False), (True, False, True)):
        torch.manual_seed(1)
        linear = nn.Linear(6, 7, bias, dtype=torch.bfloat16).train(not frozen)
        linear.weight.requires_grad_(not frozen)
        before = copy.deepcopy(linear)
        sizes = SIZES[kind][ranks]
        if blocks:  # as q, k and v have other sizes
            sizes = [[min(n, 1) for n in sizes], [n - min(n, 1) for n in sizes]]
        layer = kind.from_linear(linear, sizes=sizes)
        with torch.no_grad():
            for param in linear.parameters():
                param.add_(1)  # shares no memory
        back = layer.to_linear()
        with failures.named(bias, frozen, blocks):
            assert type(back) is nn.Linear
            assert back.training == layer.training == before.training
            assert (layer.bias is None) == (back.bias is None) == (not bias)
            for name, param in before.named_parameters():
                own, again = getattr(layer, name), getattr(back, name)
                assert own.requires_grad == again.requires_grad == param.requires_grad
                assert torch.equal(again, param)
                spec = shard_spec(own)
                assert torch.equal(own, param if spec is None else spec.shard(param))
            sharded = ["weight", "bias"] if kind is ColumnParallelLinear else ["weight"]
            marked = [n for n, p in layer.named_parameters() if shard_spec(p) is layer.spec]
            assert marked == [n for n in sharded if getattr(layer, n) is not None]
    return failures


def whole_of(kind, seed, group=None):
    """The whole weight and bias as they are drawn, gathered."""
    torch.manual_seed(seed)
    first = kind(300, 70, init=lambda t, g: t.normal_(generator=g), group=group)
    second = kind(70, 300, dtype=torch.bfloat16, group=group)
    return [p.detach() for layer in (first, second) for p in layer.to_linear().parameters()]


def of_default(x):
    return torch.nn.init.normal_(x, std=2.0)


def of_keyword(x, *, scale=2.0, generator):
    return x.normal_(0, scale, generator=generator)


INITS = {
    "of torch": torch.nn.init.normal_,
    "with options": partial(torch.nn.init.trunc_normal_, std=0.5),
    "of Megatron": of_default,
    "by keyword": of_keyword,
    "in second place": lambda t, g: t.uniform_(1, 2, generator=g),
    "in C": torch.Tensor.zero_,
}


def with_each_init(group=None):
    """The whole weights of layers, and whether torch's generator is as it was."""
    found = []
    for init in INITS.values():
        torch.manual_seed(7)
        layers = [kind(30, 70, init=init, group=group) for kind in KINDS]
        table = VocabParallelEmbedding(50, 3, init=init, group=group)
        found += [layer.to_linear().weight.detach() for layer in layers]
        found += [table.to_embedding().weight.detach(), torch.rand(1)]
    return found


@on_ranks(3)
def test_init_functions_of_torch_and_megatron(rank):
    expected = with_each_init(group_of_one())
    assert all(map(torch.equal, with_each_init(), expected))
    deviations = [expected[4 * place].std().item() for place in range(len(INITS))]
    assert deviations == pytest.approx([1, 0.5, 2, 2, 12**-0.5, 0], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_initial_weights_do_not_depend_on_the_ranks(rank, kind):
    """The seed of rank 0 counts."""
    expected = whole_of(kind, 7, group_of_one())
    for seed in (7, 7 + rank):
        assert all(map(torch.equal, whole_of(kind, seed), expected))
    weight, bias, narrow, other = (tensor.double() for tensor in expected)
    assert abs(weight.std() - 1) < 0.02
    assert narrow.abs().max() == pytest.approx(70**-0.5, rel=0.01)
    assert bias.abs().max() <= 300**-0.5
    assert not torch.equal(narrow[:, 0], other)


@on_ranks(2)
def test_a_parameter_of_a_user_is_not_drawn_again(rank):
    for how in ({}, {"init": lambda t, generator: t.normal_(generator=generator)}):
        for bias in (True, False):
            layer = ColumnParallelLinear(4, 6, bias=bias, **how)
            layer.gain, before = torch.nn.Parameter(torch.ones(6)), layer.weight.detach().clone()
            layer.reset_parameters()
            assert torch.equal(layer.gain, torch.ones(6))
            assert not torch.equal(layer.weight, before)


@on_ranks(2)
def test_marks_stay_with_parameters(rank):
    failures = Failures()
    for kind, sizes in ((KINDS[0], SIZES[KINDS[0]][2]), (KINDS[1], [6, 0])):
        model = nn.Sequential(kind(6, 7, sizes=sizes))
        others = {f"0.{n}": torch.full_like(p, 2) for n, p in model[0].state_dict().items()}
        loaded, assigned = copy.deepcopy(model), copy.deepcopy(model)
        loaded.load_state_dict(others)
        assigned.load_state_dict(others, assign=True)
        from_meta = nn.Sequential(kind(6, 7, sizes=sizes, device="meta"))
        assert from_meta[0].weight.is_meta
        from_meta.load_state_dict(others, assign=True)
        expected = [(n, shard_spec(p)) for n, p in model[0].named_parameters()]
        for name, copied in {
            "loaded": loaded,
            "assigned": assigned,
            "empty": copy.deepcopy(model).to("meta").to_empty(device="cpu"),
            "wide": copy.deepcopy(model).to(DOUBLE),
            "from meta": from_meta,
        }.items():
            with failures.named(kind.__name__, name):
                assert expected == [(n, shard_spec(p)) for n, p in copied[0].named_parameters()]
                assert expected[0][1] == copied[0].spec
                assert copied[0].weight is not model[0].weight
        with failures.named(kind.__name__, "values"):
            assert torch.equal(loaded[0].weight, torch.full_like(model[0].weight, 2))
            assert torch.equal(from_meta[0].weight, loaded[0].weight)
            assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)
            with pytest.raises(GroupError, match="cannot be pickled"):
                pickle.dumps(model)
    return failures


@on_ranks(3)
def test_group_without_rank_0(rank):
    """The group's first rank draws, which is not the world's."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    torch.manual_seed(rank)
    layer = ColumnParallelLinear(IN, OUT, group=group)
    torch.manual_seed(1)
    weight = layer.to_linear().weight.detach()
    every = varcomm.all_gather_v(weight[None], [1, 1], group=group)
    assert torch.equal(every[0], every[1])
    assert resolve(layer.group.process_group).rank == rank - 1


@on_ranks(1, 3)
def test_a_hook_that_returns_a_tuple(rank):
    """As Megatron's layers return their bias."""
    layer = ColumnParallelLinear(4, 7)
    layer.register_forward_hook(lambda module, args, y: (y, None))
    y, bias = layer(torch.ones(2, 4))
    assert y.shape == (2, layer.spec.local)
    assert bias is None


@on_ranks(3)
def test_parametrizations_are_refused(rank):
    for kind in KINDS:
        layer = kind(IN, OUT)
        parametrizations.orthogonal(layer)
        with pytest.raises(varcomm.ArgumentError, match="parametrization"):
            layer(torch.ones(2, IN))
        parametrize.remove_parametrizations(layer, "weight")
        assert layer(torch.ones(2, layer.weight.shape[1])).dim() == 2
