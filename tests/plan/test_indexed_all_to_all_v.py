"""The indexed exchange without a plan: the signature that callers rely on, values, errors."""

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.plan.naive import WORLDS, all_to_all_needs, three_still_exchange
from varcomm import ArgumentError, DisagreementError, indexed_all_to_all_v

SIGNATURES = {
    "all_gather_v": "(tensor, sizes, dim=0, use_fp32=True, group=None, *, async_op=False)",
    "gather_v": "(tensor, sizes, dim=0, dst=0, group=None, *, async_op=False)",
    "scatter_v": "(tensor, sizes, dim=0, src=0, group=None, *, async_op=False)",
    "indexed_all_to_all_v": (
        "(tensor, indices, sizes, use_fp32=True, dim=0, group=None, *, async_op=False)"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(varcomm, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def formula(ranks):
    """Rank i sends rank j its rows i, i - 1, ..., 0, as often as (i + j) % 3 says."""
    indices = [
        [torch.arange(i, -1, -1).repeat((i + j) % 3) for j in range(ranks)] for i in range(ranks)
    ]
    return indices, [[(i + 1) * ((i + j) % 3) for j in range(ranks)] for i in range(ranks)]


def by_formula(rank, ranks, dim):
    """Row k of rank i is 100 i + k, plus 1/4 in the second column."""
    indices, sizes = formula(ranks)
    rows = 100 * rank + torch.arange(rank + 1.0)
    x = torch.stack([rows, rows + 0.25], 1).movedim(0, dim).requires_grad_()
    y = indexed_all_to_all_v(x, indices[rank], sizes, dim=dim)
    again = indexed_all_to_all_v(x, indices[rank], sizes, True, dim, None, async_op=True).wait()
    weight = torch.full_like(y, rank + 1.0)
    (gradient,) = torch.autograd.grad(y, x, weight)
    front = y.movedim(dim, 0)
    return front[:, 0].tolist(), front[:, 1].tolist(), gradient.tolist(), torch.equal(y, again)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("ranks", WORLDS)
def test_values_and_gradients_by_formula(worlds, ranks, dim):
    for j, answer in enumerate(worlds.run(ranks, by_formula, ranks, dim)):
        first, second, gradient, same = answer
        want = [
            100.0 * i + k
            for i in range(ranks)
            for _ in range((i + j) % 3)
            for k in range(i, -1, -1)
        ]
        assert first == want
        assert second == [value + 0.25 for value in want]
        # rank r has (j + r) % 3 copies of each row of rank j, each with weight r + 1
        slope = float(sum((j + r) % 3 * (r + 1) for r in range(ranks)))
        assert torch.equal(
            torch.tensor(gradient), torch.full((j + 1, 2), slope).movedim(0, dim).contiguous()
        )
        assert same


def narrow(rank, use_fp32):
    """Rank 0 has two copies of its row, of slopes 256 and 3/4, and rank 1 one of slope 3/4."""
    copies = (2, 1)
    indices = [torch.zeros(n if rank == 0 else 0, dtype=torch.int64) for n in copies]
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    y = indexed_all_to_all_v(x, indices, [copies, (0, 0)], use_fp32)
    slopes = torch.tensor([[256.0, 0.75], [0.75]][rank], dtype=torch.bfloat16)
    return torch.autograd.grad(y, x, slopes)[0].tolist()


@pytest.mark.parametrize(("use_fp32", "want"), [(True, 258.0), (False, 256.0)])
def test_copies_are_summed_in_fp32_if_asked(worlds, use_fp32, want):
    """Next to 256, bf16 has a spacing of 2, and loses 3/4 each time."""
    assert worlds.run(2, narrow, use_fp32) == [[want], [0.0]]


def same_as_plan(rank, ranks):
    needs = all_to_all_needs(ranks)
    x = torch.randn(needs.sizes[rank], 2)
    y = indexed_all_to_all_v(x, needs.index_of(rank, torch.int32), needs.matrix)
    return torch.equal(y, needs.plan_of_needed(rank)(x))


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_a_plan_of_the_same_needs(worlds, ranks):
    assert worlds.run(ranks, same_as_plan, ranks) == [True] * ranks


def sizes_of_other_libraries(rank):
    indices, sizes = formula(3)
    x = torch.arange(rank + 1.0)
    kinds = (sizes, tuple(map(tuple, sizes)), np.array(sizes), torch.tensor(sizes))
    return {tuple(indexed_all_to_all_v(x, indices[rank], kind).tolist()) for kind in kinds}


def test_sizes_may_be_of_any_library(worlds):
    assert [len(results) for results in worlds.run(3, sizes_of_other_libraries)] == [1] * 3


def in_a_part(rank):
    group = dist.new_group([1, 2])
    received = None
    if rank:
        indices = [torch.tensor([0]), torch.tensor([1, 1])]
        rows = torch.tensor([10.0, 11.0]) * rank
        received = indexed_all_to_all_v(rows, indices, [[1, 2]] * 2, group=group).tolist()
    dist.barrier()
    return received


def test_subgroup(worlds):
    assert worlds.run(3, in_a_part) == [None, [10, 20], [11, 11, 22, 22]]


X, ROW = torch.zeros(2, 3), [1, 1, 1]
ONE = torch.tensor([1])


def call(x=X, first=ONE, sizes=None, dim=0, ranks=3):
    given = [ROW] * 3 if sizes is None else sizes
    return lambda: indexed_all_to_all_v(x, [first] + [ONE] * (ranks - 1), given, dim=dim)


# the wrong call, the argument that its error names
WRONG = [
    (call(x=[1.0]), "tensor must be"),
    (call(dim=2), "dim=2"),
    (call(dim=1.0), "dim must be"),
    (lambda: indexed_all_to_all_v(X, ONE, [ROW] * 3), "indices must be"),
    (call(ranks=2), "indices must have"),
    (call(first=torch.tensor([2])), "indices[0] spans 2...2"),
    (call(first=torch.tensor([3]), dim=1), "indices[0] spans 3...3"),
    (call(first=torch.tensor([True, False])), "indices[0] must be"),
    (call(sizes=[ROW]), "sizes must have"),
    (call(sizes=7), "sizes must be"),
    (call(sizes=[ROW, ROW, [1, -1, 1]]), "sizes[2]"),
    (call(sizes=[ROW, [2, 1, 1], ROW]), "sizes[1][0]"),
    (call(x=torch.zeros(2, 3, device="meta")), "meta"),
]


def called_wrongly(rank):
    """Rank 1 alone calls: each refusal comes before any communication, or it would hang."""
    if rank == 1:
        for wrong, word in WRONG:
            with pytest.raises(ArgumentError) as caught:
                wrong()
            assert str(caught.value).startswith("indexed_all_to_all_v on rank 1 of 3: ")
            assert word in str(caught.value)
    return three_still_exchange(rank)


def test_refused_before_any_communication(worlds):
    assert worlds.run(3, called_wrongly) == [True] * 3


def other_counts(rank):
    """Rank 1 takes it that rank 0 sends it two rows; in debug() all ranks hear of it."""
    sizes = [[1, 2, 1], ROW, ROW] if rank == 1 else [ROW] * 3
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        call(sizes=sizes)()
    return str(caught.value).splitlines()[0], three_still_exchange(rank)


def test_counts_that_do_not_match_between_ranks(worlds):
    said = "indexed_all_to_all_v: rank 0 sends 1 rows to rank 1, which expects 2."
    assert worlds.run(3, other_counts) == [(said, True)] * 3
