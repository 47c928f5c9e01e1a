"""
Finding a hang
==============

You will learn what becomes of a program in which one rank does something else than the others: it
passes another size, leaves out a call, or ends by an exception. You will see what each looks like
with :func:`varcomm.debug` and without it. You need to know that a collective needs all its ranks,
which is why one that stays away makes the others wait.
"""

# %%
# A program, and three mistakes
# -----------------------------
#
# Three ranks hold two rows each. A step gathers them, counts something over all ranks, and calls
# ``backward``, which communicates too. Rank 1 or 2 may make one of three mistakes; each is of a
# kind that real programs have:
#
# - *another size*: rank 1 has dropped a row of its own, and tells nobody;
# - *a call left out*: rank 2 counts only where there is something to count;
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

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch

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

    if not (mistake == "a call left out" and rank == 2):
        log.append("all_reduce")
        vc.all_reduce(torch.tensor(1.0), group=group)

    log.append("reduce_scatter_v (backward)")
    whole.square().mean().backward()


# %%
# Inside ``debug()``
# ------------------
#
# ``with vc.debug():`` makes ranks compare each call before its data move. All enter it together.
# Its ``timeout`` says for how long they wait for one that does not come; a few seconds will do
# here.


def debugged(rank, mistake):
    log = []
    group = (
        torch.distributed.new_group()
    )  # for each run its own: one may end closed
    try:
        with vc.debug(timeout=3):
            step(rank, mistake, log, group)
    except Exception as error:
        return log, f"{type(error).__name__}: {error}"
    return log, "nothing is wrong"


def show(message):
    """Print it in lines of the width of a page, without the folders of this machine."""
    for folder in set(re.findall(r"\S*/(?=\w+\.py)", message)):
        message = message.replace(folder, "").replace(
            "at" + " " * len(folder), "at"
        )
    for line in message.splitlines():
        whole = re.sub(
            r", (?=\d+[],])", ",\N{NO-BREAK SPACE}", line
        )  # lists of numbers
        print(
            textwrap.fill(whole, 100, subsequent_indent="    ")
            if len(line) > 100
            else line
        )


ranks = vc.Ranks(3)
show(ranks.run(debugged, "none")[0][1])

# %%
# Another size. All ranks raise the same error, at once, and it says who differs in what, and in
# which line:

another_size = ranks.run(debugged, "another size")
show(another_size[0][1])
print(
    "\nThe same on all ranks:", len({message for _, message in another_size}) == 1
)

# %%
# A call left out. Rank 2 comes to its next call while the others are still at the one before it.
# The lines tell which call that is: here the ``all_reduce`` that stands within an ``if``. Note that
# rank 2 is in *backward*, at the line that calls it.

left_out = ranks.run(debugged, "a call left out")
show(left_out[0][1])

# %%
# An exception. Rank 1 never comes, so the others wait until their time is over, and look up where
# it was last and what it left with:

an_exception = ranks.run(debugged, "an exception")
show(an_exception[0][1])

# %%
# What each rank called, in its order; what does not fit is marked:

# sphinx_gallery_start_ignore
COLOURS = {
    "all_gather_v": "#a9d8f4",
    "all_reduce": "#f2cf80",
    "reduce_scatter_v": "#a6dccb",
}
INK, PALE, ODD = "#22272b", "#8a9299", "#d55e00"
plt.rcParams |= {"font.size": 11, "figure.facecolor": "white", "text.color": INK}


def draw(ax, title, logs):
    for place, column in enumerate(zip(*logs, strict=True)):
        usual = max(column, key=column.count)
        for rank, call in enumerate(column):
            box = FancyBboxPatch(
                (place, rank - 0.36), 0.92, 0.72, "round,pad=0,rounding_size=0.05"
            )
            box.set(facecolor=COLOURS.get(call.split()[0], "white"), lw=0)
            if call != usual:
                box.set(edgecolor=ODD, lw=2.5)
            ax.add_patch(box)
            text = call.replace(" ", "\n", 1)
            ax.text(place + 0.46, rank, text, ha="center", va="center", size=9)
    ax.set(xlim=(-0.05, 2), ylim=(2.5, -0.5), xticks=[])
    ax.set_yticks(range(3), [f"rank {rank}" for rank in range(3)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, loc="left", weight="bold", fontsize=12)


runs = {
    "another size": another_size,
    "a call left out": left_out,
    "an exception": an_exception,
}
figure, axes = plt.subplots(
    1, len(runs), figsize=(11, 2.7), sharey=True, layout="constrained"
)
for ax, (title, found) in zip(axes, runs.items(), strict=True):
    draw(ax, title, [log for log, _ in found])
# sphinx_gallery_end_ignore
plt.show()

# %%
# Without it: a call left out
# ---------------------------
#
# Comparing costs a round of small messages a call, so ``debug()`` is for looking, not for training.
# Outside of it a call waits until the time limit of its group is over, 600 s unless you pass
# ``vc.init(timeout=...)``. Then it says what it was, and who has come to it. A group with a limit
# of 3 s shows that sooner:


def not_debugged(rank, mistake):
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    try:
        step(rank, mistake, [], group)
    except vc.CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is wrong"


for message in ranks.run(not_debugged, "a call left out"):
    show(message)
    print()

# %%
# Ranks 0 and 1 failed in one call and rank 2 in another: side by side, the messages tell the story,
# although none of them knows all of it. With ``debug()`` you would have had it in one.
#
# Without it: another size
# ------------------------
#
# What one rank can tell by itself, such as a tensor that does not have the rows that ``sizes``
# says, is an ``ArgumentError`` on that rank before anything is sent. Here each rank's arguments are
# fine and only do not fit those of the others. Then it is the engine that notices, or nobody. Gloo
# gets more bytes than it expects, and ends the whole process; :class:`varcomm.Ranks` says so.

try:
    ranks.run(not_debugged, "another size")
except vc.LaunchError as error:
    show(f"{type(error).__name__}: {str(error).splitlines()[0]}")
ranks.close()

# %%
# That is the case for which ``debug()`` pays most: nothing in this line tells which call it was.
# Set ``VARCOMM_DEBUG=1`` for a whole program that you cannot edit.
#
# Without it: an exception
# ------------------------
#
# In a real job nobody catches that ``KeyError``, and the process of rank 1 ends by it. Its
# connections close, the others hear of it, and learn why from what it has left in the store. For
# this we need three processes of our own, as torchrun would start them. This is
# the last line that each has written:

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
        said = process.communicate()[1].strip().splitlines()
        show(f"rank {rank}, exit code {process.returncode}: {said[-1]}")
        print()

# %%
# What to take away
# -----------------
#
# - A program that hangs: run it with ``VARCOMM_DEBUG=1``, or put ``with vc.debug():`` around the
#   part that you suspect. The table names call, ranks and lines.
# - Collectives within an ``if`` are the usual suspects. Each rank has to call the same ones in the
#   same order, with nothing to send as well; ``backward`` is one of them.
# - Give ``vc.init(timeout=...)`` as long as ranks may have to wait for each other, where one of
#   them compiles or reads, and not ten times that.
# - A rank that fails should end, so let it raise: the others then end within seconds, and say why.
#
# Read next: :doc:`/failures`, with all limits and what each message means, and :doc:`/sharp_bits`.
