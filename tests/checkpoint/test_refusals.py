"""Values and folders that cannot be saved: one error on every rank, and nothing is lost."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.checkpoint import PerRank, RowsById, load, read, save
from varcomm.sharding import Box, Sharded


def boxes(*given):
    """Boxes of a 4 x 3 tensor: first row and number of rows on each rank."""

    def make(rank):
        first, rows = given[rank] if rank < len(given) else (0, 0)
        return {"w": Sharded((4, 3), [Box((first, 0), torch.ones(rows, 3))], torch.float32)}

    return make


def on_rank(which, one, other):
    return lambda rank: {"a": {"key": one if rank == which else other}}


def everywhere(**state):
    return lambda rank: state


def itself():
    state = {"a": 1}
    state["inner"] = [state]
    return state


def ragged():
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def copies(rank):
    return {"w": Sharded((4, 3), [Box((0, 0), torch.full((4, 3), float(rank == 2)))])}


def some_ranks(rank):
    return {"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), float(rank))}


def key_of_a_box(rank):
    return {**boxes((0, 2), (2, 2))(rank), "w[0:2, 0:3]": boxes((0, 4))(rank)["w"]}


x, part = torch.ones(3), Sharded((3,), [], torch.float32)
differ, wrong = DisagreementError, ArgumentError
REFUSED = [  # the state of a rank, the error, words of its message
    (on_rank(1, x, 0 * x), differ, r"'a.key' on ranks \[1\]"),
    (on_rank(1, 0.5, 0.25), differ, "'a.key'.*0.25.*rank 1.*0.5"),
    (on_rank(1, 1, True), differ, "'a.key'"),
    (on_rank(1, x, torch.ones(2)), differ, r"'a.key'.*\(2,\).*\(3,\)"),
    (on_rank(1, x, x.int()), differ, "'a.key'"),
    (on_rank(1, x, 5), differ, "'a.key'"),
    (lambda rank: {"w": part if rank else x}, differ, "'w'"),
    (everywhere(w=x, __metadata__=x), wrong, "__metadata__"),
    (some_ranks, differ, r"'y' on ranks \[2\]"),
    (copies, differ, r"'w' on ranks \[2\]"),
    (lambda rank: {"x": {"y": 1} if rank else 1}, differ, "'x' .* container"),
    (boxes((0, 2), (3, 1)), wrong, "'w' have 9 elements"),
    (boxes((0, 3), (2, 2)), wrong, "'w' have 15 elements"),
    (boxes((0, 2), (1, 2)), wrong, "'w'.* overlap"),
    (boxes((0, 0)), wrong, "'w' have 0 elements"),
    (on_rank(1, object(), 5), wrong, "on rank 1 of 3: 'a.key' .* type object"),
    (on_rank(0, np.float32(0.5), 5), wrong, "'a.key' .* type float32"),
    (on_rank(0, lambda: 5, 5), wrong, "'a.key' .* type function"),
    (on_rank(0, 10**5000, 5), wrong, "'a.key' cannot be saved"),
    (on_rank(0, (x,), 5), wrong, "'a.key' is a tuple"),
    (on_rank(0, torch.eye(3).to_sparse(), 5), wrong, "'a.key' must be a plain"),
    (everywhere(x=ragged()), wrong, "'x' must be a plain dense"),
    (on_rank(0, x.to("meta"), 5), wrong, "'a.key' must be a plain"),
    (on_rank(0, nn.LazyLinear(3), 5), wrong, "uninitialized parameter"),
    (lambda rank: [1], wrong, "state must be a dict"),
    (lambda rank: {1: 2}, wrong, r"state must be a dict.*\[1\]"),
    (lambda rank: itself(), wrong, "recursion"),
    (lambda rank: {"a.b": 1, "a": {"b": 2}}, wrong, "'a.b'"),
    (key_of_a_box, wrong, r"'w\[0:2, 0:3\]'"),
    (everywhere(o=torch.optim.SGD(nn.Linear(2, 1).parameters())), wrong, "'o': a par"),
    (everywhere(x=PerRank(RowsById(torch.ones(1), torch.zeros(1), 1))), wrong, "'x.0': RowsById"),
    (everywhere(x=PerRank(PerRank(5))), wrong, "'x.0': PerRank"),
    (everywhere(x=PerRank(part)), wrong, "'x.0'"),
]


@on_ranks(3)
def test_what_cannot_be_saved(rank, tmp_path):
    folder = tmp_path
    save({"before": 1}, folder)
    names = sorted(path.name for path in folder.rglob("*"))
    for make, error, words in REFUSED:
        refused_alike(error, lambda make=make: save(make(rank), folder), match=words)
        assert names == sorted(path.name for path in folder.rglob("*"))
    assert read(folder) == {"before": 1}
    # but what only some ranks have is saved
    save({"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), 5.0)}, folder)
    assert read(folder)["y"].tolist() == [5, 5]


@on_ranks(3)
def test_folders(rank, tmp_path):
    folder = tmp_path
    (folder / "file").touch()
    (folder / "empty").mkdir(exist_ok=True)
    (folder / f"machine {rank}").mkdir()
    if rank == 0:
        (folder / "link").symlink_to(folder / "none")
    with pytest.raises(DisagreementError, match=r"on folder: rank 0 has .*/0; rank 1 has .*/1\."):
        save({"x": 1}, folder / str(rank))
    save({"x": 1}, folder / "same")
    with pytest.raises(DisagreementError, match="on verify: rank 0 has True"):
        load({"x": 1}, folder / "same", verify=rank == 0)
    for name in ("none", "file", "empty"):
        with pytest.raises(ArgumentError, match=name):
            load({"x": 1}, folder / name)
    for where in (folder / "file", folder / "file" / "in it", folder / "link"):
        with pytest.raises(ArgumentError, match=where.parts[-1].split(" ")[0]):
            save({"x": 1}, where)
    with pytest.raises(ArgumentError, match=r"PathLike object.* not '?dict"):
        save(folder, {"x": 1})
    with pytest.raises(ArgumentError, match="async_"):
        save({"x": 1}, folder, async_=1)
    # one name that is another folder on each rank, as on several machines
    before = Path.cwd()
    os.chdir(folder / f"machine {rank}")
    try:
        with pytest.raises(ArgumentError, match="which another rank has written, is not in"):
            save({f"x{n}": torch.ones(100) for n in range(4)}, "here")
    finally:
        os.chdir(before)
    assert not list((folder / f"machine {rank}").iterdir())


def test_without_a_world(tmp_path):
    with pytest.raises(ArgumentError, match=r"^checkpoint.read: there is no .*none"):
        read(tmp_path / "none")
    with pytest.raises(GroupError, match="not initialised"):
        save({"x": 1}, tmp_path, group=5)


def test_other_files_stay(tmp_path):
    old = "0" * 16
    mine = {"notes.txt", "model.safetensors", "checkpoint-mine", f"graph-{old}"}
    for name in mine:
        (tmp_path / name).touch()
    (tmp_path / f"checkpoint-{old}").mkdir()
    (tmp_path / f"checkpoint-{old}" / ".tmp123").touch()
    (tmp_path / f".checkpoint-{old}.json").touch()
    save({"x": torch.ones(1)}, tmp_path)
    save({"x": torch.ones(2)}, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert mine < names
    assert len(names) == len(mine) + 2


@on_ranks(3)
def test_a_full_disk(rank, tmp_path):
    """Files of one rank may not become longer than its limit."""
    folder, x = tmp_path, torch.zeros(200_000)
    save({"before": 1}, folder)
    if rank == 1:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(ArgumentError) as caught:
            save({f"x{n}": x for n in range(4)}, folder)
        assert f"checkpoint.save to {folder}" in str(caught.value)
        assert "refused on rank 1 of 3: rank-00001.safetensors cannot be" in str(caught.value)
        assert "File too large" in str(caught.value)
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
    save({"after": torch.ones(3)}, folder / "other")  # ranks are in step
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "other"]
    assert read(folder) == {"before": 1}


def failing(patch, name, number):
    """Let the n-th call of a function of os fail, as on a broken disk."""
    real, calls = getattr(os, name), []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise OSError(5, "Input/output error")
        return real(*args, **kwargs)

    patch.setattr(os, name, fail)


def test_errors_before_and_after_the_rename(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, "replace", 1)
        with pytest.raises(ArgumentError, match=r"save to .*new: \[Errno 5\]"):
            save({"x": torch.ones(3)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    save({"x": 1}, tmp_path)
    failing(monkeypatch, "fsync", 3)  # index, folder; folder after the rename
    with pytest.raises(ArgumentError, match=r"\[Errno 5\]"):
        save({"x": 2}, tmp_path)
    assert read(tmp_path) == {"x": 2}  # the files that the index names must stay
