"""A rank is killed, stopped, cut off, or fails: the others name it within the timeout."""

import json

import pytest

from tests.faults.stage import problem
from tests.transport.processes import finished

FIRST = ("kill in forward on 1 after 0 rounds", "fail in partition on 1 after 0 rounds")
SCENES = (  # each fault once, each place once; `make fuzz` plays all combinations
    "kill in backward on 0 after 0 rounds",
    "stop in backward on 1 after 0 rounds",
    "close in plan on 1 after 1 rounds",
    "kill in migrate on 1 after 1 rounds",
    "exhaust in checkpoint on 1 after 1 rounds",
    "fail in writer on 2 after 0 rounds",
    "kill in loader on 1 after 5 rounds",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenes", [FIRST, pytest.param(SCENES, marks=pytest.mark.slow)])
def test_the_others_name_the_rank(scenes):
    done = finished("-m", "tests.faults.stage", *scenes, timeout=200)
    assert done.returncode == 0, done.stderr
    played = dict(map(json.loads, done.stdout.splitlines()))
    assert {scene: problem(scene, said) for scene, said in played.items()} == dict.fromkeys(
        scenes, ""
    )
