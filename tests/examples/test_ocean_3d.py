"""The ocean in three dimensions: its graph, made in parts; training that goes on on other ranks."""

import contextlib
import io
import re
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import varcomm as vc
from tests.examples.loading import EXAMPLES, example
from tests.graph.graphs import WORLDS

FOLDER = EXAMPLES / "ocean_3d"
SMALL = ["--resolution", "12", "--levels", "5", "--hidden", "8", "--blocks", "2"]
ocean = example("ocean_3d", "ocean")


@cache
def load(resolution=12, levels=5):
    return ocean.Ocean(resolution, levels)


def test_the_file_is_small():
    assert ocean.FILE.stat().st_size <= 2_000_000
    assert (FOLDER / "data" / "README.md").exists(), "the data must say where they are from"


def test_sizes():
    whole = load(1, 20)
    assert whole.num_nodes == 718_725
    assert len(whole.pos) == 42_164
    along = np.minimum(*whole.levels[whole.edges]).sum()
    assert along + 2 * (whole.num_nodes - len(whole.pos)) == 4_143_916
    assert load(3, 20).num_nodes == 79_143


def test_temperatures_are_those_of_the_surface_and_of_400_m_in_the_other_example():
    with np.load(EXAMPLES / "ocean" / "data" / "ocean_1deg.npz") as file:
        known = {name: file[name] for name in file.files}
    whole = load(1, 20)
    assert np.array_equal(whole.pos, np.stack([known["lat"], known["lon"]], axis=1))
    at = {depth: whole.temperature[:, list(whole.depth).index(depth)] for depth in (0, 400)}
    np.testing.assert_allclose(at[0], known["surface_temperature"], rtol=0, atol=5.1e-4)
    np.testing.assert_allclose(at[400], known["temperature_400m"], rtol=0, atol=5.1e-4)


def cells(sea):
    """Latitude, longitude and level of each node, by its number."""
    return [
        (lat, lon, level)
        for (lat, lon), count in zip(sea.pos.tolist(), sea.levels.tolist(), strict=True)
        for level in range(count)
    ]


@pytest.mark.parametrize(("resolution", "levels"), [(12, 5), (5, 20)])
def test_edges_join_neighbours_and_what_is_above_and_below(resolution, levels):
    sea = load(resolution, levels)
    number = {cell: at for at, cell in enumerate(cells(sea))}
    found = {}
    scale = np.log(1 + sea.depth / 100)
    for (lat, lon, level), target in number.items():
        for north, east in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            # the grid begins at 20.5 degrees east
            west = (lon - east * resolution - 20.5) % 360 + 20.5
            source = number.get((lat - north * resolution, west, level))
            if source is not None:
                near = east * np.cos(np.deg2rad(lat))
                found[source, target] = (near, north, abs(near) + abs(north), 0)
        for other in (level - 1, level + 1):
            source = number.get((lat, lon, other))
            if source is not None:
                found[source, target] = (0, 0, 0, scale[level] - scale[other])
    data = sea.whole(torch.float64)
    edges = [tuple(edge) for edge in data.edge_index.T.tolist()]
    assert len(edges) == len(set(edges))
    assert set(edges) == set(found)
    wanted = torch.tensor([found[edge] for edge in edges], dtype=torch.float64)
    torch.testing.assert_close(data.edge_attr, wanted, rtol=1e-9, atol=1e-9)


def test_attributes():
    sea = load(5, 20)
    data = sea.whole()
    nodes = sea.num_nodes
    assert (data.x.shape, data.y.shape, data.train.shape) == ((nodes, 7), (nodes, 1), (nodes,))
    assert {data[key].dtype for key in ("x", "y", "edge_attr")} == {torch.float32}
    assert all(data[key].isfinite().all() for key in ("x", "y", "edge_attr"))
    level = np.array([cell[2] for cell in cells(sea)])
    known = np.log(1 + sea.depth[level] / 100)
    np.testing.assert_allclose(data.x[:, 6], known, rtol=1e-6)
    assert data.y[level == 0].abs().max() < 1e-9, "of the surface the fit leaves nothing"
    for at in range(1, 20):
        used = torch.from_numpy(level == at) & data.train
        assert abs(data.y[used].mean()) < 1e-4
        assert data.y[used].std(correction=0) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(sea.surface[:, 3:].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(sea.surface[:, 3:].std(axis=0), 1, rtol=1e-6)


def test_a_column_is_in_a_test_tile_or_for_training():
    sea = load(1, 20)
    tile = np.floor(sea.pos / 10) @ [36, 1]
    assert not np.isin(tile[sea.test], tile[~sea.test]).any()
    assert 0.15 < sea.test.mean() < 0.25
    small = load()
    level = np.array([cell[2] for cell in cells(small)])
    train = small.whole().train.numpy()
    assert not train[level == 0].any(), "the surface is known, and nothing to learn"
    assert np.array_equal(train, (level > 0) & ~small.test.repeat(small.levels))


def test_parts_make_up_the_whole():
    sea = load()
    whole = sea.whole()
    owner = torch.randint(3, (len(sea.pos),), generator=torch.Generator().manual_seed(0)).numpy()
    parts = [sea.part(np.flatnonzero(owner == rank)) for rank in (0, 1, 2, 3)]
    assert len(parts[3][0]) == parts[3][2].shape[1] == 0, "no columns, and so no nodes"
    ids = torch.cat([part[0] for part in parts])
    assert torch.equal(ids.sort().values, torch.arange(sea.num_nodes))
    for name in ("x", "y", "train"):
        rows = torch.cat([part[1][name] for part in parts])
        assert torch.equal(rows[ids.argsort()], whole[name])
    for number, _, edge_index, _ in parts:
        assert torch.isin(edge_index[1], number).all(), "edges into nodes of its own"

    def sorted_edges(edge_index, moved):
        order = (edge_index[0] * sea.num_nodes + edge_index[1]).argsort()
        return edge_index[:, order], moved[order]

    together = sorted_edges(
        torch.cat([part[2] for part in parts], dim=1), torch.cat([part[3] for part in parts])
    )
    for found, wanted in zip(
        together, sorted_edges(whole.edge_index, whole.edge_attr), strict=True
    ):
        assert torch.equal(found, wanted)


def test_predictions_in_degrees_celsius():
    sea = load(5, 20)
    celsius = sea.celsius(sea.whole(torch.float64).y[:, 0].numpy())
    np.testing.assert_allclose(celsius, sea.temperature, atol=1e-12)
    assert sea.rmse(celsius)[1] < 1e-12
    more = sea.celsius(sea.whole(torch.float64).y[:, 0].numpy() + 1) - celsius
    by_level = np.where(np.isfinite(celsius), sea.std, np.nan)
    by_level[:, 0] = 0  # that of the surface is known
    np.testing.assert_allclose(more, by_level, atol=1e-12)
    errors, below = sea.rmse(celsius + 2.0)
    assert below == pytest.approx(2.0)
    np.testing.assert_allclose(errors, 2.0)
    celsius[~sea.test] += 100
    assert sea.rmse(celsius)[1] < 1e-12, "only the test tiles count"


def test_the_linear_fit():
    sea = load(5, 20)
    known = torch.cat([torch.from_numpy(sea.surface), torch.ones(len(sea.pos), 1)], dim=1)
    for level in (1, 10, 19):
        truth = torch.from_numpy(sea.temperature[:, level])
        used = truth.isfinite() & ~torch.from_numpy(sea.test)
        weights = torch.linalg.pinv(known[used]) @ truth[used]
        np.testing.assert_allclose(sea.fit[:, level], known @ weights, rtol=1e-8, atol=1e-8)
        mean = sea.level_mean()[:, level]
        np.testing.assert_allclose(mean, truth[used].mean(), rtol=1e-9)
    assert 0 < sea.rmse(sea.fit)[1] < sea.rmse(sea.level_mean())[1]


@pytest.mark.parametrize("asked", [(7, 20), (0, 20), (20, 20), (3, 1), (3, 21)])
def test_grids_that_there_are_not(asked):
    said = r"need a resolution of \[1, 2, 3, .*\] and 2 to 20 levels, got "
    with pytest.raises(ValueError, match=said + f"{asked[0]} and {asked[1]}"):
        ocean.Ocean(*asked)


@pytest.mark.parametrize("resolution", ocean.RESOLUTIONS)
def test_every_grid_on_offer_has_nodes_to_train_and_to_test_at_each_level(resolution):
    sea = load(resolution, 20)
    deep = np.isfinite(sea.temperature)
    assert deep[sea.test].any(axis=0).all()
    assert (deep[~sea.test].sum(axis=0) > 7).all(), "enough for the linear fit"


def own_part(rank):
    """What a rank has, and how many columns it made nodes of."""
    train, sea = example("ocean_3d", "train"), ocean.Ocean(6, 20)
    made = []
    whole, part = sea.whole(), sea.part
    sea.part = lambda columns, dtype: made.append(len(columns)) or part(columns, dtype)
    graph = train.on_ranks(sea)
    source, target = graph.edge_index
    across = graph.edge_attr[:, 3] != 0
    same = all(torch.equal(graph[name], whole[name][graph.owned_ids]) for name in ("x", "y"))
    return (
        made,
        graph.num_owned,
        bool((source[across] < graph.num_owned).all()),
        same,
        bool((target < graph.num_owned).all()),
    )


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_rank_makes_its_own_columns_and_no_others(worlds, ranks):
    sea = load(6, 20)
    told = worlds.run(ranks, own_part)
    assert sum(count for (count,), *_ in told) == len(sea.pos), "each column once"
    assert sum(owned for _, owned, *_ in told) == sea.num_nodes
    assert max(owned for _, owned, *_ in told) < 1.1 * sea.num_nodes / ranks
    assert all(all(good) for _, _, *good in told), "columns are whole, and rows are the graph's"


def options(*more):
    return example("ocean_3d", "train").parsed([*SMALL, *more])


def alone(steps):
    """Losses and first gradients in one process, without varcomm."""
    train, data = example("ocean_3d", "train"), load().whole(torch.float64)
    model = train.new_model(options()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, train.rate)
    losses, gradients = [], []
    for _ in range(steps):
        error = model(data.x, data.edge_index, data.edge_attr) - data.y
        loss = error[data.train].square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, gradients


def together(rank, steps, *more):
    """The same on ranks, from the checkpoint on if there is one."""
    train, chosen = example("ocean_3d", "train"), options("--steps", str(steps), *more)
    run = train.Training(train.on_ranks(load(), torch.float64), chosen)
    if chosen.checkpoint and train.is_there(chosen.checkpoint):
        run.resume(chosen.checkpoint)
    start, gradients = len(run.losses), []
    for _ in run.run(chosen):
        gradients = gradients or [p.grad.clone() for p in run.model.parameters()]
    return start, run.losses, gradients


def in_one_process(rank, steps):
    return alone(steps)


@pytest.mark.parametrize("more", [[], ["--recompute"]], ids=["", "recomputed"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, more):
    losses, gradients = worlds.run(1, in_one_process, 10)[0]
    for _, found, first in worlds.run(ranks, together, 10, *more):
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        for x, y in zip(first, gradients, strict=True):
            assert (x - y).abs().max() <= 1e-12 * y.abs().max()


def test_other_ranks_go_on_as_one_process_would(worlds, tmp_path):
    saving = ["--every", "4", "--checkpoint", str(tmp_path / "saved")]
    starts = []
    for ranks, steps in ((3, 6), (2, 12), (5, 15), (1, 20)):
        told = worlds.run(ranks, together, steps, *saving)
        assert all(losses == told[0][1] for _, losses, _ in told), "ranks differ"
        starts.append(told[0][0])
    assert starts == [0, 6, 12, 15]
    losses, _ = worlds.run(1, in_one_process, 20)[0]
    np.testing.assert_allclose(told[0][1], losses, rtol=1e-9)


def test_a_training_that_is_cut_short_goes_on_from_what_was_saved(worlds, tmp_path):
    saving = ["--every", "4", "--checkpoint", str(tmp_path / "saved")]
    worlds.run(3, cut_short, 7, *saving)
    start, found, _ = worlds.run(2, together, 12, *saving)[0]
    losses, _ = worlds.run(1, in_one_process, 12)[0]
    assert start == 4
    np.testing.assert_allclose(found, losses, rtol=1e-9)


def cut_short(rank, steps, *more):
    train, chosen = example("ocean_3d", "train"), options("--steps", "100", *more)
    run = train.Training(train.on_ranks(load(), torch.float64), chosen)
    return list(islice(run.run(chosen), steps))


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "schedule"])
def test_each_part_of_the_state_matters(worlds, tmp_path, forgotten):
    first, second = worlds.run(2, losses_without, tmp_path / "saved", forgotten)[0]
    assert abs(first - second) > 1e-6 * first


def losses_without(rank, folder, forgotten):
    """Of the second step after a checkpoint, where all of it is loaded and where not."""
    train, chosen = example("ocean_3d", "train"), options()
    graph = train.on_ranks(load(), torch.float64)
    first, second = train.Training(graph, chosen), train.Training(graph, chosen)
    for _ in range(3):
        first.advance()
    vc.checkpoint.save(first.state(), folder)
    state = second.state()
    vc.checkpoint.load(state, folder)
    lacking = train.Training(graph, chosen)
    for name in {"model", "optimizer", "schedule"} - {forgotten}:
        getattr(lacking, name).load_state_dict(getattr(second, name).state_dict())
    return [[run.advance() for _ in range(2)][1] for run in (second, lacking)]


def run_main(rank, *arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bar
    ):
        code = example("ocean_3d", "train").main([*SMALL, *arguments])
    return code, printed.getvalue()


def test_main(worlds, tmp_path):
    path, saved = tmp_path / "a folder" / "ocean.png", tmp_path / "saved"
    more = ["--picture", str(path), "--checkpoint", str(saved)]
    for ranks, steps in ((2, "3"), (3, "5"), (1, "5")):
        (code, printed), *others = worlds.run(ranks, run_main, "--steps", steps, *more)
        assert code == 0
        assert others == [(0, "")] * (ranks - 1), "only the first rank prints"
        assert f"{load().num_nodes:,} nodes and 4,940 edges on {ranks} ranks" in printed
        made = {2: 3, 3: 2, 1: 0}[ranks]
        assert ("going on from step" in printed) == (made < int(steps))
        assert (f" s a step, the median of {made}; at most" in printed) == (made > 0)
        assert re.search(r"RMSE in the test tiles, in deg C:", printed)
        for name in ("    75 m", "  5000 m", "     all"):
            assert re.search(rf"^{name}( +\d+\.\d\d){{3}}$", printed, re.MULTILINE), printed
        assert f"picture: {path}" in printed
        assert path.read_bytes()[:4] == b"\x89PNG"
    assert len(vc.checkpoint.read(saved)["losses"]) == 5


def refused(rank, arguments):
    with contextlib.redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit, match=r"^2$"):
        example("ocean_3d", "train").main(arguments)
    return told.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resolution", "7"], r"argument --resolution: invalid choice: 7 \(choose from 1, 2, 3"),
        (["--levels", "1"], r"argument --levels: invalid choice: 1 \(choose from 2, 3"),
        (["--every", "0"], r"argument --every: need a whole number from 1 on, got '0'"),
        (
            ["--checkpoint", __file__],
            r"argument --checkpoint: '.*test_ocean_3d.py' is not a folder",
        ),
    ],
)
def test_wrong_options_are_told_once(worlds, tmp_path, arguments, message):
    picture = tmp_path / "ocean.png"
    told, other = worlds.run(2, refused, [*arguments, "--picture", str(picture)])
    assert re.search(message, told)
    assert other == ""
    assert not picture.exists(), "a file that nobody has drawn"


@pytest.mark.parametrize("option", ["--resolution 6", "--levels 4"])
def test_a_checkpoint_of_another_ocean_is_refused(worlds, tmp_path, option):
    saving = ["--checkpoint", str(tmp_path / "saved")]
    worlds.run(1, together, 1, *saving)
    for told in worlds.run(2, of_another, tmp_path / "saved", option.split()):
        name, number = option.removeprefix("--").split()
        assert re.search(f"saved is of .*, and this is .*'{name}': {number}", told)


def of_another(rank, folder, option):
    train, chosen = example("ocean_3d", "train"), options(*option)
    graph = train.on_ranks(load(chosen.resolution, chosen.levels), torch.float64)
    with pytest.raises(vc.ArgumentError, match="is of") as refusal:
        train.Training(graph, chosen).resume(folder)
    return str(refusal.value)


def test_training_learns(worlds):
    losses, _ = worlds.run(1, in_one_process, 200)[0]
    assert losses[-1] < 0.3 * losses[0], "beyond a linear fit, which the losses are relative to"


@pytest.mark.parametrize("ranks", [1, 3, 12])
def test_picture(tmp_path, ranks):
    sea, path = load(6, 20), Path(tmp_path / "ocean.png")
    rank = np.arange(len(sea.pos)) % ranks
    example("ocean_3d", "picture").draw(path, sea, rank, sea.fit)
    content = path.read_bytes()
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1600, 1000)
