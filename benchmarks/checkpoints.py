"""Save and load a sharded state: varcomm.checkpoint beside torch.distributed.checkpoint.

Both save the same uneven shards into new files, in turns, and sync the files. Seconds are of the
slowest rank, CPU seconds are the sum over ranks. Loads find the files in the page cache.
"""

import argparse
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import measuring
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import varcomm as vc
from varcomm.checkpoint import load, save
from varcomm.sharding import Sharded, ShardSpec

COLUMNS = 1024


def state_of(rank, ranks, megabytes, tensors, fill):
    """Return shards of fp32 tensors; rank 0 has half as many rows as each other rank."""
    rows = megabytes * 250_000 // (tensors * COLUMNS)
    sizes = [rows // (2 * ranks - 1)] + [0] * (ranks - 1)
    for other in range(1, ranks):
        rest = rows - sizes[0]
        sizes[other] = rest // (ranks - 1) + (other <= rest % (ranks - 1))
    spec = ShardSpec.of(sizes if ranks > 1 else [rows])
    made = (torch.full((spec.local, COLUMNS), fill + number) for number in range(tensors))
    return {f"w{number}": Sharded.of(tensor, spec) for number, tensor in enumerate(made)}


def timed(call):
    """Return seconds and CPU seconds of all threads of this rank."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


def measure(rank, folder, ranks, megabytes, tensors, repeats):
    """Return seconds and CPU seconds by contender, turn by turn, on this rank."""
    warnings.simplefilter("ignore")
    state = state_of(rank, ranks, megabytes, tensors, 1.0)
    target = state_of(rank, ranks, megabytes, tensors, 0.0)
    ours, theirs = Path(folder) / "varcomm", Path(folder) / "dcp"
    calls = {
        "save varcomm": partial(save, state, ours),
        "save dcp": partial(dcp.save, state, checkpoint_id=theirs),
        "load varcomm": partial(load, target, ours),
        "load verify=False": partial(load, target, ours, verify=False),
        "load dcp": partial(dcp.load, target, checkpoint_id=theirs),
    }
    seconds = {name: [] for name in calls}
    for turn in range(-2, repeats):
        for name in measuring.turns_of(calls, 1 if turn < 0 else turn):
            found = timed(calls[name])
            if turn >= 0:  # the first turns fill caches and free pages
                seconds[name].append(found)
    for name, tensor in target.items():
        assert torch.equal(tensor.local, state[name].local), name
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the files go, and are removed; default: temporary")
    options = measuring.arguments(parser, ranks=3, megabytes=2000, tensors=40, repeats=5)
    folder = tempfile.mkdtemp(prefix="varcomm-checkpoints-", dir=options.folder)
    free, needed = shutil.disk_usage(folder).free, 5_000_000 * options.megabytes
    try:
        if free < needed:
            raise SystemExit(f"{folder} has {free >> 20} MiB; {needed >> 20} MiB are needed.")
        sizes = options.ranks, options.megabytes, options.tensors, options.repeats
        found = vc.launch(measure, options.ranks, folder, *sizes)
    finally:
        shutil.rmtree(folder)
    wall, cpu = (
        {name: [[turn[kind] for turn in rank[name]] for rank in found] for name in found[0]}
        for kind in (0, 1)
    )
    slowest = {name: measuring.slowest(of) for name, of in wall.items()}
    rows = []
    for name, seconds in slowest.items():
        work = median([sum(turn) for turn in zip(*cpu[name], strict=True)])
        ratio = measuring.spread(seconds, slowest[f"{name.split()[0]} dcp"])
        rows.append([name, f"{median(seconds):.2f}", f"{work:.2f}", ratio])
    print(f"{options.megabytes} MB in {options.tensors} tensors, {options.ranks} ranks")
    measuring.table(["", "seconds", "CPU seconds", "of dcp (quartiles)"], rows)


if __name__ == "__main__":
    main()
