"""Summed gradients of replicated parameters: as in one process, on any number of ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from varcomm import ArgumentError, DisagreementError, ShardSizes
from varcomm.data_parallel import sum_gradients

WORLDS = (1, 2, 3, 5)
DOUBLE = torch.float64


def network(dtype=DOUBLE):
    """Make the same network on every rank; one layer of it is in channels_last."""
    torch.manual_seed(5)
    convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)


def batch(n, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(n, 2, 3, 3, dtype=DOUBLE, generator=generator).to(dtype)


def loss_of(model, x, n):
    return model(x).square().sum() / n


def of_own_rows(rank, sizes):
    """Each rank has its rows of the batch; one process has them all."""
    model, twin = network(), network()
    x = batch(sum(sizes))
    loss_of(model, x.split(sizes)[rank], sum(sizes)).backward()
    sum_gradients(model)
    loss_of(twin, x, sum(sizes)).backward()
    for own, one in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, one.grad, rtol=1e-13, atol=1e-15)
    return [p.grad.abs().sum().item() > 0 for p in model.parameters()]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("split", ["even", "off by one", "empty", "all on one"])
def test_as_in_one_process(worlds, ranks, split):
    sizes = {
        "even": (2,) * ranks,
        "off by one": ShardSizes.balanced(2 * ranks - 1, ranks),
        "empty": (*((rank * 2) % 3 for rank in range(ranks - 1)), 3),
        "all on one": (0,) * (ranks - 1) + (4,),
    }[split]
    assert worlds.run(ranks, of_own_rows, tuple(sizes)) == [[True] * 4] * ranks


def trained(rank, sizes, steps, dtype):
    """Train for some steps; return the parameters, and how far they are from where they began."""
    model = network(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = batch(sum(sizes), dtype).split(sizes)[rank]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, sum(sizes)).backward()
        sum_gradients(model)
        optimizer.step()
    moved = min((p - q).abs().max().item() for p, q in zip(model.parameters(), start, strict=True))
    return [p.detach() for p in model.parameters()], moved


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_replicas_stay_equal_bit_for_bit(worlds, ranks, dtype):
    sizes = tuple((3 * rank + 1) % 5 for rank in range(ranks))
    first, *others = worlds.run(ranks, trained, sizes, 5, dtype)
    assert first[1] > 0.01
    for parameters, _ in others:
        for p, q in zip(first[0], parameters, strict=True):
            assert torch.equal(p, q)


def parameter(shape=(2,), dtype=torch.float32, grad=None, **options):
    p = nn.Parameter(torch.ones(shape, dtype=dtype), **options)
    if grad is not None:
        p.grad = torch.full_like(p, grad)
    return p


def without_gradients(rank):
    """The first has a gradient on all ranks, the second on rank 1 alone, the third on none."""
    given = [parameter(grad=1.0), parameter(grad=5.0 if rank == 1 else None), parameter()]
    sum_gradients(given)
    return [p.grad.tolist() for p in given]


def test_no_gradient_counts_as_zeros_and_gets_the_sum(worlds):
    assert worlds.run(3, without_gradients) == [[[3, 3], [5, 5], [0, 0]]] * 3


def frozen(rank):
    """Two parameters do not learn: one has an old gradient, the other none."""
    old = parameter(grad=7.0, requires_grad=False)
    given = [parameter(grad=1.0), old, parameter(requires_grad=False)]
    sum_gradients(given)
    return [None if p.grad is None else p.grad.tolist() for p in given]


def test_frozen_parameters_are_left_alone(worlds):
    assert worlds.run(2, frozen) == [[[2, 2], [7, 7], None]] * 2


def micro_batches(rank):
    """Two backwards with slope 1 on each of two ranks."""
    p = parameter((1,))
    for _ in range(2):
        p.sum().backward()
    sum_gradients([p])
    return p.grad.item()


def test_accumulated_micro_batches_are_summed_once(worlds):
    """A reduction in a hook would sum the first micro-batch twice, and give 6."""
    assert worlds.run(2, micro_batches) == [4.0] * 2


def of_many_dtypes(rank):
    """Count the messages for six parameters of three dtypes, mixed; one is frozen."""
    given = [
        parameter((2,), torch.float32, rank + 1.0),
        parameter((3,), torch.bfloat16, rank + 1.0),
        parameter((1, 4), torch.float32, 10.0),
        parameter((), torch.float64, 2.0**-50),
        parameter((0, 3), torch.float32, 1.0),
        parameter((9,), torch.complex64, requires_grad=False),
    ]
    with varcomm.trace() as calls:
        sum_gradients(given)
    sums = [p.grad.flatten().tolist() for p in given[:5]]
    kept = all(p.grad.dtype == p.dtype and p.grad.shape == p.shape for p in given[:5])
    return sums, kept, [(call.name, call.sent) for call in calls]


def test_one_message_a_dtype(worlds):
    sums = [[6.0] * 2, [6.0] * 3, [30.0] * 4, [3 * 2.0**-50], []]
    # to each of the two others: six of fp32, three of bf16, one of fp64
    calls = [("all_reduce", 2 * 6 * 4), ("all_reduce", 2 * 3 * 2), ("all_reduce", 2 * 8)]
    assert worlds.run(3, of_many_dtypes) == [(sums, True, calls)] * 3


def narrow(rank, dtype, big):
    p = parameter((1,), dtype, big if rank == 0 else 0.75)
    sum_gradients([p])
    return p.grad.item(), p.grad.dtype == dtype


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_narrow_floats_are_summed_in_fp32_and_rounded_once(worlds, dtype, big):
    """Beside `big` the spacing is 2, and 3/4 would be lost each time."""
    assert worlds.run(3, narrow, dtype, big) == [(big + 2, True)] * 3


def given_as(rank, form):
    model = nn.Linear(1, 2, bias=False)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    before = model.weight.grad
    forms = {
        "module": model,
        "list": list(model.parameters()),
        "generator": (p for p in model.parameters()),
        "twice": [model.weight, model.weight],
    }
    sum_gradients(forms[form])
    return model.weight.grad.flatten().tolist(), model.weight.grad is before


@pytest.mark.parametrize("form", ["module", "list", "generator", "twice"])
def test_parameters_in_any_form(worlds, form):
    assert worlds.run(2, given_as, form) == [([3.0, 3.0], True)] * 2


def nothing_to_sum(rank):
    with varcomm.trace() as calls:
        sum_gradients([])
        sum_gradients(nn.Tanh())
        sum_gradients([parameter(grad=1.0, requires_grad=False)])
    return len(calls)


def test_no_parameters_no_messages(worlds):
    assert worlds.run(2, nothing_to_sum) == [0, 0]


def in_formats(rank):
    """Ranks hold the gradient of one parameter in memory in different orders, or not at all."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 3, 2, 2, generator=generator)
    weight = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    matrix = nn.Parameter(torch.zeros(3, 2).T)
    if rank < 2:
        order = torch.channels_last if rank else torch.contiguous_format
        weight.grad = values.clone(memory_format=order)
        matrix.grad = values[0, :, 0].clone().T if rank else values[0, :, 0].T.contiguous()
    sum_gradients([weight, matrix])
    return (
        torch.equal(weight.grad, 2 * values),
        torch.equal(matrix.grad, 2 * values[0, :, 0].T),
        weight.grad.is_contiguous(memory_format=torch.channels_last),
    )


def test_any_memory_format(worlds):
    """Where there is no gradient, it gets the format of the parameter."""
    assert worlds.run(3, in_formats) == [(True, True, rank > 0) for rank in range(3)]


def in_a_part(rank):
    group = dist.new_group([1, 2])
    p = parameter(grad=float(rank))
    if rank:
        sum_gradients([p], group)
    dist.barrier()
    return p.grad.tolist()


def test_subgroup(worlds):
    assert worlds.run(3, in_a_part) == [[0, 0], [3, 3], [3, 3]]


def sparse(rank, everywhere):
    """Refuse sparse gradients; in debug() those of one rank are an error on all."""
    table = nn.Embedding(4, 2, sparse=everywhere or rank == 1)
    table(torch.tensor([1])).sum().backward()
    said = "the gradient of parameter 1, of shape (4, 2), is sparse. Use sparse=False, or densify"
    given = [parameter(grad=1.0), table.weight]
    if everywhere:
        match = f"^sum_gradients on rank {rank} of 2: {re.escape(said)}"
        with pytest.raises(ArgumentError, match=match):
            sum_gradients(given)
    else:
        with varcomm.debug(), pytest.raises(DisagreementError, match=re.escape(said)):
            sum_gradients(given)
    return given[0].grad.tolist()


@pytest.mark.parametrize("everywhere", [True, False])
def test_sparse_gradients_are_refused(worlds, everywhere):
    assert worlds.run(2, sparse, everywhere) == [[1, 1]] * 2


def one_tensor(rank):
    said = r"^sum_gradients on rank 0 of 1: parameters must be .* got a tensor\. Put it into a list"
    with pytest.raises(ArgumentError, match=said):
        sum_gradients(parameter(grad=1.0))


def test_a_tensor_is_no_list_of_parameters(worlds):
    assert worlds.run(1, one_tensor) == [None] * 1


def computed():
    return parameter() * 2


WRONG = {
    "names": (lambda: torch.nn.Linear(1, 1).named_parameters(), "it holds a tuple."),
    "groups": (lambda: torch.optim.SGD([parameter()]).param_groups, "it holds a dict."),
    "computed": (lambda: [computed()], "it holds a computed tensor."),
}


def no_parameters(rank, what):
    make, said = WRONG[what]
    with pytest.raises(ArgumentError, match=said) as caught:
        sum_gradients(make())
    return str(caught.value).endswith("Pass the model, or model.parameters().")


@pytest.mark.parametrize("what", WRONG)
def test_what_holds_no_parameters_is_refused(worlds, what):
    assert worlds.run(2, no_parameters, what) == [True, True]


def of_other_models(rank, what):
    shape, dtype, many = (2,), torch.float32, 1
    if rank == 1 and what == "shape":
        shape = (1, 2)
    if rank == 1 and what == "dtype":
        dtype = torch.float64
    if rank == 1 and what == "number":
        many = 2
    given = [parameter(shape, dtype, 1.0) for _ in range(many)]
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        sum_gradients(given)
    return str(caught.value).splitlines()[0], [p.grad.sum().item() for p in given] == [2.0] * many


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "shape",
            "sum_gradients: ranks disagree on shapes of parameters: "
            "rank 0 has [[2]]; rank 1 has [[1, 2]].",
        ),
        (
            "number",
            "sum_gradients: ranks disagree on shapes of parameters: "
            "rank 0 has [[2]]; rank 1 has [[2], [2]].",
        ),
        (
            "dtype",
            "all_reduce: ranks disagree on dtype: "
            "rank 0 has 'torch.float32'; rank 1 has 'torch.float64'.",
        ),
    ],
)
def test_debug_tells_all_ranks_of_other_models(worlds, what, said):
    assert worlds.run(2, of_other_models, what) == [(said, True)] * 2
