"""Training on two hosts whose connection slows down and breaks.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces. Each has
an agent of torchrun with one rank, which runs this file.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import varcomm
from varcomm.checkpoint import load, save
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition

STEPS, LIMIT = 40, 6.0
EVERY = 5  # steps between two checkpoints


def train(folder, pause, done):
    """Train from the last checkpoint, and call `done` with each step and its loss."""
    draws = torch.Generator().manual_seed(0)
    edge_index = torch.randint(40, (2, 200), generator=draws)
    x = torch.rand(40, 3, generator=draws, dtype=torch.float64)
    data = Data(edge_index=edge_index, x=x, y=x.sum(1, keepdim=True).sin())
    torch.manual_seed(0)
    graph = partition(data, method="block")
    model = distribute(pyg.GraphConv(3, 1).double(), graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (folder / "checkpoint").exists():
        load(state, folder / "checkpoint")
    for step in range(state["step"], STEPS):
        optimizer.zero_grad()
        loss = graph.mean((model(graph.x, graph.edge_index) - graph.y).square())
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        done(step, loss.item())
        time.sleep(pause)
        if (step + 1) % EVERY == 0:
            state["step"] = step + 1
            save(state, folder / "checkpoint")


def main(folder):
    torch.set_num_threads(1)
    world = varcomm.init("gloo", timeout=LIMIT)

    def done(step, loss):
        if world.rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(json.dumps([step, loss]) + "\n")

    train(folder, 0.2, done)


def ip(*words, command="ip"):
    subprocess.run([command, *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, ``10.77.0.1`` and ``10.77.0.2``, whose interface is called ``cable``."""

    def __init__(self, folder):
        self.names = [f"varcomm-{os.getpid()}-{host}" for host in (0, 1)]
        self.cable = ["-n", self.names[0], "qdisc", "{}", "dev", "cable", "root"]
        self.folder, self.agents = folder, []

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            ends = "peer", "name", "cable", "netns", self.names[1]
            ip("-n", self.names[0], "link", "add", "cable", "type", "veth", *ends)
            for host, name in enumerate(self.names):
                ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "cable")
                for interface in ("lo", "cable"):
                    ip("-n", name, "link", "set", interface, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"needs namespaces of the network, ip and tc: {error}")
        for host, name in enumerate(self.names):
            address = f"10.77.0.{host + 1}"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += ["--nproc-per-node=1", "--max-restarts=4", "--rdzv-id=varcomm"]
            torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400"]
            torchrun += ["--monitor-interval=0.2", f"--local-addr={address}"]
            torchrun += [f"--rdzv-conf=is_host={host == 0}"]  # names of hosts do not show it
            with self.log(host).open("w") as log:
                agent = subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun, "-m", __name__, self.folder],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            self.agents.append(agent)
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def log(self, host):
        return self.folder / f"{host}.log"

    def cut(self):
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def slow(self):
        """Let 1 kbit per second through: a message takes minutes."""
        how = ["tbf", "rate", "1kbit", "burst", "1600", "limit", "10000000"]
        ip(*(word.format("add") for word in self.cable), *how, command="tc")

    def repair(self):
        with contextlib.suppress(subprocess.CalledProcessError):
            ip(*(word.format("del") for word in self.cable), command="tc")
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def losses(self):
        path = self.folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    def errors(self):
        """Return the lowest number of errors that a rank has raised."""
        pattern = r"^(?:\[rank\d\]: )?varcomm\.errors\.CommunicationError: "
        return min(len(re.findall(pattern, self.log(h).read_text(), re.M)) for h in (0, 1))

    def wait_until(self, fulfilled, seconds):
        began = time.monotonic()
        while not fulfilled():
            assert time.monotonic() - began < seconds, self.log(0).read_text()[-6000:]
            time.sleep(0.1)


def alone(rank, folder):
    found = []
    train(folder, 0, lambda step, loss: found.append(loss))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cable_is_slow_and_then_cut(worlds, tmp_path):
    """Both ranks raise within the limit each time; torchrun starts again, to the same losses."""
    wanted = worlds.run(1, alone, tmp_path / "alone")[0]
    with Hosts(tmp_path) as hosts:
        hosts.wait_until(lambda: len(hosts.losses()) > 7, 90)
        for times, harm in ((1, hosts.slow), (2, hosts.cut)):
            count = len(hosts.losses())
            harm()
            # some seconds in which a rank asks where others are, and ends
            hosts.wait_until(lambda times=times: hosts.errors() >= times, LIMIT + 15)
            hosts.repair()
            hosts.wait_until(lambda count=count: len(hosts.losses()) > count + 7, 90)
        hosts.wait_until(lambda: None not in [agent.poll() for agent in hosts.agents], 60)
        assert [agent.returncode for agent in hosts.agents] == [0, 0]
        losses = hosts.losses()
    assert {step for step, _ in losses} == set(range(STEPS))
    assert len(losses) > STEPS, "some steps were repeated"
    for step, loss in losses:
        assert loss == pytest.approx(wanted[step], rel=1e-9, abs=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
