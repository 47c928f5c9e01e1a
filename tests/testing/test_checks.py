"""The checks of adjoints and derivatives find planted defects, and pass correct functions."""

import pytest
import torch

import varcomm
from tests.ops.primitives import random
from tests.testing import planted
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.testing import dot_test, gradcheck, gradgradcheck

DOUBLE, COMPLEX = torch.float64, torch.complex128
ADJOINT, BACKWARD = "not an adjoint pair: <A x, y> = ", "backward: a derivative "
FORWARD = "forward mode: a derivative "


def shard(rank, rows=2, dtype=DOUBLE):
    return random((rows,), dtype, torch.Generator().manual_seed(31 + rank))


def verdict(check, fn, *inputs, **options):
    """Return the message of a failed check, or ""."""
    try:
        check(fn, *inputs, **options)
    except AssertionError as error:
        return str(error)
    return ""


def begins(found, *expected):
    """Assert that all ranks have the same messages, which begin as expected."""
    for said, beginning in zip(zip(*found, strict=True), expected, strict=True):
        (text,) = set(said)
        assert text.startswith(beginning) if beginning else text == ""


def of_planted(rank, name):
    """Check a planted function; second derivatives are of its square."""
    fn, x = getattr(planted, name).apply, shard(rank)
    return [
        verdict(dot_test, fn, x),
        verdict(gradcheck, fn, x, forward_mode=False),
        verdict(gradcheck, fn, x, forward_mode=False, fast_mode=True),
        verdict(gradgradcheck, lambda x: fn(x**2), x, forward_mode=False),
        verdict(gradgradcheck, lambda x: fn(x**2), x, forward_mode=False, fast_mode=True),
    ]


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_wrong_adjoints_of_collectives(worlds, ranks):
    for name in ("ForgetsTheSum", "Divides"):
        found = [said[:3] for said in worlds.run(ranks, of_planted, name)]
        begins(found, ADJOINT, BACKWARD, BACKWARD)
    # raw collectives in backward show in the second derivative alone
    begins(worlds.run(ranks, of_planted, "RawBackward"), "", "", "", BACKWARD, BACKWARD)


def wrong_on_one_rank(rank):
    found, x = [], shard(rank, rows=1 + rank)
    for spoil in (0.25, float("nan"), float("inf")):

        def fn(x, spoil=spoil):
            return planted.WrongOnOneRank.apply(x, spoil)

        found.append(verdict(gradcheck, fn, x, forward_mode=False))
        found.append(verdict(gradcheck, fn, x, forward_mode=False, fast_mode=True))
    return found


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_a_gradient_wrong_on_one_rank_fails_on_all(worlds, ranks):
    begins(worlds.run(ranks, wrong_on_one_rank), *[f"{BACKWARD}on rank 1 differs", BACKWARD] * 3)


def scaled_wrongly_on_one_rank(rank):
    """Rank 1 is wrong, unless it has no rows."""
    splits = ((0, 1, 3), (1, 2, 0), (2, 0, 1))
    return [verdict(dot_test, planted.WrongScale.apply, shard(rank, rows[rank])) for rows in splits]


def test_an_adjoint_wrong_on_one_rank_fails_on_all(worlds):
    begins(worlds.run(3, scaled_wrongly_on_one_rank), ADJOINT, ADJOINT, "")


def of_other_defects(rank):
    x, z, slightly = shard(rank), shard(rank, dtype=COMPLEX), planted.Slightly.apply

    def shift(x):
        return planted.ShiftWithAdjointTangent.apply(x, False)

    def second_output_is_wrong(x, w):
        return varcomm.all_gather_v(x, [2, 0, 1]), planted.Divides.apply(w)

    found = [
        verdict(dot_test, slightly, x),
        verdict(dot_test, slightly, x, rtol=1e-3),
        verdict(gradcheck, slightly, x, forward_mode=False, tol=1e-3),
        verdict(dot_test, planted.ForgetsToConjugate.apply, z),
        verdict(gradcheck, planted.ForgetsToConjugate.apply, z, forward_mode=False),
        verdict(gradcheck, shift, x, forward_mode=False),
    ]
    for fast in (False, True):
        backward = {"fast_mode": fast, "forward_mode": False}
        uneven = shard(rank, [2, 0, 1][rank])
        found += [
            verdict(gradcheck, shift, x, fast_mode=fast),
            verdict(gradcheck, second_output_is_wrong, uneven, x, **backward),
        ]
    return found


def test_other_defects(worlds):
    fails = [FORWARD, BACKWARD]
    begins(worlds.run(3, of_other_defects), ADJOINT, "", "", ADJOINT, BACKWARD, "", *fails, *fails)


ROWS = [((0,), False), ((1, 0, 1), True)]
MORE_ROWS = [((2,), False), ((1, 2), False), ((2, 0), True), ((0, 0), False)]
MORE_ROWS += [((1, 0, 2), False), ((0, 1, 0, 2, 1), True)]


@pytest.mark.parametrize(
    ("ranks", "rows", "fast_mode"),
    [(len(rows), rows, fast) for rows, fast in ROWS]
    + [pytest.param(len(rows), rows, fast, marks=pytest.mark.slow) for rows, fast in MORE_ROWS],
    ids=str,
)
@on_ranks()
def test_correct_functions_pass(rank, rows, fast_mode):
    """Functions of several uneven, real and complex inputs, with several outputs."""
    x, z = shard(rank, rows[rank]), shard(rank, rows[rank], COMPLEX)
    w = shard(rank, sum(rows))

    def several(x, w):
        full = varcomm.all_gather_v(x, rows)
        return full * w, varcomm.reduce_scatter_v(w * full.sin(), rows) + x, (w * w).sum()

    def plane(z, x):
        full = varcomm.all_gather_v(z * z.conj() * x + z, rows)
        return full, varcomm.all_reduce((z * x).sum())

    def flat(x, w):
        """The output is linear in one input and does not depend on the other."""
        return varcomm.all_gather_v(x, rows)

    for fn, inputs in ((several, (x, w)), (plane, (z, x)), (flat, (x, w))):
        gradcheck(fn, *inputs, fast_mode=fast_mode)
        gradgradcheck(fn, *inputs, fast_mode=fast_mode)


@on_ranks(3)
def test_dtypes_and_inputs_left_alone(rank):
    rows = [3, 0, 2]
    for dtype in (DOUBLE, torch.float32, torch.bfloat16, COMPLEX):
        dot_test(lambda x: varcomm.all_gather_v(x, rows), shard(rank, rows[rank], dtype))
        factor = 3 - 1j if dtype.is_complex else -2
        dot_test(lambda x, factor=factor: x * factor, shard(rank, 2, dtype))
        dot_test(varcomm.all_reduce, shard(rank, 4, dtype))
    x = shard(rank)
    before = x.clone()
    for check in (dot_test, gradcheck, gradgradcheck):
        check(varcomm.all_reduce, x)
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert x.grad is None
    with pytest.raises(ArgumentError, match="float64"):
        gradcheck(torch.sin, torch.ones(2))


def in_a_part(rank):
    """Ranks 1 and 2 of 3 check among themselves; the world's rank 2 is the group's rank 1."""
    group = torch.distributed.new_group([1, 2])
    said = None
    if rank:
        x = shard(rank, rows=rank)
        gradgradcheck(lambda x: varcomm.all_gather_v(x**2, [1, 2], group=group), x, group=group)
        fn = planted.WrongScale.apply  # wrong on the world's rank 1, which is the group's 0
        said = [
            verdict(dot_test, fn, x, group=group),
            verdict(gradcheck, fn, x, group=group, forward_mode=False),
        ]
    torch.distributed.barrier()
    return said


def test_subgroup(worlds):
    nothing, *found = worlds.run(3, in_a_part)
    assert nothing is None
    begins(found, ADJOINT, f"{BACKWARD}on rank 0")


def leaves_the_graph(rank):
    def fn(x):
        y = varcomm.all_reduce(x)
        return y.detach() if rank == 1 else y

    def partly(x):
        return fn(x), varcomm.all_reduce(x**2)

    def unused(x, y):
        return varcomm.all_reduce(x**2 * (1 if rank == 1 else y))

    x, y = shard(rank), shard(rank + 9)
    return [
        *(verdict(check, fn, x) for check in (dot_test, gradcheck, gradgradcheck)),
        verdict(gradcheck, partly, x),
        *(verdict(check, unused, x, y) for check in (gradcheck, gradgradcheck)),
    ]


def test_a_rank_that_leaves_the_graph_is_an_error_everywhere(worlds):
    """An input that one rank does not use is no error."""
    expected = ["on ranks [1] no result requires a gradient"] * 3
    begins(worlds.run(3, leaves_the_graph), *expected, "ranks disagree", "", "")
