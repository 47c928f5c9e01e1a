"""The example trains on any number of ranks as it does on one."""

import contextlib
import io
import re

import pytest
import torch

from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by

METHODS = ("metis", "block", "random", "a rank owns nothing")


def compare(rank, dtype, method, steps):
    ocean, train = example("ocean", "ocean"), example("ocean", "train")
    data = train.in_precision(ocean.load(5), dtype)
    assert data.num_nodes == 1654
    model = train.new_model(data, hidden=16, blocks=2, seed=0).to(dtype)
    owner = split_by(method, data.num_nodes, torch.distributed.get_world_size())
    return train.compare(model, data, owner, steps)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, method):
    answers = worlds.run(ranks, compare, torch.float64, method, 10)
    assert answers == answers[:1] * ranks, "ranks differ"
    losses, gradients = answers[0]
    assert losses <= 1e-10
    assert gradients <= 1e-12


@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_in_single_precision(worlds, ranks):
    losses, _ = worlds.run(ranks, compare, torch.float32, "metis", 20)[0]
    assert losses <= 1e-4


def run_main(rank, arguments):
    train = example("ocean", "train")
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bar
    ):
        code = train.main(arguments)
    return code, printed.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_main(worlds, ranks, tmp_path):
    path = tmp_path / "a folder" / "ocean.png"
    arguments = ["--spacing", "5", "--steps", "3", "--hidden", "8", "--picture", str(path)]
    (code, printed), *others = worlds.run(ranks, run_main, arguments)
    assert code == 0
    assert others == [(0, "")] * (ranks - 1), "only the first rank prints"
    edges = example("ocean", "ocean").load(5).num_edges
    method = "metis" if ranks > 1 else "block"
    assert f"1,654 nodes and {edges:,} edges on {ranks} ranks by {method}" in printed
    assert re.search(r"bytes a rank sends in each layer: \(\d+,", printed)
    assert re.search(r"\d s a step, the median of 3; at most [\d and]+ MiB a rank", printed)
    assert re.search(r"3 steps in \d+ s\. RMSE on the test tiles, in deg C:", printed)
    for name in ("network", "mean of the field", "linear fit to position"):
        assert re.search(rf"\d\.\d\d  {name}", printed)
    assert f"picture: {path}" in printed
    assert path.read_bytes()[:4] == b"\x89PNG"


def refused(rank, arguments):
    with contextlib.redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit, match=r"^2$"):
        example("ocean", "train").main(arguments)
    return told.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spacing", "7"], r"argument --spacing: invalid choice: 7 \(choose from 1, 2, 3"),
        (["--check", "60"], r"argument --check: invalid choice: 60 \(choose from"),
        (["--steps", "0"], r"argument --steps: need a whole number from 1 on, got '0'"),
        (
            ["--picture", "ocean.foo"],
            r"argument --picture: need a name that ends in .*'ocean\.foo'",
        ),
        (
            ["--picture", f"{__file__}/ocean.png"],
            r"argument --picture: cannot write '.*ocean\.png'",
        ),
    ],
)
def test_wrong_options_are_told_once_before_training(worlds, arguments, message):
    told, *others = worlds.run(2, refused, arguments)
    assert re.search(message, told)
    assert others == [""]


def test_every_spacing_on_offer_has_nodes_to_train_and_to_test():
    ocean = example("ocean", "ocean")
    for spacing in ocean.SPACINGS:
        data = ocean.load(spacing)
        assert data.train_mask.any()
        assert data.test_mask.any()


def losses_of_training(rank):
    ocean, train = example("ocean", "ocean"), example("ocean", "train")
    data = ocean.load(5)
    model = train.new_model(data, hidden=16, blocks=2, seed=0)
    return list(train.fit_alone(model, data, 40))


def test_training_learns(worlds):
    first, *_, last = worlds.run(1, losses_of_training)[0]
    assert last < 0.5 * first
