"""Arguments of ShardedGradients: the same on all ranks, or the same error on all."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.sharded_cases import plain
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import ShardedGradients


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


def wrapped():
    return DistributedDataParallel(linear(), process_group=ALONE[0])


ALONE = []

# parameters of rank 1, and words of the message on both
PARAMETERS = {
    "lazy": (lazy, "parameter 'weight' is not initialised"),
    "devices": (on_meta, "several devices, cpu and meta: parameter 'more'"),
    "sparse": (sparse, "parameter 'more' must be dense"),
    "dtensor": (dtensor, "parameter 'more' must be this rank's own"),
    "inference": (in_inference_mode, "buffer 'more' was made in inference mode"),
    "expanded": (expanded, "buffer 'more' is an expanded view"),
    "frozen": (frozen, "no parameter is trained: all 2 are frozen"),
    "nothing": (list, "no parameter is trained: there are none"),
    "a tensor": (lambda: torch.ones(2), "params must be"),
    "a number": (lambda: 3, "params must be"),
    "a string in it": (lambda: ["weight"], "params must hold parameters; '0.0' is str"),
    "computed": (lambda: [linear().weight * 2], "params must hold parameters; '0.0' is a computed"),
    "twice": (twice, "parameter '1.1' is given twice, first as '0.0'"),
    "two names": (two_names, "two parameters have the name 'a'"),
    "no params": (no_params, "params holds dicts"),
    "a set": (a_set, "params is a set"),
    "a set in it": (a_set_in_it, '"params" of group 0 is a set'),
    "two views": (two_views, "parameter '0.weight' and parameter '1.weight' share memory"),
    "a buffer's": (view_of_a_parameter, "parameter 'weight' and buffer 'more' share memory"),
    "a gradient": (with_gradient, "parameter 'weight' has a gradient already"),
    "a module": (lambda: {"params": linear(), "module": "model"}, "module must be"),
    "two modules": (elsewhere, "params is a Module, and module is another"),
    "not in module": (not_in_module, "parameter '0.0' is not in the module"),
    "ddp": (wrapped, "DistributedDataParallel"),
}

# arguments of rank 1
ARGUMENTS = {
    "sum": ({"sizes": [3, 4]}, "sizes sum to 7"),
    "length": ({"sizes": [8]}, "sizes must have"),
    "negative": ({"sizes": [9, -1]}, "sizes must not be negative"),
    "kind": ({"sizes": "even"}, "sizes must be"),
    "number": ({"sizes": 8}, "sizes must be"),
    "reduce": ({"reduce": "max"}, "reduce must be"),
    "factor": ({"gradient_predivide_factor": 0}, "gradient_predivide_factor must be"),
    "bucket": ({"bucket_bytes": 0}, "bucket_bytes must be"),
    "flag": ({"cpu_offload": 1}, "cpu_offload must be"),
    "overlap": (
        {"overlap_forward": True, "params": list(linear().parameters())},
        "overlap_forward=True needs the module",
    ),
}


def raising(groups):
    raise RuntimeError("no memory, say")


def with_foreign(groups):
    return torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)


# factories of rank 1; a matrix optimizer is refused on the ranks that own a part of a matrix
FACTORIES = {
    "foreign": (with_foreign, "the optimizer must have the groups"),
    "lacking": (
        lambda groups: torch.optim.SGD(groups[0]["params"][:1], lr=0.1),
        "the optimizer must have the groups",
    ),
    "groups": (
        lambda groups: torch.optim.SGD([{"params": [p]} for p in groups[0]["params"]], lr=0.1),
        "the optimizer must have the groups",
    ),
    "none": (lambda groups: None, "optimizer_factory must return"),
    "not callable": (3, "optimizer_factory must be callable"),
    "raising": (raising, "no memory, say"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS needs"),
    "Adafactor": (torch.optim.Adafactor, "Adafactor needs"),
    "Muon": (torch.optim.Muon, "Muon"),
}


def refused(rank):
    """Every error is the same on both ranks, and leaves nothing behind."""
    ALONE[:] = [torch.distributed.new_group([r]) for r in range(2)][rank:]
    told = {}
    calls = {what: (make, {}) for what, (make, _) in PARAMETERS.items()}
    calls |= {what: (linear, options) for what, (options, _) in ARGUMENTS.items()}
    calls |= {
        what: (linear, {"optimizer_factory": make, "sizes": [1, 7]})
        for what, (make, _) in FACTORIES.items()
    }
    for what, (make, options) in calls.items():
        made = make() if rank == 1 else linear()
        arguments = {
            "optimizer_factory": plain,
            **(made if isinstance(made, dict) else {"params": made}),
        }
        if rank == 1:
            arguments |= options
        elif "sizes" in options and what in FACTORIES:
            arguments["sizes"] = options["sizes"]
        with pytest.raises(ArgumentError) as caught:
            ShardedGradients(**arguments)
        told[what] = str(caught.value)
    model = linear()
    own = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 3)).sum().backward()
    own.reduce()
    return told, sum(piece.value.grad.sum().item() for piece in own.pieces.values())


def test_wrong_arguments_of_one_rank_are_refused_on_all(worlds):
    (first, some), (second, others) = worlds.run(2, refused)
    for what, (_, words) in {**PARAMETERS, **ARGUMENTS, **FACTORIES}.items():
        assert first[what] == second[what], what
        assert first[what].startswith("data_parallel.ShardedGradients"), what
        assert "refused on rank 1 of 2" in first[what], what
        assert words in first[what], what
    assert some + others == 16.0


def sizes_in_other_types(rank):
    """Of each library, and such as can be read once."""
    for sizes in (np.array([3, 5]), torch.tensor([3, 5]), iter([3, 5]), (np.int64(3), 5)):
        own = ShardedGradients(linear(), plain, sizes=[3, 5] if rank else sizes)
        yield sum(piece.stop - piece.start for piece in own.pieces.values())


def owned_by(rank):
    return list(sizes_in_other_types(rank))


def test_sizes_are_any_integers_that_can_be_read_once(worlds):
    assert worlds.run(2, owned_by) == [[3] * 4, [5] * 4]


# what rank 1 has otherwise
DIFFERENT = {
    "shape": ({"params": lambda: nn.Linear(4, 2)}, "parameters and buffers: for 'weight'"),
    "frozen": ({"params": lambda: partly()}, "parameters and buffers: for 'bias'"),
    "sizes": ({"sizes": [7, 1]}, "arguments: for 'sizes'"),
    "reduce": ({"reduce": "sum"}, "arguments: for 'reduce'"),
    "bucket": ({"bucket_bytes": 8}, "arguments: for 'bucket_bytes'"),
    "groups": (
        {"params": lambda: [{"params": [p]} for p in linear().parameters()]},
        "parameters and buffers: for 'weight'",
    ),
    "kind": (
        {"optimizer_factory": lambda groups: torch.optim.AdamW(groups, lr=0.01)},
        "the optimizer: for 'kind'",
    ),
    "lr": (
        {"optimizer_factory": lambda groups: torch.optim.SGD(groups, lr=0.02)},
        "the optimizer: for 'lr of group 0'",
    ),
}


def partly():
    model = linear()
    model.bias.requires_grad_(False)
    return model


def different(rank):
    told = {}
    for what, (options, _) in DIFFERENT.items():
        arguments = {"params": linear, "optimizer_factory": plain, "sizes": [2, 6]}
        if rank == 1:
            arguments |= options
        arguments["params"] = arguments["params"]()
        if what in ("shape", "frozen", "groups"):
            del arguments["sizes"]
        with pytest.raises(DisagreementError) as caught:
            ShardedGradients(**arguments)
        told[what] = str(caught.value)
    return told


def test_ranks_that_differ_are_told_so(worlds):
    for told in worlds.run(2, different):
        for what, (_, words) in DIFFERENT.items():
            assert f"ranks disagree on {words}" in told[what]


def one_after_the_other(rank):
    model = nn.Linear(1, 1)
    own = ShardedGradients(model, plain, reduce="sum")
    with pytest.raises(ArgumentError, match="parameter 'weight' belongs to another Sharded"):
        ShardedGradients(model, plain)
    own.close()
    with pytest.raises(ArgumentError, match=r"close.. was called before"):
        own.step()
    model(torch.ones(1, 1)).sum().backward()
    alone = model.weight.grad.item()
    with pytest.raises(ArgumentError, match="parameter 'weight' has a gradient already"):
        ShardedGradients(model, plain)
    model.zero_grad(set_to_none=False)
    again = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 1)).sum().backward()
    again.reduce()
    summed = [piece.value.grad.item() for piece in again.pieces.values()]
    del again
    model(torch.ones(1, 1)).sum().backward()
    return alone, summed, model.weight.grad.item()


def test_one_after_the_other(worlds):
    assert worlds.run(2, one_after_the_other) == [(1.0, [2.0], 1.0)] * 2


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
    with pytest.raises(GroupError, match=r"refused on rank 1 of 2: .* the tensor is on meta"):
        ShardedGradients(model, plain)


def test_parameters_where_the_group_has_no_engine(worlds):
    worlds.run(2, nowhere)
    with pytest.raises(GroupError, match=r"torch\.distributed is not initialised"):
        ShardedGradients(linear(), plain)
