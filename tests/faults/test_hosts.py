"""Training on two hosts, while somebody pulls at the cable."""

import json
import re
import sys
import time

import pytest

from tests.faults.hosts import Hosts, NotPermitted
from tests.faults.training import train

STEPS, LIMIT = 40, 6.0


@pytest.fixture
def hosts():
    try:
        with Hosts() as made:
            yield made
    except NotPermitted as reason:
        pytest.skip(str(reason))


def alone(rank, folder):
    found = []
    train(folder, STEPS, 0, lambda step, loss: found.append(loss))
    return found


class Run:
    """One agent of torchrun on each host, with a rank each."""

    def __init__(self, hosts, folder):
        self._folder, self._logs = folder, [folder / f"{host}.log" for host in (0, 1)]
        meet = f"{hosts.address(0)}:29400"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--nproc-per-node=1", "--max-restarts=4", "--rdzv-id=varcomm"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", "--monitor-interval=0.2"]
        program = ["-m", "tests.faults.training", folder, STEPS, LIMIT, 0.2]
        self._agents = [
            hosts.start(
                host,
                [
                    *torchrun,
                    f"--local-addr={hosts.address(host)}",
                    f"--rdzv-conf=is_host={host == 0}",  # which it could not tell by names
                    *map(str, program),
                ],
                self._logs[host],
            )
            for host in (0, 1)
        ]

    def losses(self):
        """All losses that were told, in the order of their telling."""
        path = self._folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    def said(self):
        return [log.read_text() for log in self._logs]

    def errors(self):
        """How many errors of varcomm's each host has seen."""
        pattern = r"^(?:\[rank\d\]: )?varcomm\.errors\.CommunicationError: "
        return [len(re.findall(pattern, text, re.MULTILINE)) for text in self.said()]

    def wait_until(self, fulfilled, seconds):
        """Seconds until something is so."""
        began = time.monotonic()
        while not fulfilled():
            assert time.monotonic() - began < seconds, "\n".join(self.said())[-6000:]
            time.sleep(0.1)
        return time.monotonic() - began

    def ended(self):
        return [agent.poll() for agent in self._agents]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cable_is_slow_and_then_cut(worlds, hosts, tmp_path):
    """Each time all say so within the limit; torchrun starts again, to the same losses."""
    wanted = worlds.run(1, alone, tmp_path / "alone")[0]
    run = Run(hosts, tmp_path)
    run.wait_until(lambda: len(run.losses()) > 7, 90)
    for times, harm in ((1, hosts.slow), (2, hosts.cut)):
        count = len(run.losses())
        harm()
        # some seconds in which a rank asks where others are, and ends
        run.wait_until(lambda times=times: min(run.errors()) >= times, LIMIT + 15)
        hosts.mend()
        run.wait_until(lambda count=count: len(run.losses()) > count + 7, 90)
    run.wait_until(lambda: None not in run.ended(), 60)
    assert run.ended() == [0, 0], "\n".join(run.said())[-6000:]
    told = run.losses()
    assert {step for step, _ in told} == set(range(STEPS))
    assert len(told) > STEPS, "some were done again"
    for step, loss in told:
        assert loss == pytest.approx(wanted[step], rel=1e-9, abs=0)
