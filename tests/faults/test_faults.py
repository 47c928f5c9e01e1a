"""A rank is killed, stopped, cut off, or fails: the others name it within the timeout."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.faults.stage import LIMIT

FIRST = ("kill in forward on 1 after 0 rounds", "fail in partition on 1 after 0 rounds")
SCENES = (  # each fault once, each place once; `make fuzz` plays all combinations
    "kill in backward on 0 after 0 rounds",
    "stop in backward on 1 after 0 rounds",
    "close in plan on 1 after 1 rounds",
    "exhaust in checkpoint on 1 after 1 rounds",
)


def problem(scene, told):
    """Say what is wrong about what the others have told, if anything is."""
    fault, _, _, _, culprit, *_ = scene.split()
    for rank, one in told.items():
        if "kind" not in one or not one["ended"]:
            return f"rank {rank} has not raised, or not ended: {one}"
        if one["kind"] != "CommunicationError":
            return f"rank {rank} has raised {one}"
        if one["seconds"] > LIMIT + 5:
            return f"rank {rank} has taken {one['seconds']} s"
        # torch's store has no time limit of its own: who asks one that is stopped cannot be ended
        asks = scene.startswith("stop") and culprit == "0" and len(one["threads"]) == 1
        if one["threads"] and not (asks and one["threads"][0].endswith("(asking)")):
            return f"rank {rank} has threads left: {one['threads']}"
        message = one["message"]
        if fault == "close" and "so all have come to it, and the network" in message:
            continue  # if not, the rank that is cut off has not noticed yet
        named = rf"\brank {culprit} (not come to it, gone, or cut off|ended with \w+: )"
        store = "the store in which ranks met has ended"
        if not (re.search(named, message) or (culprit == "0" and store in message)):
            return f"rank {rank} does not name rank {culprit}: {message}"
        ends = {"fail": "KeyError: 'something of the user's'", "exhaust": "RuntimeError: "}
        if culprit != "0" and ends.get(fault, "") not in message.replace('"', "'"):
            return f"rank {rank} does not say how rank {culprit} ended: {message}"
    return ""


def play(scenes):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.stage", *scenes],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for scene, errors in map(json.loads, done.stdout.splitlines()):
        wrong = problem(scene, errors)
        assert not wrong, f"{scene}: {wrong}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenes", [FIRST, pytest.param(SCENES, marks=pytest.mark.slow)])
def test_the_others_name_the_rank(scenes):
    play(scenes)
