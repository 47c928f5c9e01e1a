"""A plan called with what it is not for: told before any communication."""

import re

import pytest
import torch

import varcomm
from tests.plan.naive import all_to_all_needs, three_still_exchange
from varcomm import ArgumentError, DisagreementError, VarcommError

# each with the operation that refuses, and what it says
CALLS = {
    "no tensor": (lambda p: p([1.0, 2.0]), "exchange", "tensor must be a torch.Tensor; got list."),
    "sparse": (
        lambda p: p(torch.eye(2).to_sparse()),
        "exchange",
        "tensor must be dense; got torch.sparse_coo of torch.float32. "
        "Convert it: to_dense(), dequantize(), or to_padded_tensor().",
    ),
    "rows": (
        lambda p: p(torch.zeros(7, 4), dim=1),
        "exchange",
        "the tensor of shape (7, 4) has 4 rows along dim 1, but the plan is for 2 own rows.",
    ),
    "rows at the start": (
        lambda p: p.start(torch.zeros(3)),
        "exchange",
        "the tensor of shape (3,) has 3 rows along dim 0, but the plan is for 2 own rows.",
    ),
    "received rows": (
        lambda p: p.adjoint(torch.zeros(2)),
        "exchange_adjoint",
        "the tensor of shape (2,) has 2 rows along dim 0, but the plan is for 7 received rows.",
    ),
    "dim": (
        lambda p: p(torch.zeros(2, 2), dim=2),
        "exchange",
        "dim=2 is out of range for a tensor of shape (2, 2).",
    ),
    "scalar": (
        lambda p: p.adjoint(torch.zeros(())),
        "exchange_adjoint",
        "dim=0 is out of range for a tensor of shape (). A scalar has no rows: unsqueeze(0) it.",
    ),
    "bools have no sum": (
        lambda p: p.adjoint(torch.zeros(7, dtype=torch.bool)),
        "exchange_adjoint",
        "a sum of torch.bool is not defined. Convert: tensor.to(torch.int64) counts, and its "
        "result > 0 is the logical or.",
    ),
    "device": (
        lambda p: p(torch.zeros(2, device="meta")),
        "exchange",
        "the tensor is on meta, the plan on cpu. Move one of them: plan.to('meta').",
    ),
}


def called_wrongly(rank, name):
    """One rank alone calls: it must hear before it communicates, or it would hang."""
    plan = all_to_all_needs(3).plan_of_indices(rank)
    if rank != 2:
        return None, three_still_exchange(rank)
    call, operation, said = CALLS[name]
    with pytest.raises(ArgumentError, match=f"^{operation} on rank 2 of 3: {re.escape(said)}$"):
        call(plan)
    return True, three_still_exchange(rank)


@pytest.mark.parametrize("name", CALLS)
def test_call_refused_before_any_communication(worlds, name):
    refusals, after = zip(*worlds.run(3, called_wrongly, name), strict=True)
    assert refusals == (None, None, True)
    assert after == (True,) * 3


def nbytes_of_no_dim(rank):
    plan = all_to_all_needs(1).plan_of_indices(rank)
    with pytest.raises(ArgumentError, match=r"^dim=1 is out of range for a tensor of shape \(2,\)"):
        plan.nbytes(torch.zeros(2), dim=1)


def test_nbytes_along_no_dimension(worlds):
    assert worlds.run(1, nbytes_of_no_dim) == [None] * 1


def compared(rank):
    """Inside debug(), a call that is wrong on one rank or between ranks is an error on all."""
    plan = all_to_all_needs(3).plan_of_indices(rank)
    x = torch.zeros(plan.num_rows, 2)
    messages = []
    for call in (lambda: plan(x[1:] if rank == 0 else x), lambda: plan(x[:, : 2 - rank % 2])):
        with varcomm.debug(), pytest.raises(VarcommError) as caught:
            call()
        messages.append((type(caught.value), str(caught.value).splitlines()[0]))
    return messages, three_still_exchange(rank)


def test_debug_tells_all_ranks(worlds):
    told, after = zip(*worlds.run(3, compared), strict=True)
    disagree = (
        DisagreementError,
        "exchange: ranks disagree on shape of a row: rank 0 has [2]; rank 1 has [1]; "
        "rank 2 has [2].",
    )
    assert [second for _, second in told] == [disagree] * 3
    said = "has 1 rows along dim 0, but the plan is for 2 own rows."
    assert all(said in message for (_, message), _ in told)
    assert after == (True,) * 3


def other_plans(rank):
    """Two plans with the same counts; one rank takes the other one."""
    sizes = [3] * 3
    first, second = (
        varcomm.ExchangePlan.from_needed(torch.tensor([(3 * rank + 3 + k) % 9]), sizes)
        for k in (0, 1)
    )
    alike = (first.send_counts, first.recv_counts) == (second.send_counts, second.recv_counts)
    plan = second if rank == 1 else first
    messages = []
    for call in (lambda: plan(torch.ones(3)), lambda: plan.adjoint(torch.ones(1))):
        with varcomm.debug(), pytest.raises(DisagreementError) as caught:
            call()
        messages.append(str(caught.value).splitlines()[0])
    with varcomm.debug():
        received = first(torch.arange(3.0) + 3 * rank).item()
    of_indices = varcomm.ExchangePlan.from_state_dict(first.state_dict())
    names = [f"{plan.identity:08x}" for plan in (first, second, of_indices)]
    return alike, messages, received, names, first.to("cpu").identity == first.identity


def test_debug_tells_plans_apart(worlds):
    alike, told, received, names, kept = zip(*worlds.run(3, other_plans), strict=True)
    assert alike == kept == (True,) * 3
    first, second, of_indices = names[0]
    assert names == (names[0],) * 3
    assert len({first, second, of_indices, "00000000"}) == 4
    said = f"rank 0 has '{first}'; rank 1 has '{second}'; rank 2 has '{first}'."
    operations = ("exchange", "exchange_adjoint")
    assert told == ([f"{name}: ranks disagree on plan: {said}" for name in operations],) * 3
    assert received == (3.0, 6.0, 0.0)
