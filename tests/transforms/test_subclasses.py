"""A user's own subclass of Tensor is as good as a tensor; placeholders and wrappers are refused."""

import pytest
import torch

import varcomm
from tests.graph.graphs import wild
from varcomm import checkpoint, data_parallel, tensor_parallel
from varcomm.graph import partition
from varcomm.sharding import to_dtensor

SIZES = [2, 0, 3]


class Named(torch.Tensor):
    """A subclass that adds nothing."""


def model(kind):
    torch.manual_seed(0)
    made = torch.nn.Linear(3, 4)
    if kind is Named:
        for name, parameter in list(made.named_parameters()):
            setattr(made, name, torch.nn.Parameter(parameter.detach().as_subclass(Named)))
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
    data_parallel.sum_gradients(summed)
    found += [p.grad.clone() for p in summed.parameters()]
    found.append(tensor_parallel.clip_grad_norm_(summed.parameters(), 1.0))
    optimizer = data_parallel.ShardedGradients(sharded, lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        sharded(x.detach()).square().sum().backward()
        optimizer.reduce()
        found.append(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
    found += sharded.parameters()
    state = {"model": sharded, "own": torch.ones(3).as_subclass(kind)}
    checkpoint.save(state, folder)
    again = {"model": model(kind), "own": torch.zeros(3).as_subclass(kind)}
    checkpoint.load(again, folder)
    found += [*again["model"].parameters(), again["own"]]
    return [value.detach().as_subclass(torch.Tensor) for value in found]


def test_a_subclass_of_a_user(worlds, tmp_path):
    plain = worlds.run(3, results, torch.Tensor, tmp_path / "plain")
    named = worlds.run(3, results, Named, tmp_path / "named")
    for of_plain, of_named in zip(plain, named, strict=True):
        for value, other in zip(of_plain, of_named, strict=True):
            assert torch.equal(value, other)


def refused(rank, folder):
    """Refuse tensors whose memory is not their values, on all ranks."""
    graph = partition(wild(), method="block")
    dtensor = to_dtensor(torch.ones(1, 2), [1, 1, 1])
    nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    trained = model(torch.Tensor)
    optimizer = data_parallel.ShardedGradients(trained, torch.optim.SGD)
    gradient = trained.weight.grad
    for value in (graph.edge_index, nested, torch.eye(2).to_sparse(), gradient):
        with pytest.raises(varcomm.VarcommError, match="'x' must be a plain dense tensor"):
            checkpoint.save({"x": value}, folder)
    with pytest.raises(varcomm.ArgumentError, match="to_local"):
        varcomm.all_reduce(dtensor)
    with pytest.raises(varcomm.ArgumentError, match="ShardedGradients"):
        tensor_parallel.grad_norm(trained.parameters())
    optimizer.close()


def test_tensors_without_values(worlds, tmp_path):
    worlds.run(3, refused, tmp_path)
