"""Training on two hosts whose connection slows down and breaks.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.training import train

STEPS, LIMIT = 40, 6.0


class NotPermitted(RuntimeError):
    """Network namespaces cannot be made here."""


class Hosts:
    """Two namespaces, ``10.77.0.1`` and ``10.77.0.2``, whose interface is called ``cable``."""

    def __init__(self):
        self._names = [f"varcomm-{os.getpid()}-{host}" for host in (0, 1)]
        self._processes = []

    def __enter__(self):
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise NotPermitted("needs ip and tc, of iproute2")
        first, second = self._names
        try:
            for name in self._names:
                _ip("netns", "add", name)
            ends = "name", "cable", "netns", second
            _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", *ends)
            for host, name in enumerate(self._names):
                _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotPermitted(f"needs namespaces of the network: {error.stderr}") from error
        return self

    def __exit__(self, *_):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def start(self, host, command, log, **environment):
        own = {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", **environment}
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def cut(self):
        _ip("-n", self._names[0], "link", "set", "cable", "down")

    def slow(self):
        # 1 kbit per second: a message takes minutes
        where = ["-n", self._names[0], "qdisc", "add", "dev", "cable", "root"]
        how = ["tbf", "rate", "1kbit", "burst", "1600", "limit", "10000000"]
        subprocess.run(["tc", *where, *how], check=True, capture_output=True, text=True)

    def mend(self):
        where = ["-n", self._names[0], "qdisc", "del", "dev", "cable", "root"]
        subprocess.run(["tc", *where], check=False, capture_output=True)
        _ip("-n", self._names[0], "link", "set", "cable", "up")


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


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
        path = self._folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    def said(self):
        return [log.read_text() for log in self._logs]

    def errors(self):
        pattern = r"^(?:\[rank\d\]: )?varcomm\.errors\.CommunicationError: "
        return [len(re.findall(pattern, text, re.MULTILINE)) for text in self.said()]

    def wait_until(self, fulfilled, seconds):
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
