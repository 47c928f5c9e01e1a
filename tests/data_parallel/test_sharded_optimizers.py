"""Optimizers of pieces and of whole parameters: schedulers, norms, bytes, narrow parameters."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

import varcomm
from tests.data_parallel.cases import (
    DOUBLE,
    OPTIMIZERS,
    SOME,
    Layers,
    assert_equal,
    close,
    groups_of,
    loss_of,
    plain,
    sharded,
    square,
    twins,
)
from tests.worlds import WORLDS, on_ranks
from varcomm.data_parallel import ShardedGradients
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel import parallelize

BF16 = torch.bfloat16


def layers():
    return nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4), nn.Linear(4, 2)).double()


def rows_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rank, 3, dtype=DOUBLE, generator=generator)


def muon(groups):
    return torch.optim.Muon(groups, lr=0.02)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["balanced", "whole-parameters", "explicit"])
@on_ranks(*WORLDS)
def test_steps_are_those_of_one_process(rank, ranks, kind, optimizer):
    """Twelve steps of two micro-batches with clips and schedulers; rank 0 may have no loss.

    In every second step only the last backward sends sums.
    """
    model, twin = twins(Layers)
    if rank:  # rank 0 decides
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    own = sharded(model, kind, ranks, optimizer, bucket_bytes=300)
    one = OPTIMIZERS[optimizer](groups_of(twin))
    cycle, plateau = lr_scheduler.OneCycleLR, lr_scheduler.ReduceLROnPlateau
    schedulers = [(cycle(o, 0.1, total_steps=13), plateau(o, factor=0.5)) for o in (own, one)]
    for step in range(12):
        at_work = range(step % 4 == 2 and ranks > 1, ranks)
        for part in range(2):
            later = step % 2 and not part
            if rank in at_work:
                with own.accumulate() if later else nullcontext():
                    loss_of(model, step, rank, part).backward()
            (sum(loss_of(twin, step, r, part) for r in at_work) / ranks).backward()
            if step % 3 != 1 and not later:
                for how in ((0.5,), (0.4, 1.0)):
                    close(
                        own.clip_grad_norm_(*how), clip_grad_norm_(twin.parameters(), *how), 1e-10
                    )
            if step % 3 and not later:
                own.clip_grad_value_(0.01)
                clip_grad_value_(twin.parameters(), 0.01)
        for each, (by_step, by_loss) in zip((own, one), schedulers, strict=True):
            each.step()
            each.zero_grad()
            by_step.step()
            by_loss.step(1.0)
        for a, b in zip(own.param_groups, one.param_groups, strict=True):
            assert {**a, "params": 0, "param_names": 0} == {**b, "params": 0, "param_names": 0}
    assert_equal(model, twin, 1e-10)
    elements = sum(piece.stop - piece.start for piece in own.pieces.values())
    assert kind != "explicit" or ranks == 1 or rank or elements == 0
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = varcomm.all_gather_v(values, [len(values)] * ranks).view(ranks, -1)
    assert torch.equal(every, values.expand_as(every))  # bit for bit


@on_ranks(*WORLDS)
def test_muon_on_whole_parameters_beside_adamw_on_pieces(rank, ranks):
    """Muon for the matrices, which need one owner, and AdamW for the rest, by any pieces."""
    model, twin = twins(layers)
    named = [m.named_parameters() for m in (model, model, twin, twin)]
    dims = (2, 1, 2, 1)
    parts = [[one for one in own if one[1].dim() == n] for own, n in zip(named, dims, strict=True)]
    owns = [
        ShardedGradients(parts[0], muon, sizes="whole-parameters", reduce="sum"),
        ShardedGradients(parts[1], adamw, reduce="sum"),
    ]
    ones = [muon(parts[2]), adamw(parts[3])]
    for step in range(5):
        square(model(rows_of(rank, step))).backward()
        sum(square(twin(rows_of(r, step))) for r in range(ranks)).backward()
        for optimizer in (*owns, *ones):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, twin, 1e-9)
    mine = [(own, n, piece.value.shape) for own in (0, 1) for n, piece in owns[own].pieces.items()]
    every = [None] * ranks
    dist.all_gather_object(every, mine)
    pieces = [piece for of_rank in every for piece in of_rank]
    shapes = sorted(tuple(shape) for own, _, shape in pieces if own == 0)
    assert shapes == [(2, 4), (4, 9), (9, 3)]
    assert {name for _, name, _ in pieces} == set(layers().state_dict())


@on_ranks(2)
def test_schedulers_and_closures(rank, ranks):
    """Schedulers accept both optimizers; a closure computes the loss."""
    model, twin = twins(layers)
    own, one = ShardedGradients(model, adamw, reduce="sum"), adamw(twin.parameters())
    schedulers = [lr_scheduler.StepLR(o, 1, 0.5) for o in (own.optimizer, one)]
    schedulers += [lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in (own, one)]

    def closure(optimizer, module, parts, step):
        optimizer.zero_grad()
        loss = sum(square(module(rows_of(r + 1, step))) for r in parts)
        loss.backward()
        return loss.detach()

    for step in range(4):
        loss = own.step(lambda step=step: closure(own, model, [rank], step))
        assert loss.item() > 0
        one.step(lambda step=step: closure(one, twin, range(2), step))
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(model, twin, 1e-10)
    assert own.param_groups[0]["lr"] == own.optimizer.param_groups[0]["lr"] == 0.01 / 16


@on_ranks(3)
def test_clip_grad_norm(rank, ranks):
    """The norm is that of one process, also on ranks without a piece; 0 clips all away."""
    for order in (2.0, 1, torch.inf):
        model, twin = twins(layers)
        own = ShardedGradients(model, adamw, sizes=[0, 60, 26], reduce="sum")
        square(model(rows_of(rank, 0))).backward()
        sum(square(twin(rows_of(r, 0))) for r in range(3)).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1, order)
        own.reduce()
        with varcomm.trace() as calls:
            close(own.clip_grad_norm_(0.1, order), expected)
        assert [(call.sent, call.received) for call in calls] == [(16, 16)]
        one = dict(twin.named_parameters())
        for name, piece in own.pieces.items():
            close(piece.value.grad, one[name].grad.view(-1)[piece.start : piece.stop])
        own.clip_grad_norm_(0.0, order)
        assert not any(piece.value.grad.any() for piece in own.pieces.values())
        for piece in own.pieces.values():
            piece.value.grad.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            own.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize(("sizes", "dtype"), [("balanced", BF16), ("whole-parameters", DOUBLE)])
@on_ranks(*WORLDS)
def test_bytes_are_those_of_the_bound(rank, ranks, sizes, bucket_bytes, dtype):
    """With one value beside a piece of a parameter, in each bucket.

    Rows of 9 on any number of ranks, which padding would make more of.
    """
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)).to(dtype)
    own = ShardedGradients(model, plain, sizes=sizes, bucket_bytes=bucket_bytes)
    loss = model(torch.ones(1, 7, dtype=dtype)).sum()
    with varcomm.trace() as summing:
        loss.backward()
        own.reduce()
    with varcomm.trace() as gathering:
        own.step()
    numbers, width, others = 7 * 9 + 9 + 9 * 5 + 5, dtype.itemsize, ranks - 1
    n, pieces = sum(piece.stop - piece.start for piece in own.pieces.values()), len(own.pieces)
    flags = varcomm.all_reduce(torch.tensor(pieces)).item()
    assert [sum(call.sent for call in calls) for calls in (summing, gathering)] == [
        (numbers - n + flags - pieces) * width,
        others * n * width,
    ]
    assert [sum(call.received for call in calls) for calls in (summing, gathering)] == [
        others * (n + pieces) * width,
        (numbers - n) * width,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["balanced", "whole-parameters"])
@on_ranks(4)
def test_data_x_tensor_mesh(rank, sizes):
    """Pieces along the data axis of parameters that are sharded unevenly along the other.

    States are those of one process: two per element, and for the last bias, which is replicated, on
    both.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh["data"].get_local_rank()
    model, twin = twins(lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3)).double())
    parallelize(model, {"0": "column", "2": "row"}, group=mesh["tensor"])
    own, one = ShardedGradients(model, adamw, mesh["data"], sizes=sizes), adamw(twin.parameters())
    for step in range(4):
        square(model(rows_of(data + 1, step))).backward()
        (sum(square(twin(rows_of(d + 1, step))) for d in range(2)) / 2).backward()
        norm = own.clip_grad_norm_(0.3)
        close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.3), 1e-10)
        for optimizer in (own, one):
            optimizer.step()
            optimizer.zero_grad()
    whole, elements = dict(twin.named_parameters()), 0
    for name, parameter in model.named_parameters():
        spec = shard_spec(parameter)
        close(parameter, whole[name] if spec is None else spec.shard(whole[name]), 1e-9)
    for name, states in own.state_dict()["state"].items():
        for key, value in states.items():
            expected = one.state[whole[name]][key]
            assert value.shape == expected.shape
            if key == "step":
                assert torch.equal(value, expected)
                continue
            for box in value.boxes:
                ends = zip(box.offsets, box.tensor.shape, strict=True)
                close(box.tensor, expected[tuple(slice(o, o + n) for o, n in ends)], 1e-9)
                elements += box.tensor.numel()
    numbers = 3 * 7 + 7 + 7 * 3 + 3
    assert varcomm.all_reduce(torch.tensor(elements)) == 2 * (numbers + 3)


# Narrow parameters


def model_of():
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(BF16)


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1 + rank, 5, generator=generator).to(BF16)


def sgd(lr):
    return lambda groups: torch.optim.SGD(groups, lr)


def gradients_of(model, step, ranks):
    """For each rank its gradient of each parameter, as it is before any sum."""
    found = []
    for rank in range(ranks):
        model.zero_grad()
        model(data(step, rank)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return list(zip(*found, strict=True))


@on_ranks(*SOME)
def test_training_with_masters_is_that_of_one_process_bit_for_bit(rank, ranks):
    """Twenty steps beside one process that casts gradients before it adds them.

    They send two bytes per number in both directions, and the flags.
    """
    model, twin = twins(model_of)
    own = ShardedGradients(model, adamw, bucket_bytes=60)
    masters = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    one = adamw(masters)
    with varcomm.trace() as calls:
        for step in range(20):
            model(data(step, rank)).square().sum().backward()
            own.step()
            own.zero_grad()
            for master, parts in zip(masters, gradients_of(twin, step, ranks), strict=True):
                total = parts[0].float()
                for part in parts[1:]:
                    total = total + part.float()
                master.grad = total / ranks
            one.step()
            for parameter, master in zip(twin.parameters(), masters, strict=True):
                parameter.data.copy_(master.detach())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    whole = dict(zip(dict(twin.named_parameters()), masters, strict=True))
    for name, piece in own.pieces.items():
        assert piece.value.dtype == torch.float32
        assert torch.equal(piece.value, whole[name].view(-1)[piece.start : piece.stop])
    sent = varcomm.all_reduce(torch.tensor(sum(call.sent for call in calls))).item()
    numbers = sum(p.numel() for p in model.parameters())
    # one flag for each of four parameters in each of the other pieces
    least = 2 * 20 * 2 * (ranks - 1) * numbers
    assert least <= sent <= least + 20 * 2 * ranks * (ranks - 1) * 4


def ones():
    model = nn.Linear(1, 2, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    return model, ShardedGradients(model, sgd(2**-10))


def step(model, own):
    own.zero_grad()
    model(torch.ones(1, 1, dtype=BF16)).sum().backward()
    own.step()


@on_ranks(2)
def test_masters_take_over_values_written_into_parameters(rank, ranks):
    """They keep values that are left as they were; `.data` counts, of which torch knows nothing."""
    model, own = ones()
    for _ in range(2):
        step(model, own)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.load_state_dict(state)  # rounded, as it is in the model
        model.weight[1] = 3.0
    step(model, own)
    expected = [3 - 2**-10] if rank else [1 - 3 * 2**-10]
    assert [piece.value.tolist() for piece in own.pieces.values()] == [expected]
    model = nn.Linear(3, 2).to(BF16)
    own = ShardedGradients(model, sgd(0.5))
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    own.step()
    own.zero_grad()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.125, 0.125)
    before = [p.tolist() for p in model.parameters()]
    model(torch.zeros(1, 3, dtype=BF16)).mul(0).sum().backward()
    own.step()
    assert before == [p.tolist() for p in model.parameters()]
    assert model.weight.abs().max() == 0.125
