"""varcomm and torch's own parallelism in one model: DTensors, fully_shard, parallelize_module.

All against one process, in fp64: outputs, gradients, a few steps of an optimizer.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import varcomm as vc
import varcomm.tensor_parallel as tp
from tests.ops.comparing import Failures, assert_none
from varcomm import ExchangePlan, ShardSizes
from varcomm.sharding import from_dtensor, to_dtensor
from varcomm.testing import gradcheck, gradgradcheck


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def made(kind, *args):
    torch.manual_seed(5)
    return kind(*args).double()


def check_close(failures, what, got, want):
    with failures.named(what):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


# ---- a matrix product of DTensors between two exchanges -----------------------------------------

UNEVEN = ShardSizes([1, 4, 2])
CHUNKS = ShardSizes.chunked(7, 3)


def product(x, weight, there, back, mesh):
    """Uneven rows, moved to torch's chunks, multiplied there, and moved back."""
    rows = to_dtensor(there(torch.sin(x)), CHUNKS, 0, mesh)
    y, _ = from_dtensor(torch.tanh(rows @ weight))
    return back(y)


def energy_and_forces(y, x):
    """A loss with the gradient of another in it, so that its own is of second order."""
    energy = y.square().sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + forces.pow(3).sum()


def product_on_ranks(rank):
    mesh = init_device_mesh("cpu", (3,))
    failures = Failures()
    there = ExchangePlan.from_needed(torch.tensor(CHUNKS.range(rank)), UNEVEN)
    back = ExchangePlan.from_needed(torch.tensor(UNEVEN.range(rank)), CHUNKS)
    whole, matrix = drawn(7, 4).requires_grad_(), drawn(4, 2, seed=1).requires_grad_()
    x = vc.shard_v(whole.detach(), UNEVEN).requires_grad_()
    weight = distribute_tensor(matrix.detach(), mesh, [Replicate()]).requires_grad_()
    y = product(x, weight, there, back, mesh)
    expected = torch.tanh(torch.sin(whole) @ matrix)
    energy_and_forces(y, x).backward()
    energy_and_forces(expected, whole).backward()
    gradient = weight.grad.full_tensor()
    check_close(failures, "output", y, vc.shard_v(expected, UNEVEN))
    check_close(failures, "gradient of the input", x.grad, vc.shard_v(whole.grad, UNEVEN))
    check_close(failures, "gradient of the weight", gradient, matrix.grad)

    def fn(x):
        return product(x, weight.detach(), there, back, mesh)

    for check in (gradcheck, gradgradcheck):
        with failures.named(check.__name__):
            check(fn, x, forward_mode=False, fast_mode=True)
    return failures


def test_a_product_of_dtensors_between_two_exchanges(worlds):
    assert_none(worlds.run(3, product_on_ranks))


STEPS = 3


def stepped(model, x, y):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().sum().backward()
        optimizer.step()


# ---- tensor parallelism of torch and of varcomm, one after the other -----------------------------

FEATURES = (5, 2)  # of varcomm's layers, which torch's cannot have
TOKENS = (5, 3)  # of each replica; on the ranks that share the model 3 + 2 and 2 + 1


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three pairs of linears; what is between them is given to `sharded` and `whole`."""

    def __init__(self):
        super().__init__()
        self.before, self.ours, self.after = Pair(8), Pair(sum(FEATURES)), Pair(10)
        self.leave = self.enter = lambda x: x

    def forward(self, x):
        x = self.leave(self.before(x))
        return 1 * self.after(self.enter(x + self.ours(x)))


def sharded(model, mesh):
    """Tensor parallelism over one dimension of the mesh, data parallelism over the other."""
    tensor, data = mesh["tensor"], mesh["data"]
    rows = ShardSizes.chunked(TOKENS[data.get_local_rank()], 2)
    options = {"sizes": FEATURES, "sequence_sizes": rows, "group": tensor}
    tp.parallelize(
        model,
        {
            "ours.up": partial(tp.ColumnParallelLinear.from_linear, **options),
            "ours.down": partial(tp.RowParallelLinear.from_linear, **options),
        },
        group=tensor,
    )
    by_rows = {"output_layouts": Shard(0), "use_local_output": False}
    plan = {
        "before.up": ColwiseParallel(),
        "before.down": RowwiseParallel(**by_rows),
        "after.up": ColwiseParallel(input_layouts=Shard(0)),
        "after.down": RowwiseParallel(),
    }
    parallelize_module(model, tensor, plan)
    model.leave = lambda x: from_dtensor(x)[0]
    model.enter = lambda x: to_dtensor(x, rows, 0, tensor)
    torchs = (model.before.up, model.before.down, model.after.up, model.after.down)
    for part in (*torchs, model.ours, model):
        fully_shard(part, mesh=data)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def whole_of(name, value, mesh):
    """Return a parameter on every rank, from its parts on the data axis and the tensor axis."""
    if name.startswith("ours"):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if name == "ours.down.bias":
            return value
        dim = 1 if name == "ours.down.weight" else 0
        return vc.all_gather_v(value.detach(), FEATURES, dim, group=mesh["tensor"])
    return value.full_tensor()


def tensor_parallel_on_ranks(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    failures = Failures()
    alone, model = made(Net), made(Net)
    sharded(model, mesh)
    x, y = drawn(sum(TOKENS), 6, seed=2), drawn(sum(TOKENS), 6, seed=3)
    own = partial(vc.shard_v, sizes=TOKENS, group=mesh["data"])
    mine = own(x).clone().requires_grad_()
    everything = x.clone().requires_grad_()
    expected, found = alone(everything), model(mine)
    check_close(failures, "output", found, own(expected))
    (expected - y).square().sum().backward()
    (found - own(y)).square().sum().backward()
    check_close(failures, "gradient of the input", mine.grad, own(everything.grad))
    for name, value in model.named_parameters():
        got = whole_of(name, value.grad, mesh)
        check_close(failures, f"gradient of {name}", got, alone.get_parameter(name).grad)
    stepped(alone, x, y)
    stepped(model, own(x), own(y))
    for name, value in model.named_parameters():
        got = whole_of(name, value, mesh)
        check_close(failures, name, got.detach(), alone.get_parameter(name).detach())
    return failures


@pytest.mark.slow
def test_layers_of_varcomm_between_those_of_parallelize_module(worlds):
    assert_none(worlds.run(4, tensor_parallel_on_ranks))
