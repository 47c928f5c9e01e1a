"""Values and folders that cannot be saved: one error on every rank, and nothing is lost."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.checkpoint import PerRank, Rows, load, read, save
from varcomm.sharding import Box, Sharded


def boxes(*given):
    """Boxes of a 4 x 3 tensor: first row and number of rows on each rank."""

    def make(rank):
        first, rows = given[rank] if rank < len(given) else (0, 0)
        return {"w": Sharded((4, 3), [Box((first, 0), torch.ones(rows, 3))], torch.float32)}

    return make


def on_rank(which, one, other):
    return lambda rank: {"a": {"key": one if rank == which else other}}


class Named(torch.Tensor):
    pass


def itself():
    state = {"a": 1}
    state["inner"] = [state]
    return state


def ragged():
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


x, sgd = torch.ones(3), torch.optim.SGD
REFUSED = {  # the state of a rank, the error, words of its message
    "tensors": (on_rank(1, x, 0 * x), DisagreementError, r"ranks \[1\]: 'a.key'"),
    "values": (on_rank(1, 0.5, 0.25), DisagreementError, "'a.key'.*0.25.*rank 1.*0.5"),
    "bool and int": (on_rank(1, 1, True), DisagreementError, "'a.key'"),
    "shapes": (on_rank(1, x, torch.ones(2)), DisagreementError, r"'a.key'.*\(2,\).*\(3,\)"),
    "dtypes": (on_rank(1, x, x.int()), DisagreementError, "'a.key'"),
    "kinds": (on_rank(1, x, 5), DisagreementError, "'a.key'"),
    "part": (
        lambda rank: {"w": Sharded((3,), [], torch.float32) if rank else x},
        DisagreementError,
        "'w'",
    ),
    "reserved": (
        lambda rank: {"w": x, "__metadata__": x},
        ArgumentError,
        "__metadata__",
    ),
    "some ranks": (
        lambda rank: {"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), float(rank))},
        DisagreementError,
        r"ranks \[2\]: 'y'",
    ),
    "copies of a box": (
        lambda rank: {"w": Sharded((4, 3), [Box((0, 0), torch.full((4, 3), float(rank == 2)))])},
        DisagreementError,
        r"ranks \[2\]: 'w'",
    ),
    "a value and a dict": (
        lambda rank: {"x": {"y": 1} if rank else 1},
        DisagreementError,
        "'x' .* container",
    ),
    "gap": (boxes((0, 2), (3, 1)), ArgumentError, "'w' have 9 elements"),
    "overlap": (boxes((0, 3), (2, 2)), ArgumentError, "'w' have 15 elements"),
    "gap and overlap": (boxes((0, 2), (1, 2)), ArgumentError, "'w'.* overlap"),
    "on no rank": (boxes((0, 0)), ArgumentError, "'w' have 0 elements"),
    "object": (on_rank(1, object(), 5), ArgumentError, "on rank 1 of 3: 'a.key' has type object"),
    "numpy": (on_rank(0, np.float64(0.5), 5), ArgumentError, "'a.key' has type numpy.float64"),
    "function": (on_rank(0, lambda: 5, 5), ArgumentError, "'a.key' has type function"),
    "large int": (on_rank(0, 10**5000, 5), ArgumentError, "'a.key' has type int"),
    "tuple": (on_rank(0, (x,), 5), ArgumentError, "'a.key' is a tuple"),
    "sparse": (on_rank(0, torch.eye(3).to_sparse(), 5), ArgumentError, "'a.key' must be a dense"),
    "ragged": (lambda rank: {"x": ragged()}, ArgumentError, "'x' must be a dense"),
    "meta": (on_rank(0, x.to("meta"), 5), ArgumentError, "'a.key' must be a dense"),
    "subclass": (on_rank(0, x.as_subclass(Named), 5), ArgumentError, "'a.key' is a Named"),
    "lazy": (on_rank(0, nn.LazyLinear(3), 5), ArgumentError, "'a.key': 'weight'"),
    "no state": (lambda rank: [1], ArgumentError, "state must be a dict"),
    "numbers": (lambda rank: {1: 2}, ArgumentError, r"state must be a dict.*\[1\]"),
    "itself": (lambda rank: itself(), ArgumentError, "contains itself"),
    "same key": (lambda rank: {"a.b": 1, "a": {"b": 2}}, ArgumentError, "'a.b'"),
    "key of a box": (
        lambda rank: {**boxes((0, 2), (2, 2))(rank), "w[0:2, 0:3]": boxes((0, 4))(rank)["w"]},
        ArgumentError,
        r"'w\[0:2, 0:3\]'",
    ),
    "optimizer": (lambda rank: {"o": sgd(nn.Linear(2, 1).parameters())}, ArgumentError, "'o': par"),
    "Rows of a rank": (
        lambda rank: {"x": PerRank(Rows(torch.ones(1), torch.zeros(1), 1))},
        ArgumentError,
        "'x.0': Rows",
    ),
    "PerRank twice": (lambda rank: {"x": PerRank(PerRank(5))}, ArgumentError, "'x.0': PerRank"),
    "part of a rank": (
        lambda rank: {"x": PerRank(Sharded((3,), [], torch.float32))},
        ArgumentError,
        "'x.0'",
    ),
}


def refused(rank, folder):
    save({"before": 1}, folder)
    names = sorted(path.name for path in folder.rglob("*"))
    said = []
    for make, error, words in REFUSED.values():
        with pytest.raises(error, match=words) as caught:
            save(make(rank), folder)
        said.append(str(caught.value))
        assert names == sorted(path.name for path in folder.rglob("*"))
    assert read(folder) == {"before": 1}
    # but what only some ranks have is saved
    save({"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), 5.0)}, folder)
    assert read(folder)["y"].tolist() == [5, 5]
    return said


def test_what_cannot_be_saved(worlds, tmp_path):
    found = worlds.run(3, refused, tmp_path)
    assert found == [found[0]] * 3


def folders(rank, folder):
    (folder / "file").touch()
    (folder / "empty").mkdir(exist_ok=True)
    (folder / f"machine {rank}").mkdir()
    if rank == 0:
        (folder / "link").symlink_to(folder / "none")
    with pytest.raises(DisagreementError, match=r"on folder: rank 0 has .*/0, rank 1 has .*/1\."):
        save({"x": 1}, folder / str(rank))
    for name in ("none", "file", "empty"):
        with pytest.raises(ArgumentError, match=name):
            load({"x": 1}, folder / name)
    for where in (folder / "file", folder / "file" / "in it", folder / "link"):
        with pytest.raises(ArgumentError, match=where.parts[-1].split(" ")[0]):
            save({"x": 1}, where)
    with pytest.raises(ArgumentError, match=r"folder must be a path; got dict"):
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
    return [path.name for path in (folder / f"machine {rank}").iterdir()]


def test_folders(worlds, tmp_path):
    assert worlds.run(3, folders, tmp_path) == [[], [], []]
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


def test_a_folder_without_permission(tmp_path):
    for path in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(path, 0o755)
    folder, user = tmp_path / "here", os.geteuid()
    save({"x": 1}, folder)
    os.chmod(folder / "checkpoint.json", 0o000)
    os.chmod(folder, 0o555)
    os.seteuid(user or 65534)  # root may write everywhere
    try:
        for where in (folder, folder / "deeper"):
            said = f"{where} cannot be written to: there is no permission in {folder}"
            with pytest.raises(ArgumentError, match=said):
                save({"x": 2}, where)
        with pytest.raises(ArgumentError, match=r"checkpoint\.json cannot be read: .*Permission"):
            load({"x": 1}, folder)
    finally:
        os.seteuid(user)
    assert os.listdir(folder) == ["checkpoint.json"]


def full(rank, folder):
    """Files of one rank may not become longer than its limit."""
    x = torch.zeros(200_000)
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
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk(worlds, tmp_path):
    save({"before": 1}, tmp_path)
    assert worlds.run(3, full, tmp_path) == [["checkpoint.json", "other"]] * 3
    assert read(tmp_path) == {"before": 1}


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
