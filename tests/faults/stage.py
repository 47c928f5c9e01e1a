"""Three ranks, one of which fails, and the errors of the others: one line of JSON per scene.

python -m tests.faults.stage "kill in forward on 1 after 0 rounds"

Without arguments all scenes run. Ranks are forked from this process, which has imported everything.
"""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import varcomm
from varcomm import ExchangePlan
from varcomm.checkpoint import save
from varcomm.graph import NeighborLoader, PartitionedGraph, RowWriter, distribute, partition
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import resolve

RANKS = 3
LIMIT = 5.0  # seconds, of the world's collectives


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def close():
    """Shut the connections to other ranks, but not that to the store."""
    for name in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with own:
            try:
                _, port, *_ = own.getpeername()
            except (OSError, ValueError):
                continue
            if str(port) != os.environ["MASTER_PORT"]:
                own.shutdown(socket.SHUT_RDWR)


def exhaust():
    # not torch's RuntimeError: raised inside an engine's call, it counts as a failure of the engine
    raise MemoryError("no memory left")


def fail():
    raise KeyError("something of the user's")


FAULTS = {fault.__name__: fault for fault in (kill, stop, close, exhaust, fail)}


def graph():
    ring = torch.arange(12)
    data = Data(edge_index=torch.stack([ring, ring.roll(1)]), x=torch.rand(12, 3))
    return partition(data, method="block")


def forward():
    here = graph()
    model = distribute(pyg.GCNConv(3, 2), here)
    return lambda: model(here.x, here.edge_index)


def backward():
    here = graph()
    loss = distribute(pyg.GCNConv(3, 2), here)(here.x, here.edge_index).sum()
    return loss.backward


def plan():
    sizes, rank = [4] * RANKS, dist.get_rank()
    needed = torch.tensor([other for other in range(12) if other // 4 != rank])
    return lambda: ExchangePlan.from_needed(needed, sizes)


def checkpoint():
    folder = Path(os.environ["SCENE"]) / "checkpoint"
    return lambda: save({"w": torch.rand(5)}, folder)


def migrate():
    here = graph()
    folder = Path(os.environ["SCENE"]) / "graph"
    here.save(folder)
    other = torch.full((here.num_owned,), (dist.get_rank() + 1) % RANKS)

    def call():
        try:
            here.migrate(other)
        finally:
            # the old part is intact; one process reads what was saved before
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            saved = PartitionedGraph.load(folder, alone)
            assert torch.equal(saved.x[here.owned_ids], here.x)

    return call


def loader():
    batches = NeighborLoader(graph(), [1, 1], 2)
    return lambda: [*batches]


def writer():
    here = graph()
    writer = RowWriter(Path(os.environ["SCENE"]) / "out.npy", here, 1, (3,))

    def call():
        with writer as out:
            out.write(0, here.x)

    return call


PLACES = {
    "forward": forward,
    "backward": backward,
    "plan": plan,
    "partition": lambda: graph,
    "migrate": migrate,
    "checkpoint": checkpoint,
    "writer": writer,
    "loader": loader,
}


def befall(fault, rounds):
    """Let a fault happen on this rank at the start of a later round of messages."""
    left = rounds
    engine = type(engine_for(resolve(None), torch.device("cpu")))  # every group has its own

    prepare = engine.prepare

    def counted(self, route):
        start = prepare(self, route)

        def begin(out, data):
            nonlocal left
            left -= route.schedule != "broadcast"
            if left == -1:
                FAULTS[fault]()
            return start(out, data)

        return begin

    engine.prepare = counted
    resolve(None).calls.clear()  # prepared before


def act(rank, fault, place, culprit, rounds):
    """Run one rank of a scene, and write its error."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    varcomm.init("gloo", timeout=LIMIT)
    call = PLACES[place]()
    varcomm.all_reduce(torch.ones(1))
    if rank == culprit:
        befall(fault, rounds)
    began = time.monotonic()
    try:
        call()
        # a rank whose messages had all arrived fails in the next call
        varcomm.all_gather_v(torch.zeros(2), [2] * RANKS)
    except Exception as error:
        seconds = time.monotonic() - began
        # the thread of a loader is idle, and ends with the process
        idle = ("MainThread", "graph.NeighborLoader")
        threads = [t.name for t in threading.enumerate() if not t.name.startswith(idle)]
        said = {"kind": type(error).__name__, "message": str(error)}
        said |= {"seconds": seconds, "threads": threads}
        (Path(os.environ["SCENE"]) / f"{rank}.json").write_text(json.dumps(said))
        raise


def start(rank, folder, port, scene):
    """Fork one rank."""
    if child := os.fork():
        return child
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "SCENE": folder}
    with open(f"{folder}/{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        act(rank, *scene)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as at the end of a program
        os._exit(1)
    os._exit(0)


def play(fault, place, culprit, rounds):
    """Start the ranks, end those that are left, and return the error and end of each."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        scene = fault, place, culprit, rounds
        ranks = {rank: start(rank, folder, port, scene) for rank in range(RANKS)}
        ended, deadline = set(), time.monotonic() + 2 * LIMIT + 10
        others = set(ranks) - {culprit}
        while not others <= ended and time.monotonic() < deadline:
            for rank in set(ranks) - ended:
                if os.waitpid(ranks[rank], os.WNOHANG)[0]:
                    ended.add(rank)
            time.sleep(0.02)
        for rank in set(ranks) - ended:
            os.kill(ranks[rank], signal.SIGKILL)
            os.waitpid(ranks[rank], 0)
        said = {}
        for rank in sorted(others):
            path, log = (Path(folder) / f"{rank}.{kind}" for kind in ("json", "log"))
            said[rank] = json.loads(path.read_text()) if path.exists() else {"log": log.read_text()}
            said[rank]["ended"] = rank in ended
        return said


def problem(scene, said):
    """Return the defect in the errors of the other ranks, or ""."""
    fault, _, _, _, culprit, *_ = scene.split()
    for rank, one in said.items():
        if one.get("kind") != "CommunicationError" or not one["ended"]:
            return f"rank {rank} has not raised a CommunicationError, or not ended: {one}"
        if one["seconds"] > LIMIT + 5:
            return f"rank {rank} has taken {one['seconds']} s"
        # torch's store has no timeout: a thread that asks a stopped process cannot be ended
        asks = scene.startswith("stop") and culprit == "0" and len(one["threads"]) == 1
        if one["threads"] and not (asks and one["threads"][0].endswith("(ask)")):
            return f"rank {rank} has threads left: {one['threads']}"
        message = one["message"]
        if fault == "close" and "so all have come to it, and the network" in message:
            continue  # otherwise, the rank that is cut off has not noticed yet
        named = rf"\brank {culprit} (not come to it, gone, or cut off|ended with \w+: )"
        store = "the store in which ranks met has ended"
        if not (re.search(named, message) or (culprit == "0" and store in message)):
            return f"rank {rank} does not name rank {culprit}: {message}"
        ends = {"fail": "KeyError: 'something of the user's'", "exhaust": "MemoryError: "}
        if culprit != "0" and ends.get(fault, "") not in message.replace('"', "'"):
            return f"rank {rank} does not say how rank {culprit} ended: {message}"
    return ""


def scenes():
    """Return every fault in every place, before the first round and between two."""
    every = [f"{fault} in {place} on 1" for fault in FAULTS for place in PLACES]
    every += [f"{fault} in {place} on 0" for fault in FAULTS for place in ("forward", "checkpoint")]
    return [f"{scene} after {rounds} rounds" for scene in every for rounds in (0, 1)]


if __name__ == "__main__":
    for scene in sys.argv[1:] or scenes():
        fault, _, place, _, culprit, _, rounds, _ = scene.split()
        print(json.dumps([scene, play(fault, place, int(culprit), int(rounds))]), flush=True)
