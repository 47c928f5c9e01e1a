"""``replicate`` makes the ranks equal first, or raises the same error on all; copies are plain."""

import copy
import io
import operator
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import varcomm
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import replicate


def dtypes(seed):
    """Parameters and buffers of many dtypes and formats, with other values for each seed."""
    generator = torch.manual_seed(seed)
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    model.extra = nn.Parameter(torch.zeros(0, 4))
    model.scale = nn.Parameter(torch.tensor(float(seed)), requires_grad=False)
    model.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator))
    model.narrow = nn.Parameter(torch.randn(3, generator=generator).bfloat16())
    model.choice = nn.Parameter(torch.randint(9, (2,), generator=generator), requires_grad=False)
    model.register_buffer("mask", torch.rand(5, generator=generator) > 0.5)
    model.register_buffer("count", torch.tensor([seed, -seed, 2**60 + seed]))
    model.register_buffer("table", torch.full((2,), float(seed)), persistent=False)
    model.register_buffer("nothing", None)
    return model


def equal(rank):
    model = dtypes(rank + 5)
    before = [(name, value.data_ptr(), value.stride()) for name, value in model.named_parameters()]
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    with varcomm.trace() as calls:
        assert replicate(model) is model
    after = [(name, value.data_ptr(), value.stride()) for name, value in model.named_parameters()]
    assert all(map(operator.is_, parameters, model.parameters()))  # as an optimizer knows them
    first = dtypes(5).state_dict()
    same = [torch.equal(value, first[name]) for name, value in model.state_dict().items()]
    # one message for each of fp32, complex, bf16, int64 and bool
    assert model.table.tolist() == [5.0, 5.0]  # which is not in the state dict
    return before == after, keys == list(model.state_dict()), all(same), len(calls)


def test_all_ranks_get_the_values_of_rank_0_in_place(worlds):
    assert worlds.run(3, equal) == [(True, True, True, 5)] * 3


def linear(dtype=torch.float32, **settings):
    return nn.Linear(3, 2, **settings).to(dtype)


def frozen():
    model = linear()
    model.bias.requires_grad_(False)
    return model


def with_buffer(value):
    model = linear()
    model.register_buffer("scale", value)
    return model


def turned():
    model = nn.Linear(3, 2)
    del model.weight
    model.weight = nn.Parameter(torch.ones(2, 3))
    return model


FP32 = "torch.float32 with gradients of torch.float32"
# the model of rank 1, what rank 0 has there, and what rank 1 has
DIFFERENT = {
    "shapes": (
        lambda: nn.Linear(4, 2),
        ("weight", f"parameter 0, trained, {FP32}, shape (2, 3), on cpu 0"),
        f"parameter 0, trained, {FP32}, shape (2, 4), on cpu 0",
    ),
    "dtypes": (
        lambda: linear(torch.float64),
        ("weight", f"parameter 0, trained, {FP32}, shape (2, 3), on cpu 0"),
        f"parameter 0, trained, {FP32}, shape (2, 3), on cpu 0".replace("32", "64"),
    ),
    "names": (
        lambda: linear(bias=False),
        ("bias", f"parameter 1, trained, {FP32}, shape (2,), on cpu 0"),
        "none",
    ),
    "order": (
        turned,
        ("weight", f"parameter 0, trained, {FP32}, shape (2, 3), on cpu 0"),
        f"parameter 1, trained, {FP32}, shape (2, 3), on cpu 0",
    ),
    "what is trained": (
        frozen,
        ("bias", f"parameter 1, trained, {FP32}, shape (2,), on cpu 0"),
        f"parameter 1, frozen, {FP32}, shape (2,), on cpu 0",
    ),
    "buffers": (
        lambda: with_buffer(torch.ones(1)),
        ("scale", "none"),
        f"buffer 2, frozen, {FP32}, shape (1,), on cpu 0",
    ),
}


def differ(rank, what):
    model = DIFFERENT[what][0]() if rank == 1 else linear()
    start = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(DisagreementError) as caught:
        replicate(model)
    kept = all(map(torch.equal, start, model.state_dict().values()))
    return str(caught.value), kept, len(model._forward_hooks)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_modules(worlds, what):
    _, (name, here), there = DIFFERENT[what]
    told = (
        "data_parallel.replicate: ranks disagree on parameters and buffers: for "
        f"{name!r}, rank 0 has {here}; rank 1 has {there}."
    )
    assert worlds.run(3, differ, what) == [(told, True, 0)] * 3


def other_buckets(rank):
    with pytest.raises(
        DisagreementError, match=r"on bucket_bytes: .* rank 0 has 10; rank 1 has 11"
    ):
        replicate(linear(), bucket_bytes=10 + rank)


def test_ranks_with_different_buckets(worlds):
    assert worlds.run(2, other_buckets) == [None, None]


def expanded():
    return with_buffer(torch.ones(1).expand(3))


def made_in_inference_mode():
    with torch.inference_mode():
        value = torch.ones(2)
    return with_buffer(value)


def alone():
    return next(group for group in GROUPS if group is not dist.GroupMember.NON_GROUP_MEMBER)


GROUPS = []

# what rank 1 has in place of a module, and what all ranks are told
REFUSED = {
    "no module": (lambda: [linear()], ArgumentError, "model must be a torch.nn.Module; got list."),
    "lazy": (
        lambda: nn.LazyLinear(2),
        ArgumentError,
        "parameter 'weight' is not initialised yet. Call the model once before.",
    ),
    "sparse": (
        lambda: with_buffer(torch.eye(2).to_sparse()),
        ArgumentError,
        "buffer 'scale' must be dense; got torch.sparse_coo of torch.float32.",
    ),
    "device": (lambda: linear().to("meta"), GroupError, "rank 1 of 2: the tensor is on meta, but"),
    "expanded": (
        expanded,
        ArgumentError,
        "buffer 'scale' is an expanded view, and cannot be written to. Register its clone().",
    ),
    "inference": (
        made_in_inference_mode,
        ArgumentError,
        "buffer 'scale' was made in inference mode, and cannot be written to. Register its",
    ),
    "wrapped": (
        lambda: DistributedDataParallel(linear(), process_group=alone()),
        ArgumentError,
        "DistributedDataParallel communicates gradients itself. Take either it, with ",
    ),
}


def refused(rank, what):
    if not GROUPS:
        GROUPS.extend(dist.new_group([r]) for r in range(2))
    make, kind, _ = REFUSED[what]
    model = make() if rank == 1 else linear()
    with pytest.raises(kind) as caught:
        replicate(model)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_replicated_on_one_rank_is_refused_on_all(worlds, what):
    told = worlds.run(2, refused, what)
    start = f"data_parallel.replicate: refused on rank 1 of 2: {REFUSED[what][2]}"
    assert [text[: len(start)] for text in told] == [start] * 2


def wrong_bucket(rank):
    for size in (0, 2.5, None):
        said = f"bucket_bytes must be a positive integer; got {size!r}."
        with pytest.raises(ArgumentError, match=re.escape(said)):
            replicate(linear(), bucket_bytes=size)


def test_bucket_bytes_must_be_a_positive_integer(worlds):
    assert worlds.run(1, wrong_bucket) == [None]


def again(rank):
    """The second call starts anew from rank 0, and sums once, in buckets of its own size."""
    torch.manual_seed(rank)
    model = replicate(replicate(linear(bias=False)), bucket_bytes=1)
    with torch.no_grad():
        model.weight.add_(rank)
    replicate(model)
    model(torch.ones(1, 3)).sum().backward()
    torch.manual_seed(0)
    return torch.equal(model.weight, linear(bias=False).weight), model.weight.grad.tolist()


def test_again_for_the_same_group(worlds):
    assert worlds.run(2, again) == [(True, [[2.0] * 3] * 2)] * 2


def copied(rank, how):
    """A copy evaluates, but does not train; it can be replicated, alone or in another module."""
    model = replicate(linear())
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    x = torch.ones(1, 3)
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    said = f"replicate on rank {rank} of 2: this module is a copy of one that was replicated, and "
    with pytest.raises(ArgumentError, match=said):
        twin(x)
    assert not twin.requires_grad_(False)(x).requires_grad
    whole = replicate(nn.Sequential(twin.requires_grad_(True)))
    whole(x).sum().backward()
    assert model.weight.grad is None
    model(2 * x).sum().backward()
    return twin.weight.grad[0, 0].item(), model.weight.grad[0, 0].item()


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_are_not_replicated(worlds, how):
    assert worlds.run(2, copied, how) == [(2.0, 4.0)] * 2


def test_a_copy_is_plain_where_there_are_no_ranks(worlds):
    (data,) = worlds.run(1, saved)
    twin = torch.load(io.BytesIO(data), weights_only=False)
    twin(torch.ones(1, 3)).sum().backward()
    assert twin.weight.grad.tolist() == [[1.0] * 3] * 2


def saved(rank):
    buffer = io.BytesIO()
    torch.save(replicate(linear()), buffer)
    return buffer.getvalue()


def test_without_ranks():
    with pytest.raises(GroupError, match=r"torch\.distributed is not initialised"):
        replicate(linear())
