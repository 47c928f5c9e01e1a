"""Data, graph and tensor parallelism on meshes of ranks: each as one process, and wrong options."""

import contextlib
import io
import math
import re
from functools import partial

import pytest
import torch

from tests.examples.loading import example as load

SMALL = ["--side", "6", "--samples", "7", "--batch", "5", "--blocks", "1", "--wide", "13"]
SLOW = ["2x1x1", "1x2x1", "1x1x2", "1x2x2", "2x2x1", "2x1x2", "1x5x1", "1x1x5", "5x1x1"]
MESHES = ["1x1x1", "1x3x1", "1x1x3", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)]

example = partial(load, "three_ways")


def ranks_of(mesh):
    return math.prod(map(int, mesh.split("x")))


def options(folder, *more):
    return example("train").parsed([*SMALL, "--picture", str(folder / "mesh.png"), *more])


def compare(rank, folder, mesh):
    train = example("train")
    chosen = options(folder, "--mesh", mesh, "--check", "4")
    ranks = train.new_mesh(chosen.mesh[0])
    data = train.plate.load(chosen.side, chosen.samples, 3)
    return train.compare(data, ranks, chosen, torch.float64)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradients_are_those_of_one_process(worlds, tmp_path, mesh):
    """Of 5 samples, 36 nodes, 5 heads and 13 features, which few numbers of ranks divide."""
    answers = worlds.run(ranks_of(mesh), compare, tmp_path, mesh)
    assert answers == answers[:1] * len(answers), "ranks differ"
    losses, gradients = answers[0]
    assert losses <= 1e-10
    assert gradients <= 1e-10


def replicated(rank, folder):
    """Digests of the parameters after some steps, of those that all ranks have alike."""
    train = example("train")
    chosen = options(folder, "--mesh", "2x2x2")
    ranks = train.new_mesh(chosen.mesh[0])
    data, model = train.plate.load(chosen.side, chosen.samples, 3), train.new_model(chosen)
    graph = train.spread(model, data, ranks)
    losses = list(train.fit_on_mesh(model, graph, ranks, chosen, 3))
    error = train.held_out_error(model, graph, ranks, chosen.nodes)
    found = [p.double().sum().item() for p in model.parameters() if train.shard_spec(p) is None]
    return losses, error, found


@pytest.mark.slow
def test_copies_stay_equal(worlds, tmp_path):
    """Bit for bit, on all 8 ranks; and all know the same losses."""
    answers = worlds.run(8, replicated, tmp_path)
    assert answers == answers[:1] * 8
    assert len(answers[0][2]) > 5


def run_main(rank, folder, *arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bar
    ):
        more = ["--picture", str(folder / "mesh.png"), *arguments]
        code = example("train").main([*SMALL, "--steps", "3", *more])
    return code, printed.getvalue()


@pytest.mark.slow
def test_main(worlds, tmp_path):
    meshes = ["--mesh", "1x2x2", "2x1x2"]
    (code, printed), *others = worlds.run(4, run_main, tmp_path, *meshes, "--check", "2")
    assert code == 0
    assert others == [(0, "")] * 3, "only the first rank prints"
    assert "rank 3: 5 samples, 18 nodes" in printed
    assert "rank 3: 2 samples, 36 nodes and 0 of others, 2 heads, 6 wide features" in printed
    assert len(re.findall(r"a step, the median of 3; at most", printed)) == 2
    errors = dict(reversed(line.split("  ")) for line in re.findall(r"^  (\d.*)$", printed, re.M))
    trained = {errors[name] for name in errors if name.startswith("model")}
    assert len(trained) == 1, "meshes and one process come to the same"
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    assert printed.count("\none answer\n") == 2


def learned(rank, folder):
    train = example("train")
    chosen = options(folder, "--side", "10", "--samples", "20", "--blocks", "2")
    data = train.plate.load(chosen.side, chosen.samples, 5)
    model = train.new_model(chosen)
    list(train.fit_alone(model, data, chosen, 60))
    with torch.no_grad():
        errors = train.squared_error(model, data, data.test_x, data.test_y)
    return errors.mean().item(), train.plate.baselines(data)


@pytest.mark.slow
def test_training_learns_more_than_baselines(worlds, tmp_path):
    error, baselines = worlds.run(1, learned, tmp_path)[0]
    assert list(baselines.values()) == sorted(baselines.values(), reverse=True)
    assert error < 0.8 * min(baselines.values())
