"""Agreement: an error on one rank is an error on all."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.transport.groups import ordered_group
from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, ExchangePlan, GroupError, VarcommError
from varcomm.transport.agreement import agree, compare, on_all_ranks, share
from varcomm.transport.group import resolve


class OwnError(VarcommError):
    """A kind that takes more than a message, and so cannot be made from one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unprintable(Exception):
    def __str__(self):
        return "\ud800 \0"  # a lone surrogate, which no encoding has


ERRORS = [
    (lambda: ArgumentError("no"), ArgumentError, "no"),
    (lambda: GroupError("no"), GroupError, "no"),
    (lambda: KeyError("name"), ArgumentError, "'name'"),
    (lambda: OSError(2, "gone", "a.txt"), ArgumentError, "gone"),
    (lambda: ValueError(lambda: None), ArgumentError, "lambda"),
    (Unprintable, ArgumentError, "\ud800"),
    (lambda: OwnError("this", "that"), VarcommError, "this and that"),
    (lambda: ArgumentError("x" * 5000), ArgumentError, "x" * 5000),
]


@on_ranks(3)
def test_error_on_one_rank_is_an_error_on_all(rank):
    group = resolve(None)
    said = {(1,): "rank 1 of 3: ", (0, 1, 2): "rank 0 of 3 (and on 2 more: [1, 2]): "}
    for through in (agree, share):
        for make, kind, text in ERRORS:
            for culprits, ranks in said.items():

                def local(make=make, culprits=culprits):
                    if rank in culprits:
                        raise make()

                call = partial(through, "set-up", local, group)
                error = refused_alike(kind, call, f"set-up: refused on {ranks}", text)
                assert on_all_ranks(error)

    def wrong_plan():
        with varcomm.debug():
            ExchangePlan.from_indices([torch.tensor([7 * (rank == 1)])] * 3, 1)

    table = str(refused_alike(ArgumentError, wrong_plan)).splitlines()
    assert table[1].split() == ["rank", "operation", "at"]
    assert agree("set-up", lambda: rank, group) == rank
    assert share("set-up", lambda: [rank] * rank, group) == [[], [1], [2, 2]]


@on_ranks(3)
def test_ranks_of_a_part_are_distinguished_from_those_of_the_world(rank):
    """Two of three ranks, in another order than in the world."""
    group = ordered_group([2, 1])
    numbers = "The group is of ranks 2, 1 of the world, which are 0, 1 in it."
    if rank:

        def refusing():
            if rank == 1:
                raise ArgumentError("no.")

        for call, words in (
            (lambda: varcomm.all_gather_v(torch.ones(rank, 1), [1, 1], group=group), ""),
            (lambda: agree("work", refusing, resolve(group)), "work: refused on rank 1 of 2: no."),
            (
                lambda: varcomm.all_gather_v(torch.ones(2, rank), [2, 2], group=group),
                "rank 0 has [2]; rank 1 has [1].",
            ),
            (
                lambda: compare(resolve(group), {"operation": "work", "value": rank}),
                "rank 0 has 2; rank 1 has 1.",
            ),
        ):
            with varcomm.debug(), pytest.raises(VarcommError) as caught:
                call()
            text = str(caught.value).splitlines()[0]
            assert words in text
            assert text.endswith(numbers)
    dist.barrier()
