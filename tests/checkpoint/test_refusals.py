"""What cannot be saved or loaded: one error on every rank, and nothing is lost."""

import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.test_crash import ROOT
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.checkpoint import PerRank, Rows, load, read, save
from varcomm.sharding import Box, Sharded, ShardSpec


def refused(rank, folder, make, error, message):
    """Saving is refused on every rank with one message; the earlier checkpoint is there."""
    save({"before": 1}, folder)
    names = sorted(path.name for path in folder.iterdir())
    with pytest.raises(error) as caught:
        save(make(rank), folder)
    assert message in str(caught.value), str(caught.value)
    assert names == sorted(path.name for path in folder.iterdir())
    return str(caught.value), read(folder)


def boxes(*given):
    """Boxes of a 4 x 3 tensor: their first rows and how many rows, on each rank."""

    def make(rank):
        first, rows = given[rank]
        return {"w": Sharded((4, 3), [Box((first, 0), torch.ones(rows, 3))], torch.float32)}

    return make


def on_rank(which, one, other):
    return lambda rank: {"a": {"key": one if rank == which else other}}


NOT_EQUAL = "1 keys have other contents on ranks [1] than on rank 0: 'a.key'. A tensor or value"


class Named(torch.Tensor):
    pass


ALIKE = "ranks disagree on 'a.key': on rank 0 it is"

REFUSED = {
    "tensors": (on_rank(1, torch.ones(3), torch.zeros(3)), DisagreementError, NOT_EQUAL),
    "values": (on_rank(1, 0.5, 0.25), DisagreementError, NOT_EQUAL),
    "shapes": (
        on_rank(1, torch.ones(3), torch.ones(2)),
        DisagreementError,
        f"{ALIKE} a tensor of shape (2,), torch.float32, and on rank 1 a tensor of shape "
        "(3,), torch.float32",
    ),
    "dtypes": (on_rank(1, torch.ones(3), torch.ones(3).int()), DisagreementError, ALIKE),
    "kinds": (on_rank(1, torch.ones(3), 5), DisagreementError, f"{ALIKE} a plain value, and on "),
    "part": (
        lambda rank: {"w": Sharded((3,), [], torch.float32) if rank else torch.ones(3)},
        DisagreementError,
        "and on rank 1 parts of a tensor of shape (3,)",
    ),
    "gap": (
        boxes((0, 2), (3, 1)),
        ArgumentError,
        "the boxes of 'w' on all ranks have 9 elements, and the tensor of shape (4, 3) has 12",
    ),
    "overlap": (boxes((0, 3), (2, 2)), ArgumentError, "have 15 elements"),
    "gap and overlap": (boxes((0, 2), (1, 2)), ArgumentError, "key:w has overlapping chunks"),
    "nobody has it": (boxes((0, 0), (0, 0)), ArgumentError, "have 0 elements"),
    "pickle": (
        on_rank(1, object(), 5),
        ArgumentError,
        "refused on rank 1 of 2: 'a.key' is of object and could not be loaded again",
    ),
    "numpy": (
        on_rank(0, np.float64(0.5), 5),
        ArgumentError,
        "'a.key' is of numpy.float64 and could",
    ),
    "function": (on_rank(0, lambda: 5, 5), ArgumentError, "'a.key' is of function and could not"),
    "tuple": (on_rank(0, (torch.ones(1),), 5), ArgumentError, "is a tuple with tensors in it"),
    "sparse": (on_rank(0, torch.eye(3).to_sparse(), 5), ArgumentError, "is not a dense tensor"),
    "meta": (on_rank(0, torch.ones(3, device="meta"), 5), ArgumentError, "is not a dense tensor"),
    "subclass": (
        on_rank(0, torch.ones(3).as_subclass(Named), 5),
        ArgumentError,
        "'a.key' is a Named, which could not be loaded again without pickle",
    ),
    "lazy": (
        on_rank(0, nn.LazyLinear(3), 5),
        ArgumentError,
        "'a.key': 'weight' of a LazyLinear has no shape yet. Run the module once before",
    ),
    "no state": (lambda rank: [1], ArgumentError, "must be a dict whose keys are strings"),
    "numbers": (lambda rank: {1: 2}, ArgumentError, "got dict with keys [1]."),
    "same key": (
        lambda rank: {"a.b": 1, "a": {"b": 2}},
        ArgumentError,
        "two parts of the state would be saved as 'a.b': ('a.b',) and ('a', 'b')",
    ),
    "optimizer": (
        lambda rank: {"o": torch.optim.SGD(nn.Linear(2, 1).parameters())},
        ArgumentError,
        "'o': parameter 0 of group 0, of shape (1, 2), is of no module of the state",
    ),
    "Rows of a rank": (
        lambda rank: {"x": PerRank(Rows(torch.ones(1), torch.zeros(1), 1))},
        ArgumentError,
        "'x.0': within PerRank there can be no Rows",
    ),
    "PerRank twice": (
        lambda rank: {"x": PerRank(PerRank(5))},
        ArgumentError,
        "within PerRank there can be no PerRank",
    ),
    "part of a rank": (
        lambda rank: {"x": PerRank(Sharded((3,), [], torch.float32))},
        ArgumentError,
        "is part of a tensor of all ranks",
    ),
    "a value and a dict": (
        lambda rank: {"x": {"y": 1} if rank else 1},
        DisagreementError,
        "'x' is a plain value on rank 0, and a container on another",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved(worlds, tmp_path, what):
    (one, found), (other, _) = worlds.run(2, refused, tmp_path, *REFUSED[what])
    assert one == other
    assert found == {"before": 1}


def on_some(rank, folder):
    """A tensor that only two of three ranks have, and these not alike."""
    state = {"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), float(rank))}
    with pytest.raises(DisagreementError, match=r"on ranks \[2\] than on rank 0: 'y'"):
        save(state, folder)
    state = {"x": 1} if rank == 1 else {"x": 1, "y": torch.full((2,), 5.0)}
    save(state, folder)
    return True


def test_what_some_ranks_have(worlds, tmp_path):
    assert worlds.run(3, on_some, tmp_path) == [True] * 3
    assert read(tmp_path)["y"].tolist() == [5, 5]


def differing_boxes(rank, folder):
    boxes = [Box((0, 0), torch.full((4, 3), float(rank)))]
    with pytest.raises(DisagreementError, match=r"on ranks \[1\] than on rank 0: 'w'"):
        save({"w": Sharded((4, 3), boxes)}, folder)
    return not folder.exists()


def test_copies_of_a_box_that_differ(worlds, tmp_path):
    assert worlds.run(2, differing_boxes, tmp_path / "new") == [True, True]


def other_model(rank, folder):
    spec = ShardSpec.of([2, 1])
    w = Sharded.of(torch.ones(spec.local, 4), spec)
    saved = {"net": {"w": w, "b": torch.ones(3), "s": 5, "same": torch.ones(2)}, "x": 1}
    save(saved, folder)
    own = torch.zeros(2)
    spec = ShardSpec.of([1, 1])
    state = {
        "net": {
            "w": Sharded.of(torch.zeros(1, 4), spec),
            "b": torch.zeros(3, dtype=torch.float64),
            "same": own,
            "new": torch.zeros(1),
            **{f"n{number}": 0 for number in range(7)},
        }
    }
    with pytest.raises(ArgumentError) as caught:
        load(state, folder)
    assert not own.any()
    return str(caught.value)


def test_a_checkpoint_of_another_model(worlds, tmp_path):
    one, other = worlds.run(2, other_model, tmp_path)
    assert one == other
    assert one == (
        f"checkpoint.load: {tmp_path} is a checkpoint of something else. 8 keys are missing in the "
        "checkpoint: 'net.new', 'net.n0', 'net.n1', 'net.n2', 'net.n3', ...; 1 of its keys are not "
        "in the state: 'net.s'; 2 are of another shape or dtype: 'net.w' is saved as (3, 4), "
        "torch.float32 and is (2, 4), torch.float32 here, 'net.b' is saved as (3,), torch.float32 "
        "and is (3,), torch.float64 here. Nothing has been loaded."
    )


def mismatch(tmp_path, saved, state, message):
    save(saved, tmp_path)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load(state, tmp_path)
    return True


def test_kinds_that_do_not_fit(tmp_path):
    x = torch.zeros(2)
    assert mismatch(tmp_path, {"x": x}, {"x": 5}, "'x' is saved as tensors and is a plain value")
    assert mismatch(tmp_path, {"x": 5}, {"x": x}, "'x' is saved as a plain value and is (2,)")
    assert mismatch(tmp_path, {"x": x}, {"y": x}, "1 keys are missing in the checkpoint: 'y'")
    assert mismatch(tmp_path, {"x": x}, {"x": PerRank(x)}, "missing in the checkpoint: 'x.0'")
    assert mismatch(tmp_path, {"x": x}, {"y": PerRank(x)}, "missing in the checkpoint: 'y.0'")
    assert mismatch(tmp_path, {"x": x}, {"y": nn.Linear(1, 1)}, "in the checkpoint: 'y'")
    assert mismatch(tmp_path, {"x": {}}, {"x": {"y": 5}}, "missing in the checkpoint: 'x.y'")
    assert mismatch(tmp_path, {"x": {"y": 5}}, {"x": {}}, "not in the state: 'x.y'")


def test_a_module_on_the_meta_device(tmp_path):
    save({"m": nn.Linear(2, 1)}, tmp_path)
    with pytest.raises(ArgumentError, match=r"'m.weight' is on the meta device"):
        load({"m": nn.Linear(2, 1, device="meta")}, tmp_path)


def test_another_optimizer(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    save({"m": model, "o": torch.optim.SGD(model.parameters())}, tmp_path)
    state = {"o": torch.optim.SGD(other.parameters()), "other": [other]}
    said = "'o': the saved optimizer has groups of parameters [['weight', 'bias']], and this one "
    with pytest.raises(ArgumentError, match=re.escape(said + "[['weight']]")):
        load({"o": state["o"], "m": other}, tmp_path)


class Choosy:
    def state_dict(self):
        return {"number": 5, "inner": [torch.ones(2), {}]}

    def load_state_dict(self, state):
        assert state == {"number": 5, "inner": [state["inner"][0], {}]}
        raise ValueError("not this one")


def choosy(rank, folder):
    x = torch.ones(2)
    save({"a": x, "b": Choosy()}, folder)
    x.zero_()
    with pytest.raises(ArgumentError, match="not this one"):
        load({"a": x, "b": Choosy()}, folder)
    return not x.any()


def test_an_object_refuses_before_tensors_are_overwritten(worlds, tmp_path):
    assert worlds.run(2, choosy, tmp_path) == [True, True]


def no_folder(rank, folder):
    (folder / "file").touch()
    (folder / "empty").mkdir(exist_ok=True)
    for name, message in (
        ("none", "there is no folder"),
        ("file", "has no checkpoint in it: there is no .metadata"),
        ("empty", "has no checkpoint in it: there is no .metadata"),
    ):
        with pytest.raises(ArgumentError, match=message):
            load({"x": 1}, folder / name)
    for where in (folder / "file", folder / "file" / "in it"):
        with pytest.raises(ArgumentError, match=r"file is a file; a checkpoint needs a folder"):
            save({"x": 1}, where)
    with pytest.raises(ArgumentError, match=r"folder must be a path; got dict\. The order is save"):
        save(folder, {"x": 1})
    with pytest.raises(ArgumentError, match="async_ must be"):
        save({"x": 1}, folder, async_=1)
    return True


def test_no_folder(worlds, tmp_path):
    assert worlds.run(2, no_folder, tmp_path) == [True, True]
    with pytest.raises(ArgumentError, match=r"^checkpoint.read: there is no folder"):
        read(tmp_path / "none")
    with pytest.raises(GroupError, match="not initialised"):
        save({"x": 1}, tmp_path, group=5)


AS_NOBODY = """
import os, sys
from pathlib import Path
import torch
from varcomm import ArgumentError
from varcomm.checkpoint import load, read, save
folder = Path(sys.argv[1])
save({"x": 1}, folder)
os.chmod(folder, 0o555)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
for number in range(2):
    try:
        save({"x": 2}, folder / ("deeper" * number))
    except ArgumentError as error:
        print(error)
print(read(folder), sorted(os.listdir(folder))[0], len(os.listdir(folder)))
if os.getuid() == 0:
    os.seteuid(0)
os.chmod(folder / ".metadata", 0o000)
if os.getuid() == 0:
    os.seteuid(65534)
try:
    load({"x": 1}, folder)
except ArgumentError as error:
    print(error)
"""


def test_a_folder_without_permission(tmp_path):
    os.chmod(tmp_path, 0o777)
    for path in tmp_path.parents[:2]:
        os.chmod(path, 0o755)
    folder = tmp_path / "here"
    command = [sys.executable, "-c", AS_NOBODY, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].endswith(f"{folder} cannot be written to: there is no permission in {folder}.")
    assert said[1].endswith(f"cannot be written to: there is no permission in {folder}.")
    assert said[2] == "{'x': 1} .metadata 3"
    assert f"{folder / '.metadata'} cannot be read: [Errno 13] Permission denied" in said[3]


def saved_at_last(state, folder, async_):
    pending = save(state, folder, async_=async_)
    if async_:
        pending.wait()


def full(rank, folder, async_):
    """Files may not become longer than they are here, on one of the ranks."""
    x = torch.zeros(200_000)
    if rank == 1:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(ArgumentError) as caught:
            saved_at_last({f"x{n}": x for n in range(4)}, folder, async_)
        how = " with async_=True" if async_ else ""
        said = re.sub(r"[0-9a-f]{32}", "*", str(caught.value))
        assert said == (
            f"checkpoint.save to {folder}{how}: refused on rank 1 of 2: [Errno 27] File too large: "
            "'__1_*_0.distcp'"
        )
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
    save({"after": torch.ones(3)}, folder / "other")  # ranks are in step
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("async_", [False, True])
def test_a_full_disk(worlds, tmp_path, async_):
    save({"before": 1}, tmp_path)
    names = sorted([*(path.name for path in tmp_path.iterdir()), "other"])
    assert worlds.run(2, full, tmp_path, async_) == [names, names]
    assert read(tmp_path) == {"before": 1}
