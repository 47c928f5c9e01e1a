"""What ShardedGradients is made of: the same on all ranks, or the same error on all."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.sharded_cases import plain
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import replicate
from varcomm.data_parallel.sharded import ShardedGradients

KEEP = []


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(dtype)


def with_value(value):
    model = linear()
    model.more = value
    return model


def lazy():
    return nn.LazyLinear(2)


def on_meta():
    return with_value(nn.Parameter(torch.ones(2, device="meta")))


def sparse():
    return with_value(nn.Parameter(torch.ones(2, 2).to_sparse()))


def in_inference_mode():
    model = linear()
    with torch.inference_mode():
        model.register_buffer("more", torch.ones(2))
    return model


def expanded():
    model = linear()
    model.register_buffer("more", torch.ones(1).expand(3))
    return model


class Distributed(torch.Tensor):
    """Has ranks of its own, as DTensor."""

    def to_local(self):
        return self


def dtensor():
    return with_value(nn.Parameter(torch.ones(2).as_subclass(Distributed)))


def frozen():
    return linear().requires_grad_(False)


def taken():
    model = linear()
    KEEP.append(model.weight)
    return model


def twice():
    model = linear()
    return [{"params": [model.weight]}, {"params": [model.bias, model.weight]}]


def two_names():
    return [("a", linear().weight), ("a", linear().weight)]


def a_set():
    return set(linear().parameters())


def a_set_in_it():
    return [{"params": set(linear().parameters())}]


def two_views():
    model = nn.Sequential(linear(), linear())
    model[1].weight.data = model[0].weight.data
    return model


def view_of_a_parameter():
    model = linear()
    model.register_buffer("more", model.weight.detach()[:, 1:])
    return model


def with_gradient():
    model = linear()
    model(torch.ones(1, 3)).sum().backward()
    return model


def no_params():
    return [{"params": [linear().weight]}, {"lr": 1.0}]


def elsewhere():
    return {"params": linear(), "module": linear()}


def not_in_module():
    return {"params": [linear().weight], "module": linear()}


# what rank 1 passes, and what all are told of it
REFUSED = {
    "lazy": (lazy, "parameter 'weight' is not initialised yet. Call the model once before."),
    "devices": (
        on_meta,
        "parameters are on several devices, cpu and meta: parameter 'more' is on the second.",
    ),
    "sparse": (sparse, "parameter 'more' must be dense; got torch.sparse_coo of torch.float32."),
    "dtensor": (dtensor, "parameter 'more' must be this rank's own; got "),
    "inference": (in_inference_mode, "buffer 'more' was made in inference mode, and cannot"),
    "expanded": (expanded, "buffer 'more' is an expanded view, and cannot be written to."),
    "frozen": (frozen, "no parameter is trained: all 2 are frozen."),
    "nothing": (list, "no parameter is trained: there are none."),
    "a tensor": (
        lambda: torch.ones(2),
        "params must be a Module, or an iterable of parameters, of",
    ),
    "a number": (lambda: 3, "params must be a Module, or an iterable of parameters, of (name, "),
    "a string in it": (lambda: ["weight"], "params must hold parameters; '0.0' is str. Pass "),
    "computed": (
        lambda: [linear().weight * 2],
        "params must hold parameters; '0.0' is a computed tensor. Pass the model, or ",
    ),
    "twice": (twice, "parameter '1.1' is given twice, first as '0.0'."),
    "two names": (two_names, "two parameters have the name 'a'."),
    "no params": (no_params, 'params holds dicts, and each must have its parameters under "par'),
    "a set": (a_set, "params is a set, whose order differs between ranks. Pass a list, in the "),
    "a set in it": (a_set_in_it, '"params" of group 0 is a set, whose order differs between ranks'),
    "two views": (
        two_views,
        "parameter '0.weight' and parameter '1.weight' share memory, and would not when the first",
    ),
    "a buffer's": (
        view_of_a_parameter,
        "parameter 'weight' and buffer 'more' share memory, and would not when the first of them",
    ),
    "a gradient": (with_gradient, "parameter 'weight' has a gradient already, which nobody has "),
    "a module": (
        lambda: {"params": linear(), "module": "model"},
        "module must be a torch.nn.Module; got str.",
    ),
    "two modules": (elsewhere, "params is a Module, and module is another one."),
    "not in module": (not_in_module, "parameter '0.0' is not in the module."),
    "ddp": (
        lambda: DistributedDataParallel(linear(), process_group=alone()),
        "DistributedDataParallel communicates gradients itself. Pass the module within.",
    ),
}


def alone():
    return KEEP[torch.distributed.get_rank()]


def refused(rank, what):
    if not KEEP:
        KEEP.extend(torch.distributed.new_group([r]) for r in range(2))
    made = REFUSED[what][0]() if rank == 1 else linear()
    arguments = made if isinstance(made, dict) else {"params": made}
    with pytest.raises(ArgumentError) as caught:
        ShardedGradients(optimizer_factory=plain, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_parameters_that_are_refused_on_one_rank_are_refused_on_all(worlds, what):
    told = worlds.run(2, refused, what)
    start = f"data_parallel.ShardedGradients: refused on rank 1 of 2: {REFUSED[what][1]}"
    assert [text[: len(start)] for text in told] == [start] * 2


# what rank 1 asks for
ARGUMENTS = {
    "sum": (
        {"sizes": [3, 4]},
        "sizes sum to 7 ([3, 4]), but the parameters that are trained have ",
    ),
    "length": ({"sizes": [8]}, "sizes must have one entry a rank, 2; got 1: [8]."),
    "negative": ({"sizes": [9, -1]}, "sizes must not be negative; got [9, -1]."),
    "kind": ({"sizes": "even"}, 'sizes must be "balanced", "whole-parameters" or a list of ints'),
    "number": ({"sizes": 8}, "sizes must be a list or tuple of ints, one a rank; got 8."),
    "reduce": ({"reduce": "max"}, 'reduce must be "sum", "mean" or a data_parallel.GlobalCount; '),
    "factor": (
        {"gradient_predivide_factor": 0},
        "gradient_predivide_factor must be a positive number; got 0.",
    ),
    "bucket": ({"bucket_bytes": 0}, "bucket_bytes must be an integer of at least 1; got 0."),
    "flag": ({"cpu_offload": 1}, "cpu_offload must be True or False; got 1."),
    "overlap": (
        {"overlap_forward": True, "params": list(linear().parameters())},
        "overlap_forward=True needs the module whose forward waits for its parameters.",
    ),
}


def sizes_in_other_types(rank):
    """Of each library, and such as can be read once."""
    for sizes in (np.array([3, 5]), torch.tensor([3, 5]), iter([3, 5]), (np.int64(3), 5)):
        own = ShardedGradients(linear(), plain, sizes=[3, 5] if rank else sizes)
        yield sum(piece.stop - piece.start for piece in own.pieces.values())


def owned_by(rank):
    return list(sizes_in_other_types(rank))


def test_sizes_are_any_integers_that_can_be_read_once(worlds):
    assert worlds.run(2, owned_by) == [[3] * 4, [5] * 4]


def asked(rank, what):
    arguments = {"params": linear(), **(ARGUMENTS[what][0] if rank == 1 else {})}
    with pytest.raises(ArgumentError) as caught:
        ShardedGradients(optimizer_factory=plain, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_that_are_wrong_on_one_rank_are_refused_on_all(worlds, what):
    told = worlds.run(2, asked, what)
    start = f"data_parallel.ShardedGradients: refused on rank 1 of 2: {ARGUMENTS[what][1]}"
    assert [text[: len(start)] for text in told] == [start] * 2


# what rank 1 has otherwise
DIFFERENT = {
    "shape": ({"params": lambda: nn.Linear(4, 2)}, "parameters and buffers: for 'weight', rank 0 "),
    "frozen": ({"params": lambda: partly()}, "parameters and buffers: for 'bias', rank 0 has a "),
    "sizes": ({"sizes": [7, 1]}, "arguments: for 'sizes', rank 0 has [2, 6]; rank 1 has [7, 1]."),
    "reduce": ({"reduce": "sum"}, "arguments: for 'reduce', rank 0 has 'mean'; rank 1 has 'sum'."),
    "bucket": ({"bucket_bytes": 8}, "arguments: for 'bucket_bytes', rank 0 has 26214400; rank 1 "),
    "groups": (
        {"params": lambda: [{"params": [p]} for p in linear().parameters()]},
        "parameters and buffers: for 'weight', rank 0 has a trained parameter of ",
    ),
    "kind": (
        {"optimizer_factory": lambda groups: torch.optim.AdamW(groups, lr=0.01)},
        "the optimizer: for 'kind', rank 0 has SGD; rank 1 has AdamW.",
    ),
    "lr": (
        {"optimizer_factory": lambda groups: torch.optim.SGD(groups, lr=0.02)},
        "the optimizer: for 'lr of group 0', rank 0 has 0.01; rank 1 has 0.02.",
    ),
}


def partly():
    model = linear()
    model.bias.requires_grad_(False)
    return model


def different(rank, what):
    arguments = {"params": linear, "optimizer_factory": plain, "sizes": [2, 6]}
    if rank == 1:
        arguments |= DIFFERENT[what][0]
    arguments["params"] = arguments["params"]()
    if what in ("shape", "frozen", "groups"):
        del arguments["sizes"]
    with pytest.raises(DisagreementError) as caught:
        ShardedGradients(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_so(worlds, what):
    told = worlds.run(2, different, what)
    start = f"data_parallel.ShardedGradients: ranks disagree on {DIFFERENT[what][1]}"
    assert [text[: len(start)] for text in told] == [start] * 2


def others(rank):
    """Who else sums gradients, and may not."""
    model = replicate(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="parameter 'weight' is replicated: its gradients woul"):
        ShardedGradients(model, plain)
    model = nn.Linear(1, 1)
    own = ShardedGradients(model, plain, reduce="sum")
    said = "parameter 'weight' belongs to another ShardedGradients. Call its close"
    with pytest.raises(ArgumentError, match=said):
        ShardedGradients(model, plain)
    own.close()
    said = f"^ShardedGradients.step on rank {rank} of 2: close.. was called before."
    with pytest.raises(ArgumentError, match=said):
        own.step()
    model(torch.ones(1, 1)).sum().backward()
    alone = model.weight.grad.item()
    with pytest.raises(ArgumentError, match="parameter 'weight' has a gradient already, which nob"):
        ShardedGradients(model, plain)
    model.zero_grad(set_to_none=False)
    again = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 1)).sum().backward()
    summed = [piece.value.grad.item() for piece in again.pieces.values()]
    del again
    model(torch.ones(1, 1)).sum().backward()
    return alone, summed, model.weight.grad.item()


def test_one_after_the_other(worlds):
    assert worlds.run(2, others) == [(1.0, [2.0], 1.0)] * 2


def equal(rank):
    """All get the values of rank 0; parameters stay the same objects."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(3)
    )
    model[0].bias.requires_grad_(False)
    model[1].running_mean.fill_(rank + 1.0)
    parameters = list(model.parameters())
    ShardedGradients(model, plain)
    torch.manual_seed(0)
    first = nn.Conv2d(2, 3, 2)
    same = [
        torch.equal(a, b) for a, b in zip(model[0].parameters(), first.parameters(), strict=True)
    ]
    kept = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return same, kept, model[1].running_mean.tolist()


def test_all_get_the_values_of_rank_0(worlds):
    assert worlds.run(3, equal) == [([True, True], True, [1.0] * 3)] * 3


def all_of_the_module(rank):
    """What was not given is made equal as well, but for what is another's."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    replicate(model[2])
    own = ShardedGradients(model[3].parameters(), plain, module=model[3])
    model[3](torch.ones(1, 2)).sum().backward()
    own.step()
    with torch.no_grad():
        model[3].bias.fill_(rank)  # is left alone
    other = ShardedGradients(model[1].parameters(), plain, module=model)
    bias = model[3].bias.item()
    model[3].bias.detach().zero_()
    return [p.tolist() for p in model.parameters()], sorted(other.pieces), bias


def test_all_that_the_module_has_is_made_equal(worlds):
    first, second = worlds.run(2, all_of_the_module)
    assert first[0] == second[0]
    assert len(first[0]) == 8
    assert (first[1], second[1]) == (["1.bias", "1.weight"], ["1.weight"])
    assert (first[2], second[2]) == (0.0, 1.0)


def left_out_on_one(rank):
    model = nn.Sequential(linear(), nn.Linear(2, 1 + rank))
    with pytest.raises(DisagreementError) as caught:
        ShardedGradients(model[0].parameters(), plain, module=model)
    return str(caught.value)


def test_what_is_left_out_is_compared(worlds):
    said = "for '1.weight', rank 0 has a left out parameter of torch.float32 with"
    assert all(said in text for text in worlds.run(2, left_out_on_one))


def nowhere(rank):
    model = nn.Linear(3, 2, device="meta") if rank else linear()
    with pytest.raises(GroupError) as caught:
        ShardedGradients(model, plain)
    return str(caught.value)


def test_parameters_where_the_group_has_no_engine(worlds):
    start = "data_parallel.ShardedGradients: refused on rank 1 of 2: rank 1 of 2: the tensor is on "
    assert all(text.startswith(start + "meta") for text in worlds.run(2, nowhere))


def test_without_ranks():
    with pytest.raises(GroupError, match=r"torch\.distributed is not initialised"):
        ShardedGradients(linear(), plain)
