"""What is wrong on one rank is the same error on every rank, and the world goes on."""

import pytest
import torch

from tests.plan.naive import three_still_exchange
from varcomm import ArgumentError, DisagreementError, ExchangePlan, VarcommError

LONGS = torch.tensor([0, 1])


def indices(*, first=LONGS, num_rows=2, sizes=None, ranks=3):
    rest = [torch.tensor([1])] * (ranks - 1)
    return lambda: ExchangePlan.from_indices([first, *rest], num_rows, sizes)


def needed(ids, sizes=(2, 0, 3)):
    return lambda: ExchangePlan.from_needed(ids, sizes)


ROW = [2, 1, 1]
RIGHT = {
    "indices": indices(),
    "indices and sizes": indices(sizes=[ROW] * 3),
    "needed": needed(torch.tensor([1, 4])),
}
# what is called right, what one rank calls in its place, and what it says
WRONG = {
    "no list": (
        "indices",
        lambda: ExchangePlan.from_indices(LONGS, 2),
        "indices must be a list of tensors, one a rank; got Tensor.",
    ),
    "too few": (
        "indices",
        indices(ranks=2),
        "indices must have one tensor a rank, 3; got 2.",
    ),
    "no tensor": (
        "indices",
        indices(first=[0, 1]),
        "indices[0] must be a torch.Tensor; got list.",
    ),
    "floats": (
        "indices",
        indices(first=torch.tensor([0.0])),
        "indices[0] must be of torch.int64 or torch.int32; got torch.float32.",
    ),
    "empty without dtype": (
        "indices",
        indices(first=torch.tensor([])),
        "got torch.float32. Give an empty one its dtype.",
    ),
    "bools": (
        "indices",
        indices(first=torch.tensor([True, False])),
        "indices[0] must be of torch.int64 or torch.int32; got torch.bool.",
    ),
    "two dimensions": (
        "indices",
        indices(first=LONGS.view(1, 2)),
        "indices[0] must have one dimension; got shape (1, 2).",
    ),
    "too large": (
        "indices",
        indices(first=torch.tensor([0, 2])),
        "indices[0] spans 0...2, out of range for 2 own rows.",
    ),
    "negative": (
        "indices",
        indices(first=torch.tensor([1, -1])),
        "indices[0] spans -1...1, out of range for 2 own rows.",
    ),
    "two devices": (
        "indices",
        indices(first=torch.empty(0, dtype=torch.int64, device="meta")),
        "indices must be on one device; got ['meta', 'cpu', 'cpu'].",
    ),
    "negative number of rows": (
        "indices",
        indices(num_rows=-2),
        "num_rows must not be negative; got [-2].",
    ),
    "number of rows is no integer": (
        "indices",
        indices(num_rows=2.0),
        "num_rows must hold ints; got [2.0], where entry 0 is 2.0 of type float.",
    ),
    "sizes are no lists": (
        "indices and sizes",
        indices(sizes=7),
        "sizes must be a list of lists, sizes[i][j] the rows that rank i sends to rank j; got int.",
    ),
    "sizes are a string": (
        "indices and sizes",
        indices(sizes="123"),
        "sizes must be a list of lists, sizes[i][j] the rows that rank i sends to rank j; got str.",
    ),
    "too few lists": (
        "indices and sizes",
        indices(sizes=[ROW] * 2),
        "sizes must have one list a rank, 3; got 2.",
    ),
    "too short a list": (
        "indices and sizes",
        indices(sizes=[ROW, ROW, [2, 1]]),
        "sizes[2] must have one entry a rank, 3; got 2: [2, 1].",
    ),
    "a flat list": (
        "indices and sizes",
        indices(sizes=ROW),
        "sizes[0] must be a list or tuple of ints, one a rank; got 2.",
    ),
    "sizes of other indices": (
        "indices and sizes",
        indices(sizes=[[3, 1, 1]] * 3),
        "indices[0] has 2 rows, but sizes[1][0] is 3.",
    ),
    "ids are no tensor": ("needed", needed([1, 4]), "needed must be a torch.Tensor; got list."),
    "ids are floats": (
        "needed",
        needed(torch.tensor([1.0])),
        "needed must be of torch.int64 or torch.int32; got torch.float32.",
    ),
    "ids have two dimensions": (
        "needed",
        needed(LONGS.view(2, 1)),
        "needed must have one dimension; got shape (2, 1).",
    ),
    "id too large": (
        "needed",
        needed(torch.tensor([1, 5])),
        "needed spans 1...5, out of range for 5 global rows.",
    ),
    "not owner by owner": (
        "needed",
        needed(torch.tensor([0, 4, 1])),
        "needed must come owner by owner, as received rows do; entry 1 is row 4 of rank 2, and "
        "entry 2 is row 1 of rank 0. Sort it.",
    ),
    "too few sizes": (
        "needed",
        needed(torch.tensor([1, 4]), (2, 3)),
        "sizes must have one entry a rank, 3; got 2: [2, 3].",
    ),
    "sizes are floats": (
        "needed",
        needed(torch.tensor([1, 4]), (2, 0.0, 3)),
        "sizes must hold ints; got [2, 0.0, 3], where entry 1 is 0.0 of type float.",
    ),
}


def refused(rank, name):
    """Make a plan wrongly on rank 1 alone; then make one again."""
    right, wrong, _ = WRONG[name]
    with pytest.raises(VarcommError) as caught:
        (wrong if rank == 1 else RIGHT[right])()
    return type(caught.value), str(caught.value), three_still_exchange(rank)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_on_one_rank_is_refused_on_all(worlds, name):
    right, _, said = WRONG[name]
    of = "from_needed" if right == "needed" else "from_indices"
    answers = worlds.run(3, refused, name)
    kinds, messages, after = zip(*answers, strict=True)
    assert kinds == (ArgumentError,) * 3
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"ExchangePlan.{of}: refused on rank 1 of 3: ")
    assert messages[0].endswith(said)
    assert after == (True,) * 3


def refused_on_many(rank):
    with pytest.raises(ArgumentError) as caught:
        indices(num_rows=2 - rank)()
    return str(caught.value)


def test_first_of_many_wrong_ranks_speaks(worlds):
    message = (
        "ExchangePlan.from_indices: refused on rank 1 of 3 (and on 1 more: [2]): "
        "indices[0] spans 0...1, out of range for 1 own rows."
    )
    assert worlds.run(3, refused_on_many) == [message] * 3


def other_counts(rank):
    """Rank 1 takes it that rank 0 sends it four rows."""
    expected = [[2, 4, 1], ROW, ROW] if rank == 1 else [ROW] * 3
    with pytest.raises(DisagreementError) as caught:
        indices(sizes=expected)()
    return str(caught.value), three_still_exchange(rank)


def test_counts_that_do_not_match_between_ranks(worlds):
    messages, after = zip(*worlds.run(3, other_counts), strict=True)
    said = (
        "ExchangePlan.from_indices: refused on rank 1 of 3: by its sizes it expects [4, 1, 1] "
        "rows from the ranks, which send [1, 1, 1]."
    )
    assert messages == (said,) * 3
    assert after == (True,) * 3


def other_sizes(rank):
    """Rank 2 has other sizes of the same total."""
    with pytest.raises(DisagreementError) as caught:
        needed(torch.tensor([0]), (2, 1, 2) if rank == 2 else (2, 0, 3))()
    return str(caught.value), three_still_exchange(rank)


def test_sizes_that_differ_between_ranks(worlds):
    messages, after = zip(*worlds.run(3, other_sizes), strict=True)
    said = "ExchangePlan.from_needed: ranks [2] have other sizes than rank 0."
    assert messages == (said,) * 3
    assert after == (True,) * 3
