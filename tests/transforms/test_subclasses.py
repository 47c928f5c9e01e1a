"""A user's own subclass of Tensor is as good as a tensor; placeholders and wrappers are refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.masked import masked_tensor
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

import varcomm
from tests.graph.graphs import wild
from tests.worlds import on_ranks
from varcomm import checkpoint, data_parallel, tensor_parallel
from varcomm.graph import partition
from varcomm.sharding import to_dtensor

SIZES = [2, 0, 3]


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Unwrapped(torch.Tensor):
    """A subclass whose functions return ordinary tensors, as torchvision's do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Other(torch.Tensor):
    """A second subclass, which functions of torch do not combine with the first."""


class Mine(torch.nn.Parameter):
    """A user's own parameters."""


class Net(torch.nn.Linear):
    """A layer whose parameters may be of two subclasses."""

    def forward(self, x):
        y = torch.nn.functional.linear(x, self.weight)
        return y.as_subclass(torch.Tensor) + self.bias.as_subclass(torch.Tensor)


def model(kind):
    torch.manual_seed(0)
    made = Net(3, 4)
    kinds = {Named: (Named, Other), Unwrapped: (Mine, Mine)}.get(kind, ())
    for (name, parameter), of in zip([*made.named_parameters()], kinds, strict=False):
        value = parameter.detach()
        own = Mine(value) if of is Mine else torch.nn.Parameter(value.as_subclass(of))
        setattr(made, name, own)
    return made


def results(rank, kind, folder):
    """Return what a program computes with tensors of a class, as ordinary tensors."""
    x = torch.arange(6.0).view(2, 3)[: SIZES[rank]]
    x = torch.cat([x, torch.ones(SIZES[rank] - len(x), 3)]).as_subclass(kind).requires_grad_()
    y = varcomm.all_gather_v(x, SIZES)
    later = varcomm.all_gather_v(x, SIZES, async_op=True).wait()
    (y.square().sum() + later.sum()).backward()
    total = varcomm.reduce(varcomm.all_reduce(x.sum()), dst=2)
    part = varcomm.scatter_v(y.detach() if rank == 0 else None, SIZES)
    plan = varcomm.ExchangePlan.from_needed(torch.tensor([0, 4]), SIZES)
    found = [y, later, x.grad, total, part, plan(x), plan.adjoint(torch.ones(2).as_subclass(kind))]
    summed, sharded = model(kind), model(kind)
    summed(x.detach()).square().sum().backward()
    summed.bias.grad = summed.bias.grad if rank else None
    data_parallel.sum_gradients(summed)
    varcomm.broadcast_module(summed)
    found += [p.grad.clone() for p in summed.parameters()]
    found.append(tensor_parallel.clip_grad_norm_(summed.parameters(), 1.0))
    optimizer = data_parallel.ShardedGradients(sharded, lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        sharded(x.detach()).square().sum().backward()
        optimizer.reduce()
        found.append(optimizer.clip_grad_norm_(1.0))
        optimizer.clip_grad_value_(0.5)
        optimizer.step()
    found += sharded.parameters()
    state = {"model": sharded, "own": torch.ones(3).as_subclass(kind)}
    checkpoint.save(state, folder)
    again = {"model": model(kind), "own": torch.zeros(3).as_subclass(kind)}
    checkpoint.load(again, folder)
    found += [*again["model"].parameters(), again["own"]]
    return [value.detach().as_subclass(torch.Tensor) for value in found]


@pytest.mark.slow
@on_ranks(3)
def test_a_subclass_of_a_user(rank, tmp_path):
    plain = results(rank, torch.Tensor, tmp_path / "plain")
    for kind in (Named, Unwrapped):
        found = results(rank, kind, tmp_path / kind.__name__)
        assert all(map(torch.equal, found, plain))


def wrappers():
    x = torch.ones(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return [TwoTensor(x, x.clone()), masked_tensor(x, x > 0), TwoTensor(x[:0], x[:0])]


@on_ranks(3)
def test_wrappers_are_refused(rank, tmp_path):
    """Refuse wrappers of other tensors, whose memory an engine would read."""
    for x in wrappers():
        plan = varcomm.ExchangePlan.from_needed(torch.tensor([0]), [len(x)] + [1] * 2)
        for call in (
            lambda x=x: varcomm.all_reduce(x),
            lambda x=x: varcomm.all_gather_v(x, [len(x)] * 3, async_op=True),
            lambda x=x: varcomm.broadcast(x, like=x),
            lambda x=x, plan=plan: plan(x),
        ):
            with pytest.raises(varcomm.ArgumentError, match="wraps other tensors"):
                call()
        with pytest.raises(varcomm.VarcommError, match="'x' must be a plain dense tensor"):
            checkpoint.save({"x": x}, tmp_path)
        trained = torch.nn.Module()
        trained.weight = torch.nn.Parameter(x, requires_grad=x.requires_grad)
        for call in (varcomm.broadcast_module, lambda m: data_parallel.ShardedGradients(m, SGD)):
            with pytest.raises(varcomm.ArgumentError, match=r"wraps other tensors|no parameter"):
                call(trained)


@on_ranks(2)
def test_results_of_functional_collectives(rank):
    """Torch waits for the result of a functional collective in the first operation."""
    x = functional.all_reduce(torch.full((2, 3), rank + 1.0), "sum", dist.group.WORLD)
    assert isinstance(x, functional.AsyncCollectiveTensor)
    x.requires_grad_()
    y = varcomm.all_gather_v(x, [2, 2])
    assert torch.equal(y, torch.full((4, 3), 3.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


@on_ranks(3)
def test_tensors_without_values(rank, tmp_path):
    """Refuse tensors whose memory is not their values, on all ranks."""
    graph = partition(wild(), method="block")
    dtensor = to_dtensor(torch.ones(1, 2), [1, 1, 1])
    nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    trained = model(torch.Tensor)
    optimizer = data_parallel.ShardedGradients(trained, torch.optim.SGD)
    gradient = trained.weight.grad
    for value in (graph.edge_index, nested, torch.eye(2).to_sparse(), gradient):
        with pytest.raises(varcomm.VarcommError, match="'x' must be a plain dense tensor"):
            checkpoint.save({"x": value}, tmp_path)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(dtensor)
    for call in (
        lambda: varcomm.all_reduce(dtensor),
        lambda: data_parallel.sum_gradients(layer),
        lambda: data_parallel.ShardedGradients(layer, SGD),
        lambda: varcomm.broadcast_module(layer),
    ):
        with pytest.raises(varcomm.ArgumentError, match="to_local"):
            call()
    with pytest.raises(varcomm.ArgumentError, match="ids of this rank only"):
        varcomm.all_reduce(graph.edge_index)
    with pytest.raises(varcomm.ArgumentError, match="ShardedGradients"):
        tensor_parallel.grad_norm(trained.parameters())
    optimizer.close()
