"""A rank is killed, stopped, cut off, or fails: the others name it within the timeout."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.stage import problem

FIRST = ("kill in forward on 1 after 0 rounds", "fail in partition on 1 after 0 rounds")
SCENES = (  # each fault once, each place once; `make fuzz` plays all combinations
    "kill in backward on 0 after 0 rounds",
    "stop in backward on 1 after 0 rounds",
    "close in plan on 1 after 1 rounds",
    "kill in migrate on 1 after 1 rounds",
    "exhaust in checkpoint on 1 after 1 rounds",
    "fail in writer on 2 after 0 rounds",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenes", [FIRST, pytest.param(SCENES, marks=pytest.mark.slow)])
def test_the_others_name_the_rank(scenes):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.stage", *scenes],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    played = dict(map(json.loads, done.stdout.splitlines()))
    assert {scene: problem(scene, said) for scene, said in played.items()} == dict.fromkeys(
        scenes, ""
    )
