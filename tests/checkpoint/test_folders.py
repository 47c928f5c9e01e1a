"""Which files of a folder a save leaves alone, and folders that cannot be written to."""

import pytest
import torch

from varcomm import ArgumentError
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
