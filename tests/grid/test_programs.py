"""Random programs of functions of fields equal one process, to the second derivative."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import varcomm as vc
from tests.grid import programs
from tests.grid.comparing import apart, derivatives
from tests.grid.test_fields import field_of
from tests.worlds import on_ranks

AT_ONCE = 30


def problems(rank, ranks, seeds, large=False):
    torch.set_num_threads(1)
    drawn = [programs.drawn_by(seed, ranks, large) for seed in seeds]
    return [text for program in drawn if (text := programs.on_ranks(rank, program))]


@on_ranks(3)
def test_programs(rank):
    return problems(rank, (3,), range(24))


@on_ranks(3)
def test_programs_of_large_fields(rank):
    return problems(rank, (3,), range(2), large=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, AT_ONCE))
@on_ranks(1, 2, 3, 5)
def test_more_programs(rank, first, ranks):
    return problems(rank, (ranks,), range(1000 + first, 1000 + first + AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, AT_ONCE))
@on_ranks(4)
def test_more_programs_on_a_mesh(rank, first):
    return problems(rank, (2, 2), range(1000 + first, 1000 + first + AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20, 5))
@on_ranks(2, 3)
def test_more_programs_of_large_fields(rank, first, ranks):
    return problems(rank, (ranks,), range(1000 + first, 1005 + first), large=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20, 5))
@on_ranks(4)
def test_more_programs_of_large_fields_on_a_mesh(rank, first):
    return problems(rank, (2, 2), range(1000 + first, 1005 + first), large=True)


def test_a_wrong_program_is_shrunk():
    """The fewest lines that still fail are printed, and the program that was drawn."""
    program = programs.drawn_by(1, (1,))
    small = programs.shrunk(program, lambda smaller: "x2" in str(smaller.lines))
    assert [name for name, text in small.lines if text != "x0"] == []
    assert "x2" in str(small)


# --- On square meshes, both dimensions are split into the same sizes by different groups

SQUARE = {
    "sum": lambda x: x + x.transpose(2, 3),
    "where": lambda x: torch.where(x > 0, x, x.mT),
    "in place": lambda x: x.clone().mul_(x.mT),
    "means": lambda x: x.mean(2) * x.mean(3),
    "loss": lambda x: F.mse_loss(x, x.mT),
    "einsum": lambda x: torch.einsum("bcij,bcji->bci", x, x),
    "einsum of one group": lambda x: torch.einsum("bcij,bcik->bcjk", x, x),
    "cat of channels": lambda x: torch.cat([x, x.mT], 1),
    "cat of rows": lambda x: torch.cat([x, x.mT, x], 2),
    "cat of columns": lambda x: torch.cat([x.mT, x], 3),
    "written": lambda x: _written(x),
    "gathered": lambda x: torch.gather(x, 1, (x.mT > 0).long()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.mT, x),
}


def _written(x):
    y = x.clone()
    y[:, 0] = x.mT[:, 1]
    return y


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("sizes", [([2, 2], [2, 2]), ([4, 0], [1, 3])], ids=["even", "uneven"])
@on_ranks(4)
def test_a_field_meets_its_transpose(rank, name, sizes):
    return square(name, vc.grid.Grid((4, 4), init_device_mesh("cpu", (2, 2)), sizes))


@pytest.mark.parametrize("name", SQUARE)
@on_ranks(3)
def test_a_field_of_one_split_meets_its_transpose(rank, name):
    return square(name, vc.grid.Grid((4, 4), sizes=[[1, 0, 3], None]))


def square(name, grid):
    torch.manual_seed(0)
    one = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    field = grid.scatter(one.detach()).requires_grad_()
    outs = [SQUARE[name](x) for x in (field, one)]
    grads = [
        torch.autograd.grad((out * out).sum(), x)[0]
        for out, x in zip(outs, (field, one), strict=True)
    ]
    return [text for a, b in (outs, grads) if (text := "" if apart(a, b) < 1e-12 else f"{a} {b}")]


# --- Checkpoints, forward mode, autocast


def twice(x, weight, bias):
    """Use one convolution at two resolutions."""
    fine = F.conv2d(x, weight, bias, padding=1).sin()
    coarse = F.conv2d(F.avg_pool2d(fine, (1, 2)), weight, bias, padding=1).cos()
    return fine + F.interpolate(coarse, size=x.shape[2:])


def twice_again(*leaves):
    return torch.utils.checkpoint.checkpoint(twice, *leaves, use_reentrant=False)


@pytest.mark.parametrize("function", [twice, pytest.param(twice_again, marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_shared_convolution_of_large_fields(rank, function):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = [torch.randn(s, dtype=torch.float64) for s in ((1, 1, 728, 724), (1, 1, 3, 3), (1,))]
    x, *made = (t.requires_grad_() for t in numbers)
    expected = derivatives(function, x, made, lambda g: g)
    field = vc.grid.Grid((728, 724), sizes=[[401, 327], None]).scatter(x.detach())
    found = derivatives(function, field.requires_grad_(), made, vc.all_reduce)
    assert max(apart(a, b) for a, b in zip(found, expected, strict=True)) < 1e-12


@on_ranks(3)
def test_forward_mode(rank):
    """Tangents of parts and of parameters; of statistics there are none, as in torch."""
    whole, grid, x = field_of(3)
    rows = grid.ranges[0]
    torch.manual_seed(1)
    weight, tangents = torch.randn(2, 3, 3, 3, dtype=x.dtype), (torch.cos, torch.sin)
    mean, var = torch.zeros(2, dtype=x.dtype), torch.ones(2, dtype=x.dtype)

    def function(x, weight):
        y = F.batch_norm(F.conv2d(x, weight, padding=1), mean, var, training=True)
        return F.batch_norm(y, mean, var)

    with forward_ad.dual_level():
        pair = [
            forward_ad.make_dual(t, of(t)) for t, of in zip((whole, weight), tangents, strict=True)
        ]
        expected = forward_ad.unpack_dual(function(*pair)).tangent
        mean.zero_(), var.fill_(1)
        local = pair[0][:, :, rows.start : rows.stop]
        found = function(grid.field(local), pair[1])
        torch.testing.assert_close(
            forward_ad.unpack_dual(found.gather()).tangent, expected, rtol=1e-12, atol=1e-12
        )
        with pytest.raises(vc.ArgumentError, match="_make_dual has no rule"):
            forward_ad.make_dual(x, x)


@pytest.mark.parametrize("training", [True, False])
@on_ranks(3)
def test_batch_norm_of_ranks_with_one_row(rank, training):
    """torch 2.13's own gradient is wrong for one row, if einsum lays it out by channels."""
    torch.manual_seed(0)
    whole, mixing = torch.randn(2, 4, 5, 3).double(), torch.randn(4, 2).double()
    grid = vc.grid.Grid((5, 3), sizes=[[1, 1, 3], None])

    def gradient(x):
        statistics = mixing[:, 0] * 0, mixing[:, 1].square()
        y = F.batch_norm(x.requires_grad_(), *statistics, training=training)
        loss = torch.einsum("bchw,cd->bdhw", y, mixing).square().sum()
        return torch.autograd.grad(loss, x)[0]

    assert apart(gradient(grid.scatter(whole)), gradient(whole)) < 1e-12


@on_ranks(3)
def test_materialized_gradients(rank):
    _, _, x = field_of(3)
    x = x.requires_grad_()
    unused = torch.ones(2, requires_grad=True)
    found = torch.autograd.grad(x.sum(), [x, unused], materialize_grads=True)
    assert found[0].gather().eq(1).all()
    assert found[1].eq(0).all()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(x.sum(), [x, unused])


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)])
@on_ranks(3)
def test_autocast(rank, seeds):
    """In bf16, a program is as near to fp64 as on one process, up to a factor."""
    torch.set_num_threads(1)
    return [text for seed in seeds if (text := programs.rough(programs.drawn_by(seed, (3,))))]
