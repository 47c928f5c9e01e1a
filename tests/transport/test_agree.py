"""Agreement: an error on one rank is an error on all."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.transport.groups import ordered_group
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


def refused(rank):
    group, said = resolve(None), []
    for through in (agree, share):
        for make, kind, text in ERRORS:
            for culprits in ((1,), (0, 1, 2)):

                def local(make=make, culprits=culprits):
                    if rank in culprits:
                        raise make()

                with pytest.raises(kind) as caught:
                    through("set-up", local, group)
                assert text in str(caught.value)
                assert on_all_ranks(caught.value)
                said.append(str(caught.value)[:60].encode(errors="replace"))
    with pytest.raises(ArgumentError) as caught, varcomm.debug():
        ExchangePlan.from_indices([torch.tensor([7 * (rank == 1)])] * 3, 1)
    said.append(str(caught.value).splitlines()[1].split())
    assert agree("set-up", lambda: rank, group) == rank
    assert share("set-up", lambda: [rank] * rank, group) == [[], [1], [2, 2]]
    return said


def test_error_on_one_rank_is_an_error_on_all(worlds):
    said, *others = worlds.run(3, refused)
    assert others == [said] * 2
    assert said[0] == b"set-up: refused on rank 1 of 3: no"
    assert said[1].startswith(b"set-up: refused on rank 0 of 3 (and on 2 more: [1, 2]): no")
    assert said[-1] == ["rank", "operation", "at"]


def in_a_part(rank):
    """Two of three ranks, in another order than in the world."""
    group = ordered_group([2, 1])
    said = []
    if rank:

        def refusing():
            if rank == 1:
                raise ArgumentError("no.")

        calls = (
            lambda: varcomm.all_gather_v(torch.ones(rank, 1), [1, 1], group=group),
            lambda: agree("work", refusing, resolve(group)),
            lambda: varcomm.all_gather_v(torch.ones(2, rank), [2, 2], group=group),
            lambda: compare(resolve(group), {"operation": "work", "value": rank}),
        )
        for call in calls:
            with varcomm.debug(), pytest.raises(VarcommError) as caught:
                call()
            said.append(str(caught.value).splitlines()[0])
    dist.barrier()
    return said


def test_ranks_of_a_part_are_distinguished_from_those_of_the_world(worlds):
    nothing, *others = worlds.run(3, in_a_part)
    assert not nothing
    for said in others:
        numbers = "The group is of ranks 2, 1 of the world, which are 0, 1 in it."
        assert all(text.endswith(numbers) for text in said), said
        assert said[1].startswith("work: refused on rank 1 of 2: no.")
        assert "rank 0 has [2]; rank 1 has [1]." in said[2]
        assert "rank 0 has 2; rank 1 has 1." in said[3]
