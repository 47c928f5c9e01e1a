"""
Find the rank that hangs
========================

Your job hangs, and you don't know which rank is the cause. This tutorial runs a program in which
one rank makes a mistake: it passes another size, skips a call, or raises an exception. You see the
error that each mistake causes, with :func:`varcomm.debug` and without it. The tutorial takes 15
minutes. You need to know that all ranks must make the same calls (:doc:`first tutorial
<01_uneven_shards>`).
"""

# %%
# Symptom and command
# -------------------
#
# If a program hangs, run it again with ``VARCOMM_DEBUG=1``. All ranks then raise one error that
# names the call and the line of code on each rank.
#
# A program with three mistakes
# -----------------------------
#
# Three ranks hold two rows each. A step gathers the rows, sums a count over all ranks with
# ``all_reduce``, and calls ``backward``, which communicates too. Rank 1 or 2 makes one of three
# mistakes:
#
# - *another size*: rank 1 holds three rows, and the other ranks expect two;
# - *a skipped call*: rank 2 skips the ``all_reduce``;
# - *an exception*: a file is missing on rank 1, in the middle of the step.

import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from datetime import timedelta
from pathlib import Path

import torch

import varcomm as vc


def step(rank, mistake, log, group=None):
    sizes = [2, 2, 2]
    if mistake == "another size" and rank == 1:
        sizes = [2, 3, 2]
    x = torch.ones(sizes[rank], 4, requires_grad=True)
    log.append(f"all_gather_v {sizes}")
    whole = vc.all_gather_v(x, sizes, group=group)

    if mistake == "an exception" and rank == 1:
        log.append("KeyError")
        raise KeyError("no such file")

    if not (mistake == "a skipped call" and rank == 2):
        log.append("all_reduce")
        vc.all_reduce(torch.tensor(1.0), group=group)

    log.append("reduce_scatter_v (backward)")
    whole.square().mean().backward()


# %%
# Inside ``debug()``
# ------------------
#
# Inside ``with vc.debug():`` ranks compare each call before its data moves. All ranks enter the
# block together. ``timeout`` is the time in seconds that ranks wait for a missing rank.


def debugged(rank, mistake):
    log = []
    group = torch.distributed.new_group()  # one per run: a run may close it
    try:
        with vc.debug(timeout=3):
            step(rank, mistake, log, group)
    except Exception as error:
        return log, f"{type(error).__name__}: {error}"
    return log, "nothing is wrong"


def show(message):
    """Print a message without folders, in lines that fit the page."""
    for folder in set(re.findall(r"\S*/(?=\w+\.py)", message)):
        padding = " " * len(folder)
        message = message.replace(folder, "").replace(f"at{padding}", "at")
    for line in message.splitlines():
        lines = textwrap.wrap(line, 84, subsequent_indent="    ")
        print("\n".join(lines) if len(line) > 84 else line)


ranks = vc.Ranks(3)
show(ranks.run(debugged, "none")[0][1])

# %%
# In the run with *another size*, all ranks raise the same error at once. The error names the ranks
# that differ, the argument and the line.

another_size = ranks.run(debugged, "another size")
show(another_size[0][1])
print(
    "\nThe same on all ranks:", len({message for _, message in another_size}) == 1
)

# %%
# In the run with *a skipped call*, rank 2 reaches its next call while the other ranks are still in
# the call that rank 2 skipped. The lines show the skipped call, an ``all_reduce`` inside an ``if``.
# Rank 2 is in *backward*, and the table shows the line that called ``backward``.

skipped = ranks.run(debugged, "a skipped call")
show(skipped[0][1])

# %%
# In the run with *an exception*, rank 1 is missing. The other ranks wait until the timeout, then
# print the last call of rank 1 and its exception.

an_exception = ranks.run(debugged, "an exception")
show(an_exception[0][1])

# %%
# The picture shows the calls of each rank in order. The call that differs has a red frame:

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

COLOURS = {
    "all_gather_v": "#d7e3f4",
    "all_reduce": "#fbe7cf",
    "reduce_scatter_v": "#d8ede6",
}
ODD = vc._figures.WRONG
plt.rcParams |= vc._figures.style()


def draw(ax, title, logs):
    for place, column in enumerate(zip(*logs, strict=True)):
        usual = max(column, key=column.count)
        for rank, call in enumerate(column):
            box = FancyBboxPatch(
                (place, rank - 0.36), 0.92, 0.72, "round,pad=0,rounding_size=0.05"
            )
            colour = COLOURS.get(call.split()[0], "white")
            box.set(facecolor=colour, lw=0)
            if call != usual:
                box.set(edgecolor=ODD, lw=2.5)
            ax.add_patch(box)
            ink = vc._figures.INK if colour == "white" else "black"
            middle = {"ha": "center", "va": "center", "color": ink}
            ax.text(place + 0.46, rank, call, **middle)
    ax.set(xlim=(-0.05, 2), ylim=(2.5, -0.5), xticks=[])
    ax.set_yticks(range(3), [f"rank {rank}" for rank in range(3)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, weight="bold")


runs = {
    "another size": another_size,
    "a skipped call": skipped,
    "an exception": an_exception,
}
figure, axes = plt.subplots(len(runs), 1, figsize=(7.2, 6.6), layout="constrained")
for ax, (title, found) in zip(axes, runs.items(), strict=True):
    draw(ax, title, [log for log, _ in found])
plt.show()
# sphinx_gallery_end_ignore

# %%
# A skipped call without debug()
# ------------------------------
#
# ``debug()`` adds a round of small messages per call, so it is a tool for development. Without
# ``debug()``, a call waits until the timeout of its group: 600 s, unless you pass
# ``vc.init(timeout=...)``. After the timeout, the error names the call and the ranks that failed in
# it. Here the timeout is 3 s:


def not_debugged(rank, mistake):
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    try:
        step(rank, mistake, [], group)
    except vc.CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is wrong"


for message in ranks.run(not_debugged, "a skipped call"):
    show(message)
    print()

# %%
# Each rank's message shows a part of the cause. With ``debug()``, one message shows the full cause.
#
# Another size without debug()
# ----------------------------
#
# A rank checks its own arguments, such as a tensor whose rows do not match ``sizes``, and raises an
# ``ArgumentError`` before it sends. Here each rank's arguments are valid, but they differ between
# ranks. Gloo receives more bytes than it expects and aborts the process. :class:`varcomm.Ranks`
# reports the abort.

# sphinx_gallery_start_ignore
# The abort prints to the terminal that builds this page.
ranks.run(lambda rank: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
# sphinx_gallery_end_ignore
try:
    ranks.run(not_debugged, "another size")
except vc.LaunchError as error:
    show(f"{type(error).__name__}: {str(error).splitlines()[0]}")
ranks.close()

# %%
# This message does not name the call, but the error of ``debug()`` does. Set ``VARCOMM_DEBUG=1``
# for a program that you cannot edit.
#
# An exception without debug()
# ----------------------------
#
# In a real job the ``KeyError`` ends the process of rank 1. The connections of rank 1 close, so the
# other ranks fail at once, and read the exception of rank 1 from the store. This run needs three
# separate processes, as torchrun starts them. The output is the last line of each process:

PROGRAM = """
import torch, varcomm as vc

world = vc.init(timeout=20)
vc.all_reduce(torch.tensor(1.0))
if world.rank == 1:
    raise KeyError("no such file")
vc.all_reduce(torch.tensor(1.0))
"""

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "program.py")
    path.write_text(PROGRAM)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, path],
            env=os.environ | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for rank, process in enumerate(processes):
        written = process.communicate()[1].strip().splitlines()
        show(f"rank {rank}, exit code {process.returncode}: {written[-1]}")
        print()

# %%
# Summary
# -------
#
# - If a program hangs, run it with ``VARCOMM_DEBUG=1``, or put ``with vc.debug():`` around the part
#   that you suspect. The table names the call, the ranks and the lines.
# - Look for collectives inside an ``if``. All ranks make the same calls in the same order, even if
#   they have no rows to send. ``backward`` is one of these calls.
# - Set ``vc.init(timeout=...)`` to the longest time that a rank may compile or read data while the
#   other ranks wait.
# - Do not catch the exception of a rank that fails. The other ranks then end within seconds and
#   print the reason.
#
# Next: :doc:`all timeouts and messages </failures>` and :doc:`sharp bits </sharp_bits>`.
