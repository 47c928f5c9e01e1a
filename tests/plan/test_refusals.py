"""Plans made or called wrongly: type of the error, named argument, and ranks that raise."""

import re

import pytest
import torch

import varcomm
from tests.plan.naive import all_to_all_needs, three_still_exchange
from tests.worlds import on_ranks, refused_alike
from varcomm import (
    ArgumentError,
    DisagreementError,
    ExchangePlan,
    indexed_all_to_all_v,
)

LONGS = torch.tensor([0, 1])
ROW = [2, 1, 1]


def indices(*, first=LONGS, num_rows=2, sizes=None, ranks=3):
    rest = [torch.tensor([1])] * (ranks - 1)
    return lambda: ExchangePlan.from_indices([first, *rest], num_rows, sizes)


def needed(ids, sizes=(2, 0, 3)):
    return lambda: ExchangePlan.from_needed(ids, sizes)


RIGHT = {
    "from_indices": indices(),
    "with sizes": indices(sizes=[ROW] * 3),
    "from_needed": needed(torch.tensor([1, 4])),
}
# the right call of the other ranks, the wrong one of rank 1, the argument that the error names
WRONG = [
    ("from_indices", lambda: ExchangePlan.from_indices(LONGS, 2), "indices must"),
    ("from_indices", indices(ranks=2), "indices must have"),
    ("from_indices", indices(first=torch.tensor([0.0])), "indices[0]"),
    ("from_indices", indices(first=torch.tensor([])), "indices[0]"),
    ("from_indices", indices(first=LONGS.view(1, 2)), "indices[0]"),
    ("from_indices", indices(first=torch.tensor([0, 2])), "indices[0] spans 0...2"),
    ("from_indices", indices(first=torch.tensor([1, -1])), "indices[0] spans -1...1"),
    ("from_indices", indices(first=torch.empty(0, dtype=torch.int64, device="meta")), "device"),
    ("from_indices", indices(num_rows=-2), "num_rows"),
    ("with sizes", indices(sizes=7), "sizes must be"),
    ("with sizes", indices(sizes="123"), "sizes[0]"),
    ("with sizes", indices(sizes=[ROW] * 2), "sizes must have"),
    ("with sizes", indices(sizes=[ROW, ROW, [2, 1]]), "sizes[2]"),
    ("with sizes", indices(sizes=[[3, 1, 1]] * 3), "sizes[1][0]"),
    ("from_needed", needed([1, 4]), "needed must"),
    ("from_needed", needed(LONGS.view(2, 1)), "needed must be"),
    ("from_needed", needed(torch.tensor([1, 5])), "needed spans 1...5"),
    ("from_needed", needed(torch.tensor([0, 4, 1])), "needed must come owner by owner"),
    ("from_needed", needed(torch.tensor([1, 4]), (2, 3)), "sizes must have"),
    ("from_needed", needed(torch.tensor([1, 4]), (2, 0.0, 3)), "sizes must hold ints"),
]


@on_ranks(3)
def test_a_plan_that_is_wrong_on_one_rank_is_refused_on_all(rank):
    for right, wrong, word in WRONG:
        call = wrong if rank == 1 else RIGHT[right]
        refused_alike(ArgumentError, call, "refused on rank 1 of 3: ", word)
    assert three_still_exchange(rank)


@on_ranks(3)
def test_ranks_that_disagree(rank):
    expected = [ROW] * 3 if rank == 0 else [[2, 4, 1], ROW, ROW]
    others = needed(torch.tensor([0]), (2, 1, 2) if rank == 2 else (2, 0, 3))
    refused_alike(DisagreementError, indices(sizes=expected), "ranks [1, 2] have other sizes")
    refused_alike(DisagreementError, others, "ranks [2] have other sizes")
    first_of_many = "refused on rank 1 of 3 (and on 1 more: [2])"
    refused_alike(ArgumentError, indices(num_rows=2 - rank), first_of_many)
    assert three_still_exchange(rank)


# with the operation that refuses, and the argument that it names
CALLS = [
    (lambda p: p([1.0, 2.0]), "exchange", "tensor"),
    (lambda p: p(torch.eye(2).to_sparse()), "exchange", "tensor must be dense"),
    (lambda p: p(torch.zeros(7, 4), dim=1), "exchange", "2 own rows"),
    (lambda p: p.start(torch.zeros(3)), "exchange", "2 own rows"),
    (lambda p: p.adjoint(torch.zeros(2)), "exchange_adjoint", "7 received rows"),
    (lambda p: p(torch.zeros(2, 2), dim=2), "exchange", "dim=2"),
    (lambda p: p.adjoint(torch.zeros(())), "exchange_adjoint", "dim=0"),
    (lambda p: p.adjoint(torch.zeros(7, dtype=torch.bool)), "exchange_adjoint", "torch.bool"),
    (lambda p: p(torch.zeros(2, device="meta")), "exchange", "plan.to('meta')"),
    (lambda p: p(torch.zeros(2), use_fp32=1), "exchange", "use_fp32"),
    (lambda p: p.adjoint(torch.zeros(7), use_fp32=None), "exchange_adjoint", "use_fp32"),
]


@on_ranks(3)
def test_a_wrong_call_is_refused_before_any_communication(rank):
    """One rank alone calls: each refusal comes before any communication, or it would hang."""
    plan = all_to_all_needs(3).plan_of_indices(rank)
    plan(torch.zeros(plan.num_rows))  # a right call before changes nothing
    if rank == 2:
        for call, operation, word in CALLS:
            with pytest.raises(ArgumentError) as caught:
                call(plan)
            assert str(caught.value).startswith(f"{operation} on rank 2 of 3: ")
            assert word in str(caught.value)
        with pytest.raises(ArgumentError, match="dim=1"):
            plan.nbytes(torch.zeros(2), dim=1)
    assert three_still_exchange(rank)


@on_ranks(3)
def test_debug_compares_the_identities_of_plans(rank):
    """Two plans with the same counts; rank 1 calls the second."""
    sizes = [3] * 3
    first, second = (
        ExchangePlan.from_needed(torch.tensor([(3 * rank + 3 + k) % 9]), sizes) for k in (0, 1)
    )
    assert (first.send_counts, first.recv_counts) == (second.send_counts, second.recv_counts)
    plan = second if rank == 1 else first
    for call in (lambda: plan(torch.ones(3)), lambda: plan.adjoint(torch.ones(1))):
        with varcomm.debug(), pytest.raises(DisagreementError, match="ranks disagree on plan"):
            call()
    with varcomm.debug():
        assert first(torch.arange(3.0) + 3 * rank).item() == (3 * rank + 3) % 9
    of_state = ExchangePlan.from_state_dict(first.state_dict())
    identities = torch.tensor([each.identity for each in (first, second, of_state)])
    assert identities.unique().numel() == identities.count_nonzero() == 3
    assert torch.equal(varcomm.all_gather_v(identities, [3] * 3), identities.repeat(3))
    assert first.to("cpu").identity == first.identity


# --- indexed_all_to_all_v, which is an exchange by a plan for one call

X, ROWS = torch.zeros(2, 3), [1, 1, 1]
ONE = torch.tensor([1])


def call(x=X, first=ONE, sizes=None, dim=0, ranks=3):
    given = [ROWS] * 3 if sizes is None else sizes
    return lambda: indexed_all_to_all_v(x, [first] + [ONE] * (ranks - 1), given, dim=dim)


# the wrong call, the argument that its error names
WRONG_INDEXED = [
    (call(x=[1.0]), "tensor must be"),
    (call(dim=2), "dim=2"),
    (lambda: indexed_all_to_all_v(X, ONE, [ROWS] * 3), "indices must"),
    (call(ranks=2), "indices must have"),
    (call(first=torch.tensor([2])), "indices[0] spans 2...2"),
    (call(first=torch.tensor([3]), dim=1), "indices[0] spans 3...3"),
    (call(sizes=[ROWS]), "sizes must have"),
    (call(sizes=[ROWS, [2, 1, 1], ROWS]), "sizes[1][0]"),
    (call(x=torch.zeros(2, 3, device="meta")), "meta"),
]


@on_ranks(3)
def test_debug_compares_calls(rank):
    """Inside debug(), a call that is wrong on one rank or between ranks is an error on all."""
    plan = all_to_all_needs(3).plan_of_indices(rank)
    x, sizes = torch.zeros(plan.num_rows, 2), [[1, 2, 1], ROWS, ROWS] if rank == 1 else [ROWS] * 3
    fewer, narrower = x[1:] if rank == 0 else x, x[:, : 2 - rank % 2]
    counts = "indexed_all_to_all_v: rank 0 sends 1 rows to rank 1, which expects 2."
    for wrong, word in (
        (lambda: plan(fewer), "2 own rows"),
        (lambda: plan(narrower), "ranks disagree on shape of a row"),
        (call(sizes=sizes), counts),
    ):
        with varcomm.debug(), pytest.raises(DisagreementError, match=re.escape(word)):
            wrong()
    assert three_still_exchange(rank)


@on_ranks(3)
def test_a_wrong_call_without_a_plan(rank):
    """Rank 1 alone calls: each refusal comes before any communication, or it would hang."""
    if rank == 1:
        for wrong, word in WRONG_INDEXED:
            with pytest.raises(ArgumentError) as caught:
                wrong()
            assert str(caught.value).startswith("indexed_all_to_all_v on rank 1 of 3: ")
            assert word in str(caught.value)
    assert three_still_exchange(rank)
