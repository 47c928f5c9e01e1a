"""A rank is killed, stopped, cut off, or fails: the others say which one, within the time limit."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.faults.stage import LIMIT

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
        if one["threads"]:
            return f"rank {rank} has threads left: {one['threads']}"
        message = one["message"]
        if fault == "close":  # on one side as on the other
            if "so all have come to it, and the network" not in message:
                return f"rank {rank} does not say that the network failed: {message}"
            continue
        named = rf"\brank {culprit} (not come to it, or gone|ended with \w+: )"
        store = "the store in which ranks met has ended"
        if not (re.search(named, message) or (culprit == "0" and store in message)):
            return f"rank {rank} does not name rank {culprit}: {message}"
        ends = {"fail": "KeyError: 'something of the user's'", "exhaust": "RuntimeError: "}
        if culprit != "0" and ends.get(fault, "") not in message.replace('"', "'"):
            return f"rank {rank} does not say how rank {culprit} ended: {message}"
    return ""


@pytest.mark.parametrize("scene", SCENES)
def test_the_others_say_who_is_gone(played, scene):
    wrong = problem(scene, played[scene])
    assert not wrong, wrong
