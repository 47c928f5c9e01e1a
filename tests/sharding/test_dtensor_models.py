"""varcomm and torch's own parallelism in one model: DTensors, fully_shard, parallelize_module.

Against one process, in fp64: outputs and gradients.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import varcomm as vc
import varcomm.tensor_parallel as tp
from tests.ops.comparing import Failures, assert_none
from varcomm import ShardSizes
from varcomm.sharding import from_dtensor, to_dtensor


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def made(kind, *args):
    torch.manual_seed(5)
    return kind(*args).double()


def check_close(failures, what, got, want):
    with failures.named(what):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


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
    return failures


@pytest.mark.slow
def test_layers_of_varcomm_between_those_of_parallelize_module(worlds):
    assert_none(worlds.run(4, tensor_parallel_on_ranks))
