"""`same_as_one_process` with a grid passes right models, and names modules that are wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import varcomm as vc
from tests.testing.mistakes import assert_named
from varcomm import ArgumentError
from varcomm.testing import same_as_one_process

GRID = (13, 6)


pytestmark = pytest.mark.usefixtures("launch_on_worlds")


def image(channels=2):
    return torch.randn(2, channels, *GRID, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A network with a tail that calls a function of a field."""

    def __init__(self, tail=torch.tanh):
        super().__init__()
        self.down, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.up, self.tail = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1), Tail(tail)
        self.drop = nn.Dropout2d(0.5)

    def forward(self, x):
        return self.tail(self.up(self.drop(self.norm(self.down(x)).relu_()))[:, :, : x.shape[2]])


class Tail(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Sums(nn.Module):
    """Takes named arguments; returns fields, numbers that all ranks have, and a gathered one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 4, padding="same")

    def forward(self, line, scale):
        out = self.conv(line) * scale
        return {"field": out, "mean": out.mean(), "whole": out.gather(), "rows": line.shape[2]}


def step(model, data, summed=True):
    grid, x, target = data
    loss = grid.mean((model(x)[..., :5] - target).square(), weights=torch.rand(13, 1).fill_(0.5))
    loss.backward()
    if summed:
        vc.data_parallel.sum_gradients(model)
    return loss


def with_target(grid):
    return grid, grid.field(image()[(..., *[slice(r.start, r.stop) for r in grid.ranges])]), 0.5


def test_right_models_pass():
    line = torch.randn(1, 2, 9)
    cases = [
        (Net(), image(), {}),
        (Net().eval(), image(), {"parts": 2, "loss": lambda y, x: F.mse_loss(y, x[..., :5])}),
        (Net(), lambda grid: (grid.scatter(image()),), {"parts": 1}),
        (Sums(), lambda grid: {"line": grid.scatter(line), "scale": 3}, {"grid": (9,)}),
        (Net(), with_target, {"step": step}),
    ]
    for model, data, options in cases:
        found = same_as_one_process(model, data, **{"grid": GRID, **options})
        assert found.first == ""
        assert sum(found.owned) in (78, 9)
        assert len(found.owned) == options.get("parts", 3)
        assert (found.owned[-1] == 0) == (len(found.owned) > 2)
        assert max(found.errors.values()) < 1e-12
        assert "points" in str(found)


@pytest.mark.slow
def test_two_dimensions():
    with_four = [
        (Net(), image(), {"parts": (2, 2)}),
        (Net(), with_target, {"parts": (1, 3), "step": step}),
    ]
    for model, data, options in with_four:
        found = same_as_one_process(model, data, grid=GRID, **options)
        assert found.first == ""
        assert max(found.errors.values()) < 1e-12
    with pytest.raises(AssertionError, match=r"tail \(Tail\): sum"):
        same_as_one_process(Net(less_mean), image(), grid=GRID, parts=(2, 2))


def less_mean(x):
    return x - x.local.sum() / 100


def less_mean_of_rows(x):
    return x - x.local.mean(3, keepdim=True).sum(2, keepdim=True)


def over_rows(x):
    return x / x.local.shape[2]


def positions(x):
    rows = torch.linspace(0, 1, x.local.shape[2])
    return x + rows.sum()


def noisy(x):
    return x + torch.randn_like(x)


def rows_of_its_own(x):
    return x * torch.ones(2).cumsum(0)[:, None, None] + float(x.local.shape[2])


# the tail; its wrong line, and words of the cause
MISTAKES = [
    (less_mean, "x.local.sum()", "field.local"),
    (less_mean_of_rows, "x.local.mean(3", "Compute with the field"),
    (over_rows, "x / x.local", "its shape"),
    (positions, "torch.linspace(", "ordinary tensor"),
    (noisy, "torch.randn_like(x)", "other random numbers"),
    (rows_of_its_own, "float(x.local", "grid.field(rows)"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_in_forward(number):
    function, code, cause = MISTAKES[number]
    with pytest.raises(AssertionError, match=r"outputs .* WRONG") as error:
        same_as_one_process(Net(function), image(), grid=GRID)
    assert_named(error, function, code, cause)


def once_per_rank(out, data):
    return out.gather().square().mean()


def of_own_rows(out, data):
    return out.local.square().sum()


def test_mistakes_around_the_model():
    cases = [
        ({"loss": once_per_rank}, "use grid.mean"),
        ({"loss": of_own_rows}, "square"),
        ({"step": lambda m, d: step(m, d, summed=False), "data": with_target}, "sum_gradients"),
        ({"call": lambda m, x: (m(x), x.local.shape[2])}, "1 of the outputs.*field.shape"),
    ]
    for options, words in cases:
        options = {"data": image(), "grid": GRID, **options}
        with pytest.raises(AssertionError, match=words):
            same_as_one_process(Net(), **options)


def skipped(x):
    return x if x.local.numel() == 0 else x - x.mean()


@pytest.mark.slow
def test_ranks_that_differ():
    with pytest.raises(AssertionError, match="also a rank without rows"):
        same_as_one_process(Net(skipped), image(), grid=GRID)
    with pytest.raises(AssertionError, match="may have no rows"):
        same_as_one_process(Net(lambda x: x - x.local.max()), image(), grid=GRID)
    with pytest.raises(ArgumentError, match=r"median .* has no rule"):
        same_as_one_process(Net(lambda x: x - x.median()), image(), grid=GRID)


def test_refusals():
    for data, options, named in [
        (image(), {"grid": (13, -6)}, "grid"),
        ([image()], {}, "data"),
        (image(), {"parts": (2, 0)}, "parts"),
        (image(), {"parts": (2, 2, 2)}, "parts"),
        (image(), {"grid": (6, 13)}, "last dimensions"),
        (image(), {"groups": ["cell"]}, "groups"),
        (lambda grid: grid.scatter(image()), {"groups": "cell", "step": step}, "groups"),
    ]:
        with pytest.raises(ArgumentError, match=named):
            same_as_one_process(Net(), data, **{"grid": GRID, **options})
