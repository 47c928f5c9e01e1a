"""What every rank computed alike counts once, in derivatives of any order."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import global_add_pool

import varcomm
from tests.graph.batches import SECOND, partitions, whole
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import replicated


@on_ranks(*WORLDS)
def test_a_loss_of_forces(rank):
    """The energy has parameters before the pool and after it."""
    failures, given = Failures(), whole(4)
    torch.manual_seed(0)
    model = nn.ModuleDict({"before": nn.Linear(4, 5), "after": nn.Linear(5, 1)}).double()

    def learn(x, pool, once, mean):
        model.zero_grad()
        energy = model["after"](pool(model["before"](x).tanh()).tanh()).sum()
        (forces,) = torch.autograd.grad(once(energy), x, create_graph=True)
        loss = mean((forces - 1) ** 2)
        loss = loss + once(energy**2)  # the two kinds of what counts once
        loss.backward()
        return loss.item()

    def pool_alone(x):
        return torch.zeros(5, 5).double().index_add(0, given.batch, x)

    x = given.x.clone().requires_grad_()
    expected = learn(x, pool_alone, lambda value: value, torch.mean)
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for graph in partitions(given):
        own = given.x[graph.owned_ids].requires_grad_()
        got = learn(
            own,
            lambda x, batch=graph.batch: global_add_pool(x, batch),
            lambda value, graph=graph: replicated(value, graph),
            graph.mean,
        )
        varcomm.data_parallel.sum_gradients(model)
        with failures.named(graph.method):
            assert got == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(own.grad, x.grad[graph.owned_ids], **SECOND)
            for key, gradient in gradients.items():
                torch.testing.assert_close(model.get_parameter(key).grad, gradient, **SECOND)
    return failures


# values of ranks 0, 1 and 2, and the start of the message
UNLIKE = [
    ([torch.tensor(1.5), torch.tensor(1.25)], "replicated: ranks disagree on the value"),
    ([torch.ones(2), torch.zeros(2)], "replicated: ranks disagree on the value"),
    ([torch.ones(2), torch.ones(1)], "replicated: ranks disagree on shape"),
]


@on_ranks(3)
def test_forward_mode_groups_and_refusals(rank):
    # the slope of what is counted once is the slope of any copy
    start, direction = torch.tensor(rank + 1.0), torch.tensor(1.0)
    found = torch.func.jvp(lambda x: replicated(varcomm.all_reduce(x) ** 2), (start,), (direction,))
    assert [value.item() for value in found] == [36.0, 36.0]
    # of all ranks, or of some of them
    some = torch.distributed.new_group([1, 2])
    x = torch.ones(2, requires_grad=True)
    with varcomm.trace() as calls:
        loss = replicated(x, some if rank else None)
        loss.sum().backward()
    assert not calls
    loss.detach().zero_()  # a tensor of its own
    assert x.tolist() == [1.0, 1.0]
    assert x.grad.tolist() == pytest.approx([0.5, 0.5] if rank else [1 / 3, 1 / 3])
    for values, message in UNLIKE:
        with varcomm.debug(), pytest.raises(DisagreementError, match=message):
            replicated(values[rank > 0])
        with varcomm.debug():
            assert torch.equal(replicated(values[0]), values[0])
    for value in (1.0, torch.tensor(1)):
        with pytest.raises(ArgumentError, match=f"replicated on rank {rank} of 3: value must be"):
            replicated(value)
