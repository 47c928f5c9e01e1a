"""Summed gradients of replicated parameters: as in one process, on any number of ranks."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, assert_same_gradients, backward, twins
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, ShardedGradients, sum_gradients
from varcomm.tensor_parallel import ColumnParallelLinear


@on_ranks(*WORLDS)
def test_as_in_one_process(rank, ranks):
    """Two backwards and one sum, with empty shards, unused parameters, forces and checkpoints."""
    for name, (make, loss) in CASES.items():
        for bucket_bytes in (1, 150, 2**20):
            model, twin = twins(make)
            for _ in range(2):
                backward(loss(model, rank, ranks))
                sum(loss(twin, r, ranks) for r in range(ranks)).backward()
            with varcomm.debug() if bucket_bytes == 150 else nullcontext():
                sum_gradients(model, bucket_bytes=bucket_bytes)
            try:
                assert_same_gradients(model, twin)
            except AssertionError as error:
                raise AssertionError(f"{name}, {bucket_bytes} bytes") from error


@on_ranks(3)
def test_replicas_stay_equal_bit_for_bit(rank, ranks):
    sizes = (1, 4, 0)
    for dtype in (DOUBLE, torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        model = nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x = torch.randn(sum(sizes), 2, 3, 3).to(dtype).split(sizes)[rank]
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            sum_gradients(model)
            optimizer.step()
        for p, before in zip(model.parameters(), start, strict=True):
            assert (p - before).abs().max() > 0.01
            for other in varcomm.all_gather_v(p.detach().reshape(-1), [p.numel()] * ranks).chunk(3):
                assert torch.equal(other, p.reshape(-1))


def parameter(shape=(2,), dtype=torch.float32, grad=None, **options):
    p = nn.Parameter(torch.ones(shape, dtype=dtype), **options)
    if grad is not None:
        p.grad = torch.full_like(p, grad)
    return p


def lists(given):
    return [None if p.grad is None else p.grad.tolist() for p in given]


@on_ranks(3)
def test_parameters_without_a_gradient(rank, ranks):
    """Gradients on all ranks, on rank 1, on none; frozen with an old gradient, and without."""
    given = [parameter(grad=1.0), parameter(grad=5.0 if rank == 1 else None), parameter()]
    given += [parameter(grad=7.0, requires_grad=False), parameter(requires_grad=False)]
    sum_gradients(given)
    assert lists(given) == [[3, 3], [5, 5], None, [7, 7], None]


@on_ranks(3)
def test_gradients_are_summed_once(rank, ranks):
    """Views of one tensor, as autograd makes them; micro-batches; parameters listed twice."""
    a, b, p = parameter(), parameter(), parameter((1,))
    both = torch.ones(2) * (rank + 1)
    a.grad, b.grad = both, both.view(2)
    sum_gradients([a, b, a], bucket_bytes=8)
    for _ in range(2):  # a reduction in a hook would sum the first twice, and give 12
        p.sum().backward()
    sum_gradients([p])
    assert lists([a, b, p]) == [[6, 6], [6, 6], [6]]


@on_ranks(3)
def test_gradients_that_share_memory_in_two_calls(rank, ranks):
    """Autograd gives views of one tensor to both, and to an input, which is no parameter."""
    a, b, x = parameter((4,)), parameter((4,)), torch.zeros(2, 2, requires_grad=True)
    ((a.view(2, 2) + b.view(2, 2) + x) * (rank + 1.0)).sum().backward()
    sum_gradients([a])
    sum_gradients([b])
    assert lists([a, b]) == [[6.0] * 4] * 2
    assert x.grad.unique().tolist() == [rank + 1.0]


@on_ranks(3)
def test_large_gradients_travel_in_parts(rank, ranks):
    """Of 64 KiB at least; contiguous, transposed, unused on a rank, with a graph, in bf16."""
    values = torch.arange(40_000.0).remainder(251)
    given = [parameter((40_000,), grad=0.0), parameter((200, 200)), parameter((40_000,))]
    given += [parameter((40_000,)), parameter((80_000,), torch.bfloat16, grad=2.0)]
    given[0].grad += values
    given[1].grad = values.view(200, 200).T * (rank + 1)
    given[2].grad = values.clone() if rank == 1 else None
    (given[3].grad,) = torch.autograd.grad(given[3].square().sum(), given[3], create_graph=True)
    with varcomm.trace() as calls:
        sum_gradients(given, bucket_bytes=1)
    assert torch.equal(given[0].grad, 3 * values)
    assert torch.equal(given[1].grad, 6 * values.view(200, 200).T)
    assert torch.equal(given[2].grad, values)
    assert given[3].grad.unique().tolist() == [6.0]
    assert given[4].grad.unique().tolist() == [6.0]
    assert max(call.sent for call in calls) <= 2 * 2 / 3 * (2**16 + 2 * 4 + 2 * 32)


@on_ranks(3)
def test_messages(rank, ranks):
    """One per dtype, with a flag per parameter; large ones in two rounds, by pieces."""
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
    sums = [[6.0] * 2, [6.0] * 3, [30.0] * 4, [3 * 2.0**-50], []]
    assert [p.grad.flatten().tolist() for p in given[:5]] == sums
    assert all(p.grad.dtype == p.dtype and p.grad.shape == p.shape for p in given[:5])
    # to each of the two others: six of fp32, three of bf16 and the comparison, one of fp64
    sent = sorted([2 * (6 + 3) * 4, 2 * ((3 + 1) * 2 + 32), 2 * (1 + 1) * 8])
    assert sorted(call.sent for call in calls) == sent
    large = parameter((90_000,), grad=1.0)
    with varcomm.trace() as calls:
        sum_gradients([large], bucket_bytes=2**20)
    assert large.grad.unique().tolist() == [3.0]
    assert abs(sum(call.sent for call in calls) - 2 * 2 / 3 * 90_003 * 4) <= 2 * 4 * 2


class Sent(TorchDispatchMode):
    """Records whether the buffer of each gradient is freed when its sum replaces the gradient."""

    def __init__(self, parameters):
        super().__init__()
        self.gradients = {p.grad.data_ptr(): n for n, p in enumerate(parameters)}
        self.parameters = {p.data_ptr(): n for n, p in enumerate(parameters)}
        self.buffers, self.freed = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and args[0][0].data_ptr() in self.gradients:
            number = self.gradients[args[0][0].data_ptr()]
            self.buffers[number] = StorageWeakRef(out.untyped_storage())
        if func is torch.ops.aten.empty_like.default and args[0].data_ptr() in self.parameters:
            number = self.parameters[args[0].data_ptr()]
            self.freed[number] = self.buffers[number].expired()
        return out


@on_ranks(3)
def test_large_sent_buffers_are_freed_before_their_sums_are_used(rank, ranks):
    """In two rounds; a message of one round, of up to 16 KiB, keeps this rank's part."""
    for count in (1, 2):
        given = [parameter((9_000,), grad=1.0) for _ in range(count)]
        with Sent(given) as sent:
            sum_gradients(given, bucket_bytes=36_000)
        assert sent.freed == dict.fromkeys(range(count), True), count
        assert [p.grad.unique().tolist() for p in given] == [[3.0]] * count


@on_ranks(3)
def test_narrow_floats_are_summed_in_fp32_and_rounded_once(rank, ranks):
    """Beside `big` the spacing is 2, and 3/4 would be lost each time."""
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        p, q = (parameter((1,), dtype, big if rank == 0 else 0.75) for _ in range(2))
        sum_gradients([p])
        sum_gradients([q], use_fp32=False)
        assert (p.grad.item(), p.grad.dtype, q.grad.item()) == (big + 2, dtype, big)


@on_ranks(3)
def test_means_and_global_counts(rank, ranks):
    """A mean over ranks; over the rows of all ranks; and no rows, which is refused everywhere."""
    mean, counted = parameter(grad=float(rank)), parameter(grad=float(rank))
    count = GlobalCount()
    sum_gradients([mean], reduce="mean")
    count.add(3 * rank)
    count.add(1)
    sum_gradients([counted], reduce=count)
    assert lists([mean, counted]) == [[1.0, 1.0], [0.25, 0.25]]
    narrow = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    narrow.grad = torch.full_like(narrow, 60_000)  # whose sum fp16 does not have
    sum_gradients([narrow], reduce="mean")
    assert narrow.grad.tolist() == [60_000] * 2
    for adds, said in (
        (rank != 1, "on 1 of 3 ranks GlobalCount"),
        (True, "all ranks have counted"),
    ):
        if adds:
            count.add(0)
        with pytest.raises(ArgumentError, match=said):
            sum_gradients([parameter(grad=1.0)], reduce=count)


@on_ranks(3)
def test_any_memory_format(rank, ranks):
    """Gradients of other formats on each rank get that of the parameter."""
    values = torch.arange(24.0).view(1, 2, 3, 4)
    weight = nn.Parameter(torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
    if rank < 2:
        order = torch.channels_last if rank else torch.contiguous_format
        weight.grad = values.clone(memory_format=order)
    sum_gradients([weight])
    assert torch.equal(weight.grad, 2 * values)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


def sparse():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return table


def up():
    p = nn.Parameter(torch.ones(1).bfloat16())
    p.grad_dtype = None
    p.grad = torch.ones(1)
    return [p]


def read_before(parameters):
    list(parameters)
    return parameters


def with_main_grad(parameter):
    parameter.grad, parameter.main_grad = None, torch.ones(2)
    return parameter


# arguments, and a word of the message
REFUSED = (
    (lambda: parameter(grad=1.0), {}, "parameters"),
    (lambda: nn.Linear(1, 1).named_parameters(), {}, "parameters"),
    (lambda: torch.optim.SGD([parameter()]).param_groups, {}, "parameters"),
    (lambda: [parameter() * 2], {}, "parameters"),
    (sparse, {}, "sparse"),
    (up, {}, "grad_dtype"),
    (lambda: read_before(nn.Linear(1, 1).parameters()), {}, "generator"),
    (lambda: [with_main_grad(parameter())], {}, "main_grad"),
    (lambda: {parameter()}, {}, "a set, whose order"),
    (lambda: [parameter()], {"use_fp32": 1}, "use_fp32"),
    (lambda: [parameter()], {"reduce": "max"}, "reduce"),
    (lambda: [parameter()], {"bucket_bytes": 0}, "bucket_bytes"),
)

# of rank 1 inside debug(), and the word that differs
APART = (
    (lambda: [parameter((1, 2))], {}, "shapes of parameters"),
    (lambda: [parameter(), parameter()], {}, "shapes of parameters"),
    (lambda: [parameter(dtype=DOUBLE)], {}, "values of parameters"),
    (lambda: [nn.Parameter(torch.zeros(2))], {}, "values of parameters"),
    (lambda: [parameter()], {"reduce": "mean"}, "reduce"),
)


@on_ranks(2)
def test_refusals(rank, ranks):
    """Each on the rank that asks for it, before it communicates; in debug() on all."""
    for make, options, word in REFUSED:
        with pytest.raises(ArgumentError, match=word):
            sum_gradients(make(), **options)
    given = [parameter(grad=1.0), sparse().weight if rank else parameter((4, 2))]
    with varcomm.debug(), pytest.raises(DisagreementError, match="sparse"):
        sum_gradients(given)
    for make, options, word in APART:
        other = make() if rank else [parameter()]
        with varcomm.debug(), pytest.raises(DisagreementError, match=f"disagree on {word}"):
            sum_gradients(other, **(options if rank else {}))
    shards = nn.Sequential(nn.LayerNorm(3), ColumnParallelLinear(3, 5))
    for call in (sum_gradients, lambda model: ShardedGradients(model, torch.optim.SGD)):
        with pytest.raises(ArgumentError, match="is a shard of a parameter"):
            call(shards)
    alone = [torch.distributed.new_group([one]) for one in range(ranks)][rank]
    sum_gradients(shards, group=alone)  # in which no rank has another shard
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, torch.optim.SGD)
    with pytest.raises(ArgumentError, match="belongs to a ShardedGradients"):
        sum_gradients(model)
    own.close()
    sum_gradients(model)
    assert lists(given[:1]) == [[1, 1]]
