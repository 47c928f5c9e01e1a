"""
Overlap, and reading a trace
============================

You will learn to count what your program sends, to let data travel while the program computes, and
to see in a trace of torch's profiler whether it does. You need to know that a collective call
returns when its data have arrived, and that this is what we want to avoid.
"""

# %%
# What is sent
# ------------
#
# Two ranks hold uneven shards of a table. Each computes something with its own rows, and then needs
# a few values of all of them. First without any overlap, and without a clock:
# :func:`varcomm.trace` counts messages and bytes on this rank, forward and backward.

import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity, profile, record_function

import varcomm as vc

SIZES = [3000, 2000]  # rows of 256 numbers
READING = 0.03  # seconds


def make_shard(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(SIZES[rank], 256, generator=generator)
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(9)) / 16
    return x.requires_grad_(), weight.requires_grad_()


def own_rows(x, weight):
    for _ in range(4):
        x = torch.tanh(x @ weight)
    return x


def count(rank):
    x, weight = make_shard(rank)
    with vc.trace() as calls:
        whole = vc.all_gather_v(x, SIZES)
        (own_rows(x, weight).square().mean() + whole.square().mean()).backward()
    return str(calls)


ranks = vc.Ranks(2)
print(ranks.run(count)[0])

# %%
# Rank 0 sends its own rows forward, and receives those of rank 1. In backward, the adjoint of a
# gather is a reduce-scatter: the same bytes travel the other way. Bytes are exact, as there is no
# padding. If a table like this one shows calls that you did not expect, look there first: a call
# that is not made is faster than one that overlaps.
#
# Start, compute, wait
# --------------------
#
# With ``async_op=True`` a call returns a :class:`varcomm.Handle` at once, and ``handle.wait()``
# gives the result. What stands between the two runs while data travel. So the two versions below
# differ in one thing: where they wait.
#
# ``record_function`` gives names to parts of our own program, for the trace. To have something to
# wait for, rank 1 is late: it reads a file before it begins, for which a sleep stands here. Ranks
# wait for each other, and not for the network alone.


def step(rank, x, weight, overlap):
    if rank == 1:
        with record_function("reading"):
            time.sleep(READING)
    handle = vc.all_gather_v(x, SIZES, async_op=True)
    if not overlap:
        whole = handle.wait()
    with record_function("own rows"):
        own = own_rows(x, weight)
    if overlap:
        whole = handle.wait()
    with record_function("all rows"):
        loss = own.square().mean() + whole.square().mean()
    with record_function("backward"):
        loss.backward()


# %%
# A trace of each
# ---------------
#
# torch's profiler writes a file for each rank, which `Perfetto <https://ui.perfetto.dev>`_ shows.
# Inside :func:`varcomm.trace`, varcomm's calls are in it by name. Four kinds of entries show all
# about overlap:
#
# ================================== ==============================================================
# entry                              what it is
# ================================== ==============================================================
# ``varcomm::all_gather_v``          the call, as long as it takes to *start* it
# ``gloo:broadcast``, ...            the engine, here Gloo, in its own threads: data on their way
# ``_Wait``                          this rank waits; in backward, within ``_StartBackward``
# ours: ``own rows``, ``backward``   what the program computes
# ================================== ==============================================================
#
# A barrier makes ranks begin together, so that a start of the profiler that takes longer on one of
# them is not taken for something else. On one host all ranks have the same clock.

NAMES = {"reading", "own rows", "all rows", "backward", "_Wait"}


def traced(rank, overlap):
    """Return the entries of one step: name, begin and duration in seconds."""
    x, weight = make_shard(rank)
    step(rank, x, weight, overlap)  # the first step also sets up connections
    with profile(activities=[ProfilerActivity.CPU]) as seen, vc.trace():
        torch.distributed.barrier()
        with record_function("step"):
            step(rank, x, weight, overlap)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"rank{rank}.json")
        seen.export_chrome_trace(str(path))
        written = json.loads(path.read_text())
    entries = [e for e in written["traceEvents"] if e["ph"] == "X"]
    begin = next(e["ts"] for e in entries if e["name"] == "step")
    return [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in entries
        if e["ts"] >= begin
        and (e["name"] in NAMES | {"step"} or e["name"].startswith("gloo:"))
    ]


versions = {
    "wait at once": ranks.run(traced, False),
    "compute, then wait": ranks.run(traced, True),
}
ranks.close()

for name, found in versions.items():
    for rank, entries in enumerate(found):
        whole = sum(duration for what, _, duration in entries if what == "step")
        waited = sum(duration for what, _, duration in entries if what == "_Wait")
        times = f"step {1000 * whole:4.0f} ms, waited {1000 * waited:4.0f} ms"
        print(f"{name:18}  rank {rank}: {times}")

# %%
# What has been measured is this run, on this machine, which may have had other things to do. The
# picture shows where the time went. Each rank has two lanes: its program, and its engine.

# sphinx_gallery_start_ignore
INK, PALE = "#22272b", "#8a9299"
LOOKS = {
    "reading": ("reading", "#c9ced3"),
    "own rows": ("own rows", "#56b4e9"),
    "all rows": ("all rows", "#009e73"),
    "backward": ("backward", "#b7dcf3"),
    "_Wait": ("waiting", "#d55e00"),
}
ENGINE = "#cc79a7"
plt.rcParams |= {
    "font.size": 11,
    "axes.edgecolor": PALE,
    "figure.facecolor": "white",
}
plt.rcParams |= {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
}


def draw(ax, found):
    zero = min(
        begin for entries in found for what, begin, _ in entries if what == "step"
    )
    for rank, entries in enumerate(found):
        for what, begin, duration in sorted(
            entries, key=lambda entry: entry[0] == "_Wait"
        ):
            place = (1000 * (begin - zero), 1000 * duration)
            if what in LOOKS:
                ax.broken_barh(
                    [place], (2.2 * rank - 0.45, 0.9), color=LOOKS[what][1], lw=0
                )
            elif what.startswith("gloo:"):
                ax.broken_barh(
                    [place], (2.2 * rank + 0.55, 0.35), color=ENGINE, lw=0
                )
    ticks = [
        place for rank in range(2) for place in (2.2 * rank, 2.2 * rank + 0.72)
    ]
    ax.set_yticks(ticks, ["rank 0, program", "engine", "rank 1, program", "engine"])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(3.4, -0.7)


figure, axes = plt.subplots(
    2, 1, sharex=True, figsize=(9, 5.6), layout="constrained"
)
for ax, (name, found) in zip(axes, versions.items(), strict=True):
    draw(ax, found)
    ax.set_title(name, loc="left", weight="bold", fontsize=12)
axes[1].set_xlabel("milliseconds since the step began")
axes[1].set_xlim(0, None)
patches = [Patch(color=colour, label=label) for label, colour in LOOKS.values()]
patches.append(Patch(color=ENGINE, label="on its way"))
figure.legend(
    handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=10
)
# sphinx_gallery_end_ignore
plt.show()

# %%
# How to read it
# --------------
#
# Above, the program of rank 0 waits until rank 1 has read its file. Nothing is computed, although
# its own rows need nobody else. Below, it computes them while its engine waits in its place.
#
# Look at backward, too. autograd goes the other way: at the place of ``wait()`` it *starts* the
# adjoint, and at the place of the call it waits for it. So what overlapped in forward overlaps in
# backward, without a line of code: the last bar of each engine is the reduce-scatter.
#
# What overlap cannot do: a rank that has more to compute than the others remains the one for which
# they wait in the end. And on CPUs the engine needs a core for its own work, so where all cores
# compute there may be little to gain.
#
# What to take away
# -----------------
#
# - Count first, with :func:`varcomm.trace`: calls, messages and bytes, by operation and by peer.
# - ``async_op=True`` where data are ready, ``wait()`` where they are needed, and between the two
#   what does not need them. Backward then overlaps by itself.
# - All ranks start and wait in the same order; what was passed must not be changed in between.
# - In a trace, look for long ``_Wait``. If the engine's entry begins long before that of another
#   rank, it is the other rank that came late.
#
# ``ShardedGradients`` has this built in: it sums gradients during backward (:doc:`/gradients`).
# Read next: :doc:`/sharp_bits`, then :doc:`from a laptop to a cluster
# </generated/tutorials/09_cluster>`.
