"""The checks of adjoints and derivatives find planted defects, and pass what is right."""

import pytest
import torch

import varcomm
from tests.ops.primitives import random
from tests.testing import planted
from varcomm.testing import dot_test, gradcheck, gradgradcheck

DOUBLE, COMPLEX = torch.float64, torch.complex128


def shard(rank, rows=2, dtype=DOUBLE):
    return random((rows,), dtype, torch.Generator().manual_seed(31 + rank))


def verdict(check, fn, *inputs, **options):
    """Return what the check says: "" where it passes."""
    try:
        check(fn, *inputs, **options)
    except AssertionError as error:
        return str(error)
    return ""


def same_everywhere(verdicts):
    """Return the one verdict of all ranks."""
    (said,) = set(verdicts)
    return said


def of_planted(rank, name):
    """Judge a planted function by each check; the second derivatives are of its square."""
    fn = getattr(planted, name).apply
    x = shard(rank)
    return [
        verdict(dot_test, fn, x),
        verdict(gradcheck, fn, x, forward_mode=False),
        verdict(gradcheck, fn, x, forward_mode=False, fast_mode=True),
        verdict(gradgradcheck, lambda x: fn(x**2), x, forward_mode=False),
        verdict(gradgradcheck, lambda x: fn(x**2), x, forward_mode=False, fast_mode=True),
    ]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["ForgetsTheSum", "Divides"])
def test_wrong_adjoint_of_a_collective_is_found(worlds, name, ranks):
    answers = worlds.run(ranks, of_planted, name)
    dot, first, fast, *_ = (same_everywhere(said) for said in zip(*answers, strict=True))
    assert dot.startswith("not an adjoint pair: <A x, y> = ")
    assert first.startswith("backward: a derivative on rank ")
    assert fast.startswith("backward: a derivative on rank ")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_raw_collectives_in_backward_show_in_the_second_derivative_alone(worlds, ranks):
    answers = worlds.run(ranks, of_planted, "RawBackward")
    dot, first, fast, second, second_fast = (
        same_everywhere(said) for said in zip(*answers, strict=True)
    )
    assert (dot, first, fast) == ("", "", "")
    assert second.startswith("backward: a derivative on rank ")
    assert second_fast.startswith("backward: a derivative on rank ")


@pytest.mark.parametrize("name", ["ForgetsTheSum", "Divides", "RawBackward"])
def test_first_derivatives_of_these_are_right_on_one_rank(worlds, name):
    (answers,) = worlds.run(1, of_planted, name)
    assert answers[:3] == [""] * 3


def wrong_on_one_rank(rank, spoil):
    x = shard(rank, rows=1 + rank)

    def fn(x):
        return planted.WrongOnOneRank.apply(x, spoil)

    return [
        verdict(gradcheck, fn, x, forward_mode=False),
        verdict(gradcheck, fn, x, forward_mode=False, fast_mode=True),
    ]


@pytest.mark.parametrize("spoil", [0.25, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_gradient_wrong_on_one_rank_is_told_on_all(worlds, ranks, spoil):
    answers = worlds.run(ranks, wrong_on_one_rank, spoil)
    slow, fast = (same_everywhere(said) for said in zip(*answers, strict=True))
    assert slow.startswith("backward: a derivative on rank 1 differs from finite differences by ")
    assert slow.endswith(", allowed are 1e-06.")
    assert fast.startswith("backward: a derivative on rank ")


def scaled_wrongly_on_one_rank(rank, rows):
    return verdict(dot_test, planted.WrongScale.apply, shard(rank, rows[rank]))


@pytest.mark.parametrize("rows", [(2, 2), (0, 1, 3), (1, 2, 0, 0, 0)])
def test_adjoint_wrong_on_one_rank_is_told_on_all(worlds, rows):
    said = same_everywhere(worlds.run(len(rows), scaled_wrongly_on_one_rank, rows))
    assert said.startswith("not an adjoint pair: ")


def test_the_wrong_rank_has_nothing_to_be_wrong_about(worlds):
    assert worlds.run(2, scaled_wrongly_on_one_rank, (2, 0)) == ["", ""]


def wrong_tangent(rank):
    x, fn = shard(rank), planted.WrongTangent.apply
    return [
        verdict(gradcheck, fn, x, forward_mode=False),
        verdict(gradcheck, fn, x),
        verdict(gradcheck, fn, x, fast_mode=True),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_wrong_forward_mode_is_found(worlds, ranks):
    answers = worlds.run(ranks, wrong_tangent)
    backward, slow, fast = (same_everywhere(said) for said in zip(*answers, strict=True))
    assert backward == ""
    assert slow.startswith("forward mode: a derivative on rank 0 differs from ")
    assert fast.startswith("forward mode: a derivative on rank 0 differs from ")


def not_conjugated(rank):
    x = shard(rank, dtype=COMPLEX)
    return [
        verdict(dot_test, planted.ForgetsToConjugate.apply, x),
        verdict(gradcheck, planted.ForgetsToConjugate.apply, x, forward_mode=False),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_forgotten_conjugate_is_found(worlds, ranks):
    dot, first = map(same_everywhere, zip(*worlds.run(ranks, not_conjugated), strict=True))
    assert dot.startswith("not an adjoint pair: ")
    assert first.startswith("backward: a derivative on rank ")


def right(rank, rows, fast_mode):
    """Functions of several uneven, real and complex inputs, with several outputs."""
    total = sum(rows)
    x, z = shard(rank, rows[rank]), shard(rank, rows[rank], COMPLEX)
    w = shard(rank, total)

    def several(x, w):
        whole = varcomm.all_gather_v(x, rows)
        return whole * w, varcomm.reduce_scatter_v(w * whole.sin(), rows) + x, (w * w).sum()

    def plane(z, x):
        whole = varcomm.all_gather_v(z * z.conj() * x + z, rows)
        return whole, varcomm.all_reduce((z * x).sum())

    def flat(x, w):
        """One output is linear in one input and does not depend on the other."""
        return varcomm.all_gather_v(x, rows)

    for fn, inputs in ((several, (x, w)), (plane, (z, x)), (flat, (x, w))):
        gradcheck(fn, *inputs, fast_mode=fast_mode)
        gradgradcheck(fn, *inputs, fast_mode=fast_mode)


@pytest.mark.parametrize(
    "rows", [(2,), (0,), (1, 2), (2, 0), (0, 0), (1, 0, 2), (0, 1, 0, 2, 1)], ids=str
)
def test_what_is_right_passes(worlds, rows):
    assert worlds.run(len(rows), right, rows, len(rows) == 5) == [None] * len(rows)


@pytest.mark.parametrize("rows", [(2, 0), (1, 0, 1)], ids=str)
def test_what_is_right_passes_in_fast_mode(worlds, rows):
    assert worlds.run(len(rows), right, rows, True) == [None] * len(rows)


def second_of_several_is_wrong(rank, rows):
    """The defect sits in the second output, and in the gradient of the second input alone."""

    def fn(x, w):
        return varcomm.all_gather_v(x, rows), planted.Divides.apply(w)

    x, w = shard(rank, rows[rank]), shard(rank)
    return [
        verdict(gradcheck, fn, x, w, forward_mode=False),
        verdict(gradcheck, fn, x, w, forward_mode=False, fast_mode=True),
    ]


def test_defect_in_the_second_of_several_is_found(worlds):
    answers = worlds.run(3, second_of_several_is_wrong, (2, 0, 1))
    for said in map(same_everywhere, zip(*answers, strict=True)):
        assert said.startswith("backward: a derivative on rank ")


def right_pairs(rank, dtype):
    rows = [3, 0, 2]
    dot_test(lambda x: varcomm.all_gather_v(x, rows), shard(rank, rows[rank], dtype))
    dot_test(lambda x: x * (3 - 1j) if dtype.is_complex else -2 * x, shard(rank, 2, dtype))
    dot_test(varcomm.all_reduce, shard(rank, 4, dtype))


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16, COMPLEX])
def test_dot_test_passes_what_is_right(worlds, dtype):
    assert worlds.run(3, right_pairs, dtype) == [None] * 3


def slightly_wrong(rank):
    """Be off by one part in ten thousand."""

    class Slightly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2.0002 * gradient

    x = torch.full((3,), 1.0 + rank, dtype=DOUBLE)
    return [
        verdict(dot_test, Slightly.apply, x),
        verdict(dot_test, Slightly.apply, x, rtol=1e-3),
        verdict(gradcheck, Slightly.apply, x, forward_mode=False),
        verdict(gradcheck, Slightly.apply, x, forward_mode=False, tol=1e-3),
    ]


def test_tolerances_are_those_given(worlds):
    dot, loose_dot, first, loose = map(
        same_everywhere, zip(*worlds.run(2, slightly_wrong), strict=True)
    )
    assert "they differ by" in dot
    assert "allowed are 1e-06" in first
    assert (loose_dot, loose) == ("", "")


def left_alone(rank):
    x = shard(rank)
    before = x.clone()
    for check in (dot_test, gradcheck, gradgradcheck):
        check(varcomm.all_reduce, x)
    return torch.equal(x, before), x.requires_grad, x.grad is None


def test_inputs_are_left_alone(worlds):
    assert worlds.run(2, left_alone) == [(True, False, True)] * 2


def in_a_part(rank):
    """Ranks 1 and 2 of 3 check among themselves; the world's rank 2 is the group's rank 1."""
    group = torch.distributed.new_group([1, 2])
    said = None
    if rank:
        x = shard(rank, rows=rank)
        gradgradcheck(lambda x: varcomm.all_gather_v(x**2, [1, 2], group=group), x, group=group)
        fn = planted.WrongScale.apply  # on the world's rank 1, which is the group's 0
        said = [
            verdict(dot_test, fn, x, group=group),
            verdict(gradcheck, fn, x, group=group, forward_mode=False),
        ]
    torch.distributed.barrier()
    return said


def test_subgroup(worlds):
    nothing, *told = worlds.run(3, in_a_part)
    dot, first = map(same_everywhere, zip(*told, strict=True))
    assert nothing is None
    assert dot.startswith("not an adjoint pair: ")
    assert first.startswith("backward: a derivative on rank 0 differs from finite differences by ")


def leaves_the_graph(rank):
    def fn(x):
        y = varcomm.all_reduce(x)
        return y.detach() if rank == 1 else y

    def partly(x):
        return fn(x), varcomm.all_reduce(x**2)

    x = shard(rank)
    return [
        verdict(dot_test, fn, x),
        verdict(gradcheck, fn, x),
        verdict(gradgradcheck, fn, x),
        verdict(gradcheck, partly, x),
    ]


def test_a_rank_that_leaves_the_graph_is_an_error_everywhere(worlds):
    answers = worlds.run(3, leaves_the_graph)
    *whole, partly = (same_everywhere(said) for said in zip(*answers, strict=True))
    assert whole == ["on ranks [1] no result requires a gradient: fn has left the graph there."] * 3
    assert partly == (
        "ranks disagree on which results require a gradient: "
        "[[True, True], [False, True], [True, True]]."
    )


def unused_on_one_rank(rank):
    def fn(x, y):
        return varcomm.all_reduce(x**2 * (1 if rank == 1 else y))

    x, y = shard(rank), shard(rank + 9)
    return [verdict(gradcheck, fn, x, y), verdict(gradgradcheck, fn, x, y)]


def test_an_input_that_one_rank_does_not_use(worlds):
    assert worlds.run(3, unused_on_one_rank) == [["", ""]] * 3
