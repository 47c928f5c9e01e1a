"""
Overlap communication with computation
======================================

Your program waits for data from other ranks, although it could already compute with its own rows.
This tutorial counts the messages of a program, sends data while the program computes, and checks
the overlap in a trace of torch's profiler. The tutorial takes 15 minutes. You need to know that a
collective returns when its data has arrived (:doc:`first tutorial <01_uneven_shards>`).
"""

# %%
# Count messages and bytes
# ------------------------
#
# Two ranks hold uneven shards of a table. Each rank computes with its own rows and then with the
# rows of both ranks. In this first version, communication does not overlap with computation.
# :func:`varcomm.trace` counts this rank's messages and bytes, forward and backward.

import json
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import varcomm as vc

SIZES = [4000, 1000]  # rows of 256 numbers
READING = 0.1  # seconds


def make_shard(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(SIZES[rank], 256, generator=generator)
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(9)) / 16
    return x.requires_grad_(), weight.requires_grad_()


def own_rows(x, weight):
    for _ in range(8):
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
# In forward, rank 0 sends its rows and receives the rows of rank 1. The adjoint of the gather is a
# reduce-scatter, which sends the same bytes in the reverse direction. Bytes are exact, because
# varcomm does not pad. Look for calls that you did not expect: removing a call saves more time than
# overlapping it.
#
# Start, compute, wait
# --------------------
#
# With ``async_op=True`` a call returns a :class:`varcomm.Handle` at once, and ``handle.wait()``
# returns the result. Code between the call and ``wait()`` runs while data is in flight. The two
# versions below differ only in the place of ``wait()``.
#
# ``record_function`` names parts of the program in the trace. Rank 1 is late, because it reads a
# file first (a ``sleep`` here). Rank 0 therefore waits for rank 1, and not only for the network.


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
# Trace both versions
# -------------------
#
# torch's profiler writes one file per rank. `Perfetto <https://ui.perfetto.dev>`_ displays it.
# Inside :func:`varcomm.trace`, the file contains varcomm's calls by name. Four kinds of entries
# show overlap:
#
# - ``varcomm::all_gather_v``: the time to *start* the call;
# - ``gloo:broadcast`` and others: the engine, here Gloo, moves data in its own threads;
# - ``_Wait``: this rank waits for the result; in backward, the wait is inside ``_StartBackward``;
# - ``own rows``, ``backward`` and others: computations of the program.
#
# A barrier makes ranks begin together, because the profiler may start later on one rank. Ranks on
# one host share a clock, so the picture below has one time axis for both ranks. Other programs on
# the machine disturb a single measurement. The code below therefore measures both versions five
# times, alternately, and shows the pair with the median gain.

NAMES = {"reading", "own rows", "all rows", "backward", "_Wait"}


def traced(rank, overlap):
    """Return name, begin and duration (in seconds) of one step's entries."""
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


def duration_of(found):
    """Return the duration of a step on its slowest rank."""
    return max(
        last for entries in found for name, _, last in entries if name == "step"
    )


def saved(pair):
    return duration_of(pair[0]) - duration_of(pair[1])


pairs = [(ranks.run(traced, False), ranks.run(traced, True)) for _ in range(5)]
ranks.close()
pair = sorted(pairs, key=saved)[2]  # the median of five
print(f"overlap saves {1000 * saved(pair):.0f} ms")
# sphinx_gallery_start_ignore
assert saved(pair) > 0
# sphinx_gallery_end_ignore

versions = dict(zip(["wait at once", "compute, then wait"], pair, strict=True))
for name, found in versions.items():
    for rank, entries in enumerate(found):
        whole = sum(duration for what, _, duration in entries if what == "step")
        waited = sum(duration for what, _, duration in entries if what == "_Wait")
        times = f"step {1000 * whole:4.0f} ms, waited {1000 * waited:4.0f} ms"
        print(f"{name:18}  rank {rank}: {times}")

# %%
# These times are from the machine that built this page, which may have run other programs as well.
# In the picture each rank has two lanes: its program and its engine.

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

INK, PALE = vc._figures.INK, vc._figures.PALE
LOOKS = {
    "reading": ("reading", vc._figures.LAND),
    "own rows": ("own rows", vc._figures.CURVES[0]),
    "all rows": ("all rows", vc._figures.CURVES[2]),
    "backward": ("backward", vc._figures.CURVES[1]),
    "_Wait": ("waiting", "#ccbb44"),
}
ENGINE = "#66ccee"
plt.rcParams |= vc._figures.style()


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
    2, 1, sharex=True, figsize=(7.2, 5.4), layout="constrained"
)
for ax, (name, found) in zip(axes, versions.items(), strict=True):
    draw(ax, found)
    ax.set_title(name, weight="bold")
axes[1].set_xlabel("time since the step began (ms)")
axes[1].set_xlim(0, None)
patches = [Patch(color=colour, label=label) for label, colour in LOOKS.values()]
patches.append(Patch(color=ENGINE, label="in flight"))
figure.legend(handles=patches, loc="outside lower center", ncols=3)
plt.show()
# sphinx_gallery_end_ignore

# %%
# Read the trace
# --------------
#
# In the upper picture, the program of rank 0 waits until rank 1 has read its file. In the lower
# picture, rank 0 computes its own rows while rank 1 reads, and the engine of rank 0 waits.
#
# Backward overlaps as well, without a change in the code. Autograd runs in reverse order: it
# *starts* the adjoint at the place where forward called ``wait()``, and waits for the adjoint at
# the place where forward started the call. The last bar of each engine is the reduce-scatter.
#
# Overlap has two limits. If one rank computes longer than the other ranks, they still wait at the
# end. On CPUs the engine needs a core, so overlap saves little time if all cores compute.
#
# Summary
# -------
#
# - Count calls, messages and bytes first.
# - Start a call with ``async_op=True`` when its data is ready, and call ``wait()`` when the result
#   is needed. Place independent work between the call and ``wait()``. Backward then overlaps too.
# - All ranks start and wait in the same order. Do not change an input between start and wait.
#
# ``ShardedGradients`` overlaps by default: it sums gradients during backward (:doc:`/gradients`).
# Next: :doc:`run on a cluster </generated/tutorials/09_cluster>`. Reference: :doc:`/sharp_bits`.
