"""Which files of a folder a save leaves alone, and folders that cannot be written to."""

import os
from pathlib import Path

import pytest
import torch

from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import load, read, save


def test_other_files_stay(tmp_path):
    mine = {"notes.txt", "model.distcp", "__x.json", ".metadata.bak", "__1_my.distcp"}
    for name in mine:
        (tmp_path / name).touch()
    old = "0" * 32
    for name in ("__0_17.distcp", f"__3_{old}_0.distcp", f".metadata.varcomm-{old}"):
        (tmp_path / name).touch()
    save({"x": 1}, tmp_path)
    save({"x": 2}, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert mine < names
    assert len(names) == len(mine) + 3


def test_a_link_to_nothing(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(ArgumentError, match=r"link is a symbolic link to .*none, not there"):
        save({"x": 1}, tmp_path / "link")


def test_a_state_without_anything(tmp_path):
    save({}, tmp_path)
    load({}, tmp_path)
    assert read(tmp_path) == {}
    with pytest.raises(ArgumentError, match=r"1 keys are missing in the checkpoint: 'x'"):
        load({"x": torch.ones(1)}, tmp_path)


def apart(rank, folder):
    """Different folders; and one name that is another folder on each rank, as on two machines."""
    state = {f"x{n}": torch.ones(100) for n in range(4)}
    with pytest.raises(DisagreementError, match=r"on folder: rank 0 has .*/0, rank 1 has .*/1\."):
        save(state, folder / str(rank))
    before = Path.cwd()
    (folder / f"machine {rank}").mkdir()
    os.chdir(folder / f"machine {rank}")
    try:
        with pytest.raises(ArgumentError, match=r"which another rank has written, is not there as"):
            save(state, "here")
    finally:
        os.chdir(before)
    return [path.name for path in (folder / f"machine {rank}").iterdir()]


def test_ranks_that_write_to_different_folders(worlds, tmp_path):
    assert worlds.run(2, apart, tmp_path) == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine 0", "machine 1"]


def test_a_folder_that_was_made_in_vain(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("varcomm.checkpoint.writer._sync", no_space)
    with pytest.raises(ArgumentError) as caught:
        save({"x": torch.ones(3)}, tmp_path / "new")
    assert str(caught.value) == (
        f"checkpoint.save to {tmp_path / 'new'}: [Errno 28] No space left on device"
    )
    assert not (tmp_path / "new").exists()


def test_an_error_after_the_new_checkpoint_is_there(tmp_path, monkeypatch):
    """As of a disk that fails when the folder is synced: what it names must stay."""
    save({"x": 1}, tmp_path)
    from varcomm.checkpoint import writer

    sync, calls = writer._sync, []

    def failing(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        sync(folder)

    monkeypatch.setattr(writer, "_sync", failing)
    with pytest.raises(ArgumentError, match=r"\[Errno 5\]"):
        save({"x": 2}, tmp_path)
    assert read(tmp_path) == {"x": 2}
