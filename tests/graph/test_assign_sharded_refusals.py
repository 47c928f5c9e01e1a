"""What ``assign_sharded`` refuses, on every rank with one message though one rank is wrong."""

import re

import pytest
import torch

from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.graph.partitioners.assign_sharded import assign_sharded

POS = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
NONE = torch.zeros(0, 2)
SHAPE = "needs pos of shape (n, D), a row for each node; got "
ONES = torch.ones(2, dtype=torch.int64)


def message_on(rank, culprit, wrong, right, kind):
    (pos, parts, method), options = wrong if rank == culprit else right
    with pytest.raises(kind) as caught:
        assign_sharded(pos, parts, method, **options)
    return str(caught.value)


def call(pos=POS, parts=2, method="rcb", **options):
    return (pos, parts, method), options


def weighted(*weight):
    return call(node_weight=torch.tensor(weight))


# what one of the ranks passes, and what all of them are told
WRONG = {
    "an unknown method": (call(method="metis"), "method must be one of rcb, hilbert; got 'metis'."),
    "no parts": (call(parts=0), "parts must be a positive integer; got 0."),
    "parts as float": (call(parts=2.0), "parts must be a positive integer; got 2.0."),
    "no tensor": (call([[0.0, 1.0]]), "pos must be a tensor of real numbers; got list."),
    "complex": (call(POS + 0j), "pos must be a tensor of real numbers; got torch.complex64."),
    "three dimensions": (
        call(POS[None]),
        f"{SHAPE}(1, 2, 2).",
    ),
    "a number": (call(POS[0, 0]), f"{SHAPE}()."),
    "no coordinates": (
        call(POS[:, :0]),
        f"{SHAPE}(2, 0).",
    ),
    "too many coordinates": (
        call(torch.zeros(0, 64), method="hilbert"),
        'method="hilbert" takes at most 63 coordinates; got 64. Choose method="rcb".',
    ),
    "not a number": (
        call(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])),
        "pos must be finite; row 1 is [nan, 0.0].",
    ),
    "infinite": (call(POS / 0), "pos must be finite; row 0 is [nan, inf]."),
    "another device": (
        call(POS.to("meta")),
        "the tensor is on meta, but this group has an engine for cpu and cuda only",
    ),
    "weights of other length": (
        weighted(1, 2, 3),
        "node_weight must hold an integer for each of the 2 rows; got torch.int64 of shape (3,).",
    ),
    "weights as float": (
        weighted(1.0, 2.0),
        "node_weight must hold an integer for each of the 2 rows; got torch.float32 of shape (2,). "
        "Scale and round it.",
    ),
    "negative weights": (weighted(1, -2), "node_weight must not be negative; its least is -2."),
    "weights elsewhere": (
        call(node_weight=ONES.to("meta")),
        "node_weight is on meta, pos is on cpu.",
    ),
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("what", WRONG)
def test_one_rank_is_wrong_and_all_say_so(worlds, what, culprit):
    wrong, message = WRONG[what]
    kind = GroupError if what == "another device" else ArgumentError
    told = worlds.run(3, message_on, culprit, wrong, call(NONE), kind)
    assert told[0].startswith(f"graph.assign_sharded: refused on rank {culprit} of 3: ")
    assert re.search(re.escape(message), told[0])
    assert told == told[:1] * 3


@pytest.mark.parametrize(
    ("another", "message"),
    [
        (call(torch.zeros(0, 3)), "ranks disagree on coordinates: rank 0 has 2; rank 1 has 3"),
        (call(torch.zeros(0)), "ranks disagree on coordinates: rank 0 has 2; rank 1 has 1"),
        (call(NONE.double()), "on dtype: rank 0 has 'torch.float32'; rank 1 has 'torch.float64'"),
        (
            call(method="hilbert"),
            "on method: rank 0 has 'rcb'; rank 1 has 'hilbert'",
        ),
        (call(parts=3), "ranks disagree on parts: rank 0 has 2; rank 1 has 3"),
        (call(node_weight=ONES), "on node_weight: rank 0 has 'none'; rank 1 has 'given'"),
    ],
)
def test_ranks_that_differ(worlds, another, message):
    told = worlds.run(3, message_on, 1, another, call(), DisagreementError)
    assert told[0].startswith("graph.assign_sharded: ranks disagree")
    assert message in told[0]
    assert told == told[:1] * 3


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([0, 0], "graph.assign_sharded: node_weight must not be zero everywhere."),
        (
            [2**59, 2**59],
            "graph.assign_sharded: node_weight adds up to 3.46e+18, and must stay below 2.31e+18. "
            "Divide all weights.",
        ),
    ],
)
def test_weights_of_all_ranks_together(worlds, weight, message):
    one = weighted(*weight)
    assert worlds.run(3, message_on, 0, one, one, ArgumentError) == [message] * 3


def some_weigh_nothing(rank):
    pos = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    weight = torch.tensor([0, 0] if rank != 1 else [1, 1])
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = assign_sharded(pos[:0], 2, "rcb", node_weight=nothing)
    return assign_sharded(pos, 2, "rcb", node_weight=weight).tolist(), empty.tolist()


def test_weights_may_be_zero_on_a_rank_and_there_may_be_no_nodes(worlds):
    assert worlds.run(3, some_weigh_nothing) == [([0, 0], []), ([0, 1], []), ([1, 1], [])]
