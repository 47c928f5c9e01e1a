"""A rank is killed, stopped, cut off, or fails: the others say which one, within the time limit."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.judging import problem

# Each fault once, each place once; `make fuzz` plays them all.
SCENES = (
    "kill in forward on 1 after 0 rounds",
    "kill in backward on 0 after 0 rounds",
    "stop in backward on 1 after 0 rounds",
    "close in plan on 1 after 1 rounds",
    "exhaust in checkpoint on 1 after 1 rounds",
    "fail in partition on 1 after 0 rounds",
)


@pytest.fixture(scope="module")
def played():
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.stage", *SCENES],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("scene", SCENES)
def test_the_others_say_who_is_gone(played, scene):
    wrong = problem(scene, played[scene])
    assert not wrong, wrong
