"""Arguments of ShardedGradients: the same on all ranks, or the same error on all."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.cases import plain
from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError, GroupError, ShardSizes
from varcomm.data_parallel import ShardedGradients


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def with_parameter(value):
    model = linear()
    model.more = nn.Parameter(value)
    return model


def with_buffer(make):
    model = linear()
    model.register_buffer("more", make(model))
    return model


def in_inference_mode(_):
    with torch.inference_mode():
        return torch.ones(2)


class Distributed(torch.Tensor):
    """Has ranks of its own, as DTensor."""

    def to_local(self):
        return self


def twice():
    model = linear()
    return [{"params": [model.weight]}, {"params": [model.bias, model.weight]}]


def two_views():
    model = nn.Sequential(linear(), linear())
    model[1].weight.data = model[0].weight.data
    return model


def wrapped():
    alone = torch.distributed.new_group([1], use_local_synchronization=True)
    return DistributedDataParallel(linear(), process_group=alone)


def raising(groups):
    raise RuntimeError("no memory, say")


def with_foreign(groups):
    return torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)


def a_group_for_each(groups):
    return torch.optim.SGD([{"params": [p]} for p in groups[0]["params"]], lr=0.1)


def buffer_of(make):
    return lambda: with_buffer(make)


def parameter_of(value):
    return lambda: with_parameter(value)


def made_by(factory):
    return {"optimizer_factory": factory}


FOREIGN = "optimizer_factory must return"
DISTRIBUTED = torch.ones(2).as_subclass(Distributed)

# arguments of rank 1, or a function that makes them or only `params`; words of the message on both
REFUSED = (
    (lambda: nn.LazyLinear(2), "parameter 'weight' is not initialised"),
    (parameter_of(torch.ones(2, 2).to_sparse()), "parameter 'more' must be dense"),
    (parameter_of(DISTRIBUTED), "parameter 'more' must be this rank's own"),
    (buffer_of(in_inference_mode), "buffer 'more' was made in inference mode"),
    (buffer_of(lambda _: torch.ones(1).expand(3)), "buffer 'more' is an expanded"),
    (lambda: linear().requires_grad_(False), "no parameter is trained: all are frozen"),
    (list, "an empty parameter list"),
    (lambda: torch.ones(2), "params argument"),
    (lambda: 3, "not iterable"),
    (lambda: ["weight"], "can only optimize Tensors"),
    (lambda: [linear().weight * 2], "non-leaf"),
    (twice, "more than one parameter group"),
    (lambda: [("a", linear().weight), ("a", linear().bias)], "parameter 'a', or its name"),
    (lambda: [{"params": [linear().weight]}, {"lr": 1.0}], "params"),
    (lambda: set(linear().parameters()), "params is a set"),
    (lambda: [{"params": set(linear().parameters())}], "ordered collections"),
    (two_views, "parameter '0.weight' and parameter '1.weight' share memory"),
    (buffer_of(lambda m: m.weight.detach()[:, 1:]), "'weight' and buffer 'more' share memory"),
    (wrapped, "DistributedDataParallel"),
    ({"sizes": [3, 4]}, "one int per rank, which sum to the"),
    ({"sizes": [8]}, "sizes must have"),
    ({"sizes": [9, -1]}, "sizes must hold ints from 0 on"),
    ({"sizes": "even"}, "sizes must be"),
    ({"sizes": 8}, "sizes must be"),
    ({"reduce": "max"}, "reduce must be"),
    ({"bucket_bytes": 0}, "bucket_bytes must be"),
    (made_by(with_foreign), FOREIGN),
    (made_by(lambda groups: torch.optim.SGD(groups[0]["params"][:1])), FOREIGN),
    (made_by(a_group_for_each), FOREIGN),
    (made_by(lambda groups: None), FOREIGN),
    (made_by(3), "not callable"),
    (made_by(raising), "no memory, say"),
    (made_by(torch.optim.LBFGS), "LBFGS needs"),
    (made_by(torch.optim.Adafactor), "Adafactor needs"),
    (made_by(torch.optim.Muon), "Muon"),
)


@on_ranks(2)
def test_wrong_arguments_of_one_rank_are_refused_on_all(rank):
    """Every error is the same on both ranks, and leaves nothing behind."""
    for asked, words in REFUSED:
        own = {"params": linear(), "optimizer_factory": plain}
        if isinstance(asked, dict) and "optimizer_factory" in asked:
            own["sizes"] = [1, 7]  # rank 1 owns a part of a matrix
        if rank == 1:
            made = asked() if callable(asked) else asked
            own |= made if isinstance(made, dict) else {"params": made}
        said = "data_parallel.ShardedGradients", "refused on rank 1 of 2", words
        refused_alike(ArgumentError, partial(ShardedGradients, **own), *said)
    model = linear()
    own = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 3)).sum().backward()
    own.reduce()
    assert all(piece.value.grad.eq(2).all() for piece in own.pieces.values())


def frozen_bias():
    model = linear()
    model.bias.requires_grad_(False)
    return model


# arguments of rank 1, and the words that differ
DIFFERENT = (
    (lambda: {"params": nn.Linear(4, 2)}, "parameter 'weight'"),
    (lambda: {"params": frozen_bias()}, "parameter 'bias'"),
    (lambda: {"params": [*linear().parameters()]}, "parameter 'weight'"),
    (lambda: {"sizes": [4, 4]}, "sizes"),
    (lambda: {"reduce": "sum"}, "reduce"),
    (lambda: {"bucket_bytes": 8}, "bucket_bytes"),
    (lambda: made_by(torch.optim.AdamW), "the optimizer"),
    (lambda: made_by(partial(torch.optim.SGD, lr=0.02)), "lr of group 0"),
)


@on_ranks(2)
def test_ranks_that_differ_are_told_so(rank, ranks):
    for make, words in DIFFERENT:
        arguments = {"params": linear(), "optimizer_factory": plain} | (make() if rank else {})
        with pytest.raises(DisagreementError, match=f"ranks disagree on {words}"):
            ShardedGradients(**arguments)


@on_ranks(2)
def test_sizes_are_any_integers_that_can_be_read_once(rank, ranks):
    for sizes in (np.array([3, 5]), torch.tensor([3, 5]), iter([3, 5]), (np.int64(3), 5)):
        given = list(linear().parameters())  # with numbers as names
        own = ShardedGradients(given, plain, sizes=[3, 5] if rank else sizes)
        assert set(own.pieces) == ({"0.0"} if rank else {"0.0", "0.1"})
        assert sum(piece.stop - piece.start for piece in own.pieces.values()) == [3, 5][rank]


@on_ranks(2)
def test_one_after_the_other(rank, ranks):
    def backward():
        model(torch.ones(1, 1)).sum().backward()
        return model.weight.grad

    model = nn.Linear(1, 1)
    own = ShardedGradients(model, plain, reduce="sum")
    with pytest.raises(ArgumentError, match="parameter 'weight' belongs to another Sharded"):
        ShardedGradients(model, plain)
    own.close()
    with pytest.raises(ArgumentError, match=r"close.. was called before"):
        own.step()
    assert backward().item() == 1.0
    again = ShardedGradients(model, plain, reduce="sum")
    backward()
    again.reduce()  # also the gradients from before
    assert [piece.value.grad.item() for piece in again.pieces.values()] == [4.0]
    del again
    assert backward().item() == 1.0


@on_ranks(3)
def test_all_get_the_values_of_rank_0(rank, ranks):
    """Parameters stay the same objects."""
    torch.manual_seed(rank)
    convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    model = nn.Sequential(convolution, nn.BatchNorm2d(3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.fill_(rank + 1.0)
    parameters = list(model.parameters())
    ShardedGradients(model, plain)
    torch.manual_seed(0)
    first = nn.Conv2d(2, 3, 2)
    assert all(map(torch.equal, model[0].parameters(), first.parameters()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model[1].running_mean.tolist() == [1.0] * 3


@on_ranks(2)
def test_parameters_where_the_group_has_no_engine(rank):
    model = nn.Linear(3, 2, device="meta") if rank else linear()
    with pytest.raises(GroupError, match=r"refused on rank 1 of 2: .* the tensor is on meta"):
        ShardedGradients(model, plain)


def test_without_a_group():
    with pytest.raises(GroupError, match=r"torch\.distributed is not initialised"):
        ShardedGradients(linear(), plain)


# Owners of elements: exact sums, no element twice or left out, no more than the share

RANKS = 3
SHAPES = st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans())


@st.composite
def models(draw):
    """Shapes and dtypes of parameters, sizes of pieces, and bytes of a bucket."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    total = sum(rows * columns for rows, columns, _ in shapes)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=RANKS - 1, max_size=RANKS - 1)))
    listed = [b - a for a, b in pairwise([0, *cuts, total])]
    sizes = draw(st.sampled_from(["balanced", "whole-parameters", listed]))
    return shapes, sizes, draw(st.integers(1, 400))


def owned(rank, drawn):
    """Of each model, the pieces of this rank by name."""
    found = []
    for shapes, sizes, bucket_bytes in drawn:
        model = nn.ParameterList(
            torch.zeros(rows, columns, dtype=torch.float64 if wide else torch.bfloat16)
            for rows, columns, wide in shapes
        )
        own = ShardedGradients(model, plain, sizes=sizes, bucket_bytes=bucket_bytes)
        found.append({name: (p.start, p.stop) for name, p in own.pieces.items()})
        own.close()
    return found


def check(shapes, sizes, pieces):
    numbers = [rows * columns for rows, columns, _ in shapes]
    counts = [torch.zeros(number, dtype=torch.int64) for number in numbers]
    homes = [0] * len(numbers)
    for own in pieces:
        for name, (start, stop) in own.items():
            counts[int(name)][start:stop] += 1
            homes[int(name)] += 1
            assert sizes != "whole-parameters" or stop - start == numbers[int(name)]
    assert all(bool((count == 1).all()) for count in counts)
    # optimizers have states of parameters without elements too, which one rank keeps
    assert all(home == 1 for home, number in zip(homes, numbers, strict=True) if not number)
    load = [sum(stop - start for start, stop in own.values()) for own in pieces]
    if sizes == "balanced":
        assert tuple(load) == tuple(ShardSizes.balanced(sum(numbers), RANKS))
    elif sizes == "whole-parameters":  # Graham's bound
        assert max(load) <= sum(numbers) / RANKS + (1 - 1 / RANKS) * max(numbers)
    else:
        assert load == sizes


def test_every_element_has_one_owner(worlds):
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(models(), min_size=1, max_size=12))
    def run(drawn):
        results = worlds.run(RANKS, owned, drawn)
        for (shapes, sizes, _), *pieces in zip(drawn, *results, strict=True):
            check(shapes, sizes, pieces)

    run()
