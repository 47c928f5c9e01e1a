"""Summed gradients of replicated parameters: as in one process, on any number of ranks."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, assert_same_gradients, backward
from tests.data_parallel.sharded_cases import twins
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, ShardedGradients, sum_gradients


def as_alone(rank, ranks):
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
    return True


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    assert all(worlds.run(ranks, as_alone, ranks))


def network(dtype):
    torch.manual_seed(5)
    convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)


def trained(rank, sizes, dtype):
    """Train for some steps; return the parameters, and how far they are from where they began."""
    model = network(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(sizes), 2, 3, 3, generator=generator).to(dtype).split(sizes)[rank]
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        sum_gradients(model)
        optimizer.step()
    moved = min((p - q).abs().max().item() for p, q in zip(model.parameters(), start, strict=True))
    return [p.detach() for p in model.parameters()], moved


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_replicas_stay_equal_bit_for_bit(worlds, dtype):
    first, *others = worlds.run(3, trained, (1, 4, 0), dtype)
    assert first[1] > 0.01
    for parameters, _ in others:
        assert all(map(torch.equal, first[0], parameters))


def parameter(shape=(2,), dtype=torch.float32, grad=None, **options):
    p = nn.Parameter(torch.ones(shape, dtype=dtype), **options)
    if grad is not None:
        p.grad = torch.full_like(p, grad)
    return p


def lists(given):
    return [None if p.grad is None else p.grad.tolist() for p in given]


def left_out(rank):
    """Gradients on all ranks, on rank 1, on none; frozen with an old gradient, and without."""
    given = [parameter(grad=1.0), parameter(grad=5.0 if rank == 1 else None), parameter()]
    given += [parameter(grad=7.0, requires_grad=False), parameter(requires_grad=False)]
    sum_gradients(given)
    return lists(given)


def test_parameters_without_a_gradient(worlds):
    assert worlds.run(3, left_out) == [[[3, 3], [5, 5], None, [7, 7], None]] * 3


def shared(rank):
    """Gradients that autograd has made views of one tensor are summed once each."""
    a, b = parameter(), parameter()
    both = torch.ones(2) * (rank + 1)
    a.grad, b.grad = both, both.view(2)
    sum_gradients([a, b])
    p = parameter((1,))  # two micro-batches
    for _ in range(2):
        p.sum().backward()
    sum_gradients([p])
    return lists([a, b, p])


def test_accumulated_and_shared_gradients_are_summed_once(worlds):
    """A reduction in a hook would sum the first micro-batch twice, and give 6."""
    assert worlds.run(2, shared) == [[[3, 3], [3, 3], [4]]] * 2


def of_many_dtypes(rank):
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
    return sums, kept, sorted(call.sent for call in calls)


def large(rank, numbers):
    p = parameter((numbers,), grad=1.0)
    with varcomm.trace() as calls:
        sum_gradients([p], bucket_bytes=2**20)
    return p.grad.unique().tolist(), sum(call.sent for call in calls)


def test_messages(worlds):
    """One per dtype, with a flag per parameter; large ones in two rounds, by pieces."""
    sums = [[6.0] * 2, [6.0] * 3, [30.0] * 4, [3 * 2.0**-50], []]
    # to each of the two others: six of fp32, three of bf16, one of fp64
    sent = sorted([2 * (6 + 3) * 4, 2 * (3 + 1) * 2, 2 * (1 + 1) * 8])
    assert worlds.run(3, of_many_dtypes) == [(sums, True, sent)] * 3
    for values, moved in worlds.run(3, large, 90_000):
        assert values == [3.0]
        assert abs(moved - 2 * 2 / 3 * 90_001 * 4) <= 2 * 4 * 2


def narrow(rank, dtype, big):
    p = parameter((1,), dtype, big if rank == 0 else 0.75)
    q = parameter((1,), dtype, big if rank == 0 else 0.75)
    sum_gradients([p])
    sum_gradients([q], use_fp32=False)
    return p.grad.item(), p.grad.dtype == dtype, q.grad.item()


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_narrow_floats_are_summed_in_fp32_and_rounded_once(worlds, dtype, big):
    """Beside `big` the spacing is 2, and 3/4 would be lost each time."""
    assert worlds.run(3, narrow, dtype, big) == [(big + 2, True, big)] * 3


def divided(rank):
    """A mean over ranks; over the rows of all ranks; and no rows, which is refused everywhere."""
    mean, counted = parameter(grad=float(rank)), parameter(grad=float(rank))
    count = GlobalCount()
    sum_gradients([mean], reduce="mean")
    count.add(3 * rank)
    count.add(1)
    sum_gradients([counted], reduce=count)
    told = []
    for adds in (rank != 1, True):
        if adds:
            count.add(0)
        with pytest.raises(ArgumentError) as caught:
            sum_gradients([parameter(grad=1.0)], reduce=count)
        told.append(str(caught.value))
    return mean.grad.tolist(), counted.grad.tolist(), [t.split(": ", 1)[1][:27] for t in told]


def test_means_and_global_counts(worlds):
    said = ["on 1 of 3 ranks GlobalCount", "all ranks have counted 0 ro"]
    assert worlds.run(3, divided) == [([1.0, 1.0], [0.25, 0.25], said)] * 3


def in_formats(rank):
    """Gradients of other formats on each rank, and one without."""
    values = torch.arange(24.0).view(1, 2, 3, 4)
    weight = nn.Parameter(torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
    if rank < 2:
        order = torch.channels_last if rank else torch.contiguous_format
        weight.grad = values.clone(memory_format=order)
    sum_gradients([weight])
    return torch.equal(weight.grad, 2 * values), weight.grad.is_contiguous(
        memory_format=torch.channels_last
    )


def test_any_memory_format(worlds):
    """Without a gradient, it gets the format of the parameter."""
    assert worlds.run(3, in_formats) == [(True, rank > 0) for rank in range(3)]


def in_a_part(rank):
    group = dist.new_group([1, 2])
    p = parameter(grad=float(rank))
    if rank:
        sum_gradients([p], group)
    dist.barrier()
    return p.grad.tolist()


def test_subgroup(worlds):
    assert worlds.run(3, in_a_part) == [[0, 0], [3, 3], [3, 3]]


def sparse():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return table


def up():
    p = nn.Parameter(torch.ones(1).bfloat16())
    p.grad_dtype = None
    p.grad = torch.ones(1)
    return [p]


# arguments, and a word of the message
REFUSED = {
    "a tensor": (lambda: (parameter(grad=1.0), {}), "parameters"),
    "names": (lambda: (nn.Linear(1, 1).named_parameters(), {}), "parameters"),
    "groups": (lambda: (torch.optim.SGD([parameter()]).param_groups, {}), "parameters"),
    "computed": (lambda: ([parameter() * 2], {}), "parameters"),
    "sparse": (lambda: (sparse(), {}), "sparse"),
    "another dtype": (lambda: (up(), {}), "grad_dtype"),
    "flag": (lambda: ([parameter()], {"use_fp32": 1}), "use_fp32"),
    "reduce": (lambda: ([parameter()], {"reduce": "max"}), "reduce"),
    "bucket": (lambda: ([parameter()], {"bucket_bytes": 0}), "bucket_bytes"),
}


def refused(rank):
    """Each on the rank that asks for it, before it communicates; in debug() on all."""
    for what, (make, word) in REFUSED.items():
        given, options = make()
        with pytest.raises(ArgumentError, match=word) as caught:
            sum_gradients(given, **options)
        assert "bucket" in what or str(caught.value).startswith(f"sum_gradients on rank {rank} of")
    given = [parameter(grad=1.0), sparse().weight if rank else parameter((4, 2))]
    with varcomm.debug(), pytest.raises(DisagreementError, match="sparse"):
        sum_gradients(given)
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, torch.optim.SGD)
    with pytest.raises(ArgumentError, match="belongs to a ShardedGradients"):
        sum_gradients(model)
    own.close()
    sum_gradients(model)
    return lists(given[:1])


def test_refusals(worlds):
    assert worlds.run(2, refused) == [[[1, 1]]] * 2


# of rank 1, and the word that differs
APART = {
    "shape": (lambda: [parameter((1, 2))], {}, "shapes of parameters"),
    "number": (lambda: [parameter(), parameter()], {}, "shapes of parameters"),
    "dtype": (lambda: [parameter(dtype=DOUBLE)], {}, "values of parameters"),
    "value": (lambda: [nn.Parameter(torch.zeros(2))], {}, "values of parameters"),
    "reduce": (lambda: [parameter()], {"reduce": "mean"}, "reduce"),
}


def apart(rank):
    for make, options, word in APART.values():
        given = make() if rank else [parameter()]
        with varcomm.debug(), pytest.raises(DisagreementError, match=f"disagree on {word}"):
            sum_gradients(given, **(options if rank else {}))


def test_debug_compares_models(worlds):
    worlds.run(2, apart)


def tied(rank):
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    varcomm.data_parallel.sum_gradients([one, two, one], bucket_bytes=8)
    return one.grad.tolist()


def test_a_parameter_listed_twice_is_summed_once(worlds):
    assert worlds.run(3, tied) == [[3.0, 3.0]] * 3
