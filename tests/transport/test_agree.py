"""Inside debug() ranks that do not fit all raise one error, in place of a hang."""

import os

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ArgumentError, DisagreementError, GroupError, VarcommError
from varcomm.transport.agreement import agree, debugging, share
from varcomm.transport.group import resolve


def message_of(call):
    """Return what the one error that `call` raises in debug() says first, above its table."""
    with pytest.raises(DisagreementError) as caught, varcomm.debug():
        call()
    return str(caught.value).splitlines()[0]


F = torch.zeros
# what each of two ranks calls, and what both then say
DISAGREE = {
    "operation": (
        lambda rank: varcomm.all_reduce(F(1)) if rank else varcomm.all_gather_v(F(1), [1, 1]),
        "ranks disagree on operation: rank 0 has 'all_gather_v'; rank 1 has 'all_reduce'.",
    ),
    "direction": (
        lambda rank: (varcomm.reduce if rank else varcomm.broadcast)(F(1)),
        "ranks disagree on operation: rank 0 has 'broadcast'; rank 1 has 'reduce'.",
    ),
    "dim": (
        lambda rank: varcomm.all_gather_v(F(2, 2), [2, 2], dim=rank),
        "all_gather_v: ranks disagree on dim: rank 0 has 0; rank 1 has 1.",
    ),
    "sizes": (
        lambda rank: varcomm.all_gather_v(F(2 + rank), [2 + rank, 2 + rank]),
        "all_gather_v: ranks disagree on sizes: rank 0 has [2, 2]; rank 1 has [3, 3].",
    ),
    "dtype": (
        lambda rank: varcomm.all_reduce(F(2).to([torch.float32, torch.int32][rank])),
        "all_reduce: ranks disagree on dtype: rank 0 has 'torch.float32'; "
        "rank 1 has 'torch.int32'.",
    ),
    "shape": (
        lambda rank: varcomm.all_reduce(F(2, rank)),
        "all_reduce: ranks disagree on shape: rank 0 has [2, 0]; rank 1 has [2, 1].",
    ),
    "shape of a row": (
        lambda rank: varcomm.gather_v(F(1, 2 + rank), [1, 1]),
        "gather_v: ranks disagree on shape of a row: rank 0 has [2]; rank 1 has [3].",
    ),
    "root": (
        lambda rank: varcomm.reduce(F(1), dst=rank),
        "reduce: ranks disagree on root: rank 0 has 0; rank 1 has 1.",
    ),
    "root of a broadcast": (
        lambda rank: varcomm.broadcast(F(1), src=rank),
        "broadcast: ranks disagree on root: rank 0 has 0; rank 1 has 1.",
    ),
    "sizes of a scatter": (
        lambda rank: varcomm.scatter_v(F(2), [2 * rank, 2 - 2 * rank]),
        "scatter_v: ranks disagree on sizes: rank 0 has [0, 2]; rank 1 has [2, 0].",
    ),
    "use_fp32": (
        lambda rank: varcomm.all_reduce(F(1), use_fp32=rank == 0),
        "all_reduce: ranks disagree on use_fp32: rank 0 has True; rank 1 has False.",
    ),
    "requires_grad": (
        lambda rank: varcomm.all_reduce(F(1, requires_grad=rank == 1)),
        "all_reduce: ranks disagree on requires_grad: rank 0 has False; rank 1 has True.",
    ),
    "counts": (
        lambda rank: varcomm.all_to_all_v(F(3), [[1, 2], [3, 0]][rank], [[1, 1], [2, 0]][rank]),
        "all_to_all_v: rank 1 sends 3 rows to rank 0, which expects 1.",
    ),
    "split_sizes": (
        lambda rank: varcomm.transpose_v(F(1, 2), 1, [[1, 1], [2, 0]][rank], 0, [1, 1]),
        "transpose_v: ranks disagree on split_sizes: rank 0 has [1, 1]; rank 1 has [2, 0].",
    ),
    "sizes of a shard": (
        lambda rank: varcomm.shard_v(F(2), [2 * rank, 2 - 2 * rank]),
        "shard_v: ranks disagree on sizes: rank 0 has [0, 2]; rank 1 has [2, 0].",
    ),
    "asynchronous": (
        lambda rank: varcomm.all_reduce(F(rank), async_op=True),
        "all_reduce: ranks disagree on shape: rank 0 has [0]; rank 1 has [1].",
    ),
}


def disagree_on(rank, what):
    message = message_of(lambda: DISAGREE[what][0](rank))
    return message, varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("what", DISAGREE)
def test_all_ranks_raise_one_error(worlds, what):
    assert worlds.run(2, disagree_on, what) == [(DISAGREE[what][1], 2)] * 2


def one_of_three(rank):
    return message_of(lambda: varcomm.all_reduce(F(5 if rank == 1 else 4)))


def test_error_names_each_rank(worlds):
    expected = (
        "all_reduce: ranks disagree on shape: rank 0 has [4]; rank 1 has [5]; rank 2 has [4]."
    )
    assert worlds.run(3, one_of_three) == [expected] * 3


def in_backward(rank):
    """Forward fits; rank 1 then differentiates another result than the others."""
    x = torch.ones(2, requires_grad=True)
    results = varcomm.all_reduce(x), varcomm.all_gather_v(x, [2, 2, 2])
    message = message_of(results[rank == 1].sum().backward)
    return message, varcomm.all_reduce(torch.tensor(1)).item()


def test_disagreement_in_backward(worlds):
    expected = (
        "ranks disagree on operation: rank 0 has 'all_reduce'; rank 1 has 'reduce_scatter_v'; "
        "rank 2 has 'all_reduce'."
    )
    assert worlds.run(3, in_backward) == [(expected, 3)] * 3


def of_second_derivatives(rank):
    """Rank 0 alone asks for a gradient that can be differentiated again."""
    x = torch.ones(2, requires_grad=True)
    y = varcomm.all_reduce(x**2).sum()
    return message_of(lambda: torch.autograd.grad(y, x, create_graph=rank == 0))


def test_disagreement_on_second_derivatives(worlds):
    (message, other) = worlds.run(2, of_second_derivatives)
    assert message == other
    expected = "all_reduce: ranks disagree on requires_grad: rank 0 has True; rank 1 has False."
    assert message == expected


def right_calls(rank, ranks):
    """Comparing changes nothing: every primitive, forward and backward."""
    for name in PRIMITIVES:
        c = case(name, "one empty", ranks)
        with varcomm.debug():
            x = c.input(rank, torch.float64).requires_grad_()
            y = c.bind()(x)
            y.sum().backward()
        torch.testing.assert_close(y, c.reference(c.draw(torch.float64))[rank])
    return debugging()


@pytest.mark.parametrize("ranks", [1, 3])
def test_right_calls_pass(worlds, ranks):
    assert worlds.run(ranks, right_calls, ranks) == [False] * ranks


def by_environment(rank, value):
    os.environ["VARCOMM_DEBUG"] = value
    try:
        if not debugging():
            return "not compared"
        with pytest.raises(DisagreementError, match="disagree on shape"):
            varcomm.all_reduce(F(rank))
        return "compared"
    finally:
        del os.environ["VARCOMM_DEBUG"]


@pytest.mark.parametrize(
    ("value", "answer"),
    [("1", "compared"), ("true", "compared")]
    + [(value, "not compared") for value in ("0", "", "False", "off", "no")],
)
def test_environment_variable(worlds, value, answer):
    assert worlds.run(2, by_environment, value) == [answer] * 2


def test_blocks_may_be_nested_and_end_with_an_error():
    with varcomm.debug():
        with pytest.raises(KeyError), varcomm.debug():
            raise KeyError
        assert debugging()
    assert not debugging()


class OwnError(VarcommError):
    """A kind that takes more than a message, and so cannot be made from one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unprintable(Exception):
    def __str__(self):
        return "\ud800 \0"  # a lone surrogate, which no encoding has


ERRORS = {
    "ArgumentError": (lambda: ArgumentError("no"), ArgumentError, "no"),
    "GroupError": (lambda: GroupError("no"), GroupError, "no"),
    "KeyError": (lambda: KeyError("name"), ArgumentError, "'name'"),
    "ZeroDivisionError": (ZeroDivisionError, ArgumentError, ""),
    "OSError": (lambda: OSError(2, "gone", "a.txt"), ArgumentError, "gone"),
    "unpicklable": (lambda: ValueError(lambda: None), ArgumentError, "lambda"),
    "unprintable": (Unprintable, ArgumentError, "\ud800"),
    "own": (lambda: OwnError("this", "that"), VarcommError, "this and that"),
}


def agree_on(rank, what, culprits, through):
    make, kind, text = ERRORS[what]

    def local():
        if rank in culprits:
            raise make()
        return rank

    with pytest.raises(kind) as caught:
        through("set-up", local, resolve(None))
    message = str(caught.value)
    assert text in message
    return message.encode(errors="replace"), varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("through", [agree, share])
@pytest.mark.parametrize("what", ERRORS)
def test_error_on_one_rank_is_an_error_on_all(worlds, what, through):
    answers = worlds.run(3, agree_on, what, (1,), through)
    assert answers == [answers[0]] * 3
    assert answers[0][0].startswith(b"set-up: refused on rank 1 of 3: ")


def test_errors_on_several_ranks(worlds):
    answers = worlds.run(3, agree_on, "KeyError", (0, 1, 2), agree)
    expected = b"set-up: refused on rank 0 of 3 (and on 2 more: [1, 2]): 'name'"
    assert answers == [(expected, 3)] * 3


def results(rank):
    group = resolve(None)
    return agree("set-up", lambda: rank, group), share("set-up", lambda: [rank] * rank, group)


def test_results(worlds):
    shared = [[], [1], [2, 2]]
    assert worlds.run(3, results) == [(0, shared), (1, shared), (2, shared)]


def in_a_part(rank):
    """Two of three ranks, in another order than in the world."""
    group = dist.new_group([2, 1], sort_ranks=False)
    said = []
    if rank:
        calls = (
            lambda: varcomm.all_gather_v(torch.ones(rank, 1), [1, 1], group=group),
            lambda: agree("work", refusing if rank == 1 else int, resolve(group)),
            lambda: varcomm.all_gather_v(torch.ones(2, rank), [2, 2], group=group),
        )
        for call in calls:
            with varcomm.debug(), pytest.raises(VarcommError) as caught:
                call()
            said.append(str(caught.value).splitlines()[0])
    dist.barrier()
    return said


def refusing():
    raise ArgumentError("no.")


def test_ranks_of_a_part_are_told_from_those_of_the_world(worlds):
    nobody, *others = worlds.run(3, in_a_part)
    who = "The group is of ranks 2, 1 of the world, which are 0, 1 in it."
    assert not nobody
    for said in others:
        assert all(text.endswith(who) for text in said), said
        assert said[1] == f"work: refused on rank 1 of 2: no. {who}"
        assert "rank 0 has [2]; rank 1 has [1]." in said[2]
