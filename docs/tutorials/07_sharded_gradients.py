"""
Sharded gradients, and checkpoints on another number of ranks
=============================================================

You will learn to train with gradients and optimizer states that are shared out over ranks, to save
in the middle of it on three ranks, and to go on with two, or with one process that knows nothing of
ranks, on the same loss curve. You need to know ``torch.optim`` and what a ``state_dict`` is.
"""

# %%
# What takes the memory
# ---------------------
#
# Adam keeps two numbers for each parameter, and backward leaves a gradient: with the parameter
# itself that makes four. :class:`varcomm.data_parallel.ShardedGradients` leaves parameters whole on
# every rank, and gives each rank a *piece* of the rest. Pieces need not be equal: here the first of
# three ranks has more memory than the others.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import varcomm as vc
from varcomm.checkpoint import load, read, save
from varcomm.data_parallel import ShardedGradients

PIECES = [800, 300, 85]  # elements that each of three ranks owns
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name, "checkpoint")

torch.manual_seed(0)
x = 2 * torch.rand(200, 2, dtype=torch.float64) - 1
y = torch.sin(3 * x[:, :1]) * x[:, 1:]


def make_net():
    torch.manual_seed(1)  # the same on every rank
    layers = (
        nn.Linear(2, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 1),
    )
    return nn.Sequential(*layers).double()


def make_adam(parameters):
    return torch.optim.AdamW(parameters, lr=2e-2)


print(sum(parameter.numel() for parameter in make_net().parameters()), "parameters")

# %%
# The training, once for ranks and once for one process
# -----------------------------------------------------
#
# Each step draws a batch of 50 rows. All ranks draw the same one, from generators in the same
# state, and each takes its own rows of it: 17, 17 and 16 on three ranks. The loss of a rank is its
# part of the mean over all 50, so gradients have to be *summed*.
#
# Everything that decides how training goes on is in one dict, ``state``. Modules and optimizers are
# in it themselves, not their ``state_dict()``: the optimizer knows which piece it has.

BATCH = 50


def advance(state, optimizer, rank=0, size=1):
    """Make one step; the loss of the whole batch."""
    batch = torch.randint(len(x), (BATCH,), generator=state["draws"])
    mine = batch[vc.ShardSizes.balanced(BATCH, size).range(rank)]
    loss = (state["net"](x[mine]) - y[mine]).square().sum() / BATCH
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    return loss.detach()


def make_state(net, optimizer):
    draws = torch.Generator().manual_seed(2)
    return {"net": net, "optimizer": optimizer, "draws": draws, "step": 0}


def train_on_ranks(rank, steps, save_at=None, resume=False, sizes="balanced"):
    size = vc.init().size
    net = make_net()
    optimizer = ShardedGradients(net, make_adam, sizes=sizes, reduce="sum")
    state = make_state(net, optimizer)
    if resume:
        load(state, folder)
    losses = {}
    while state["step"] < steps:
        part = advance(state, optimizer, rank, size)
        losses[state["step"]] = vc.all_reduce(part).item()
        if state["step"] == save_at:
            save(state, folder)
    held = optimizer.optimizer.state.values()
    numbers = sum(
        v.numel() for of_piece in held for v in of_piece.values() if v.dim() > 0
    )
    return losses, numbers


# %%
# First in one process, with plain AdamW, for comparison. Then on three ranks, which save after 40
# of 80 steps and train on.

STEPS, SAVED = 80, 40

net = make_net()
adam = make_adam(net.parameters())
state = make_state(net, adam)
alone = {step: advance(state, adam).item() for step in range(1, STEPS + 1)}

on_three = vc.launch(train_on_ranks, 3, STEPS, SAVED, False, PIECES)
for rank, (_, numbers) in enumerate(on_three):
    print(
        f"rank {rank} owns {PIECES[rank]:4} elements, and Adam keeps {numbers:4} numbers there"
    )

# %%
# What lies in the folder
# -----------------------
#
# A checkpoint is one folder of whole tensors, cut as they were on ranks. No rank has ever put them
# together. ``read`` does so in any process, without ranks:

saved = read(folder)
print(*sorted(path.name for path in folder.iterdir()), sep="\n")
print("step", saved["step"])
for name, tensor in saved["net"].items():
    print(f"{name:9}  {tuple(tensor.shape)}")

# %%
# On two ranks
# ------------
#
# The same function, on two ranks and with balanced pieces. ``load`` takes the same ``state`` and
# fills it in place; each rank reads what it needs.

on_two = vc.launch(train_on_ranks, 2, STEPS, None, True)
print(
    [
        f"{numbers} numbers on rank {rank}"
        for rank, (_, numbers) in enumerate(on_two)
    ]
)

# %%
# In one process
# --------------
#
# States are saved by the names of parameters. So a plain optimizer in a plain script can take them
# as well; nothing here has joined any ranks.

net = make_net()
adam = make_adam(net.parameters())
state = make_state(net, adam)
load(state, folder)
resumed = {
    step: advance(state, adam).item()
    for step in range(state["step"] + 1, STEPS + 1)
}

# %%
# The same curve
# --------------

runs = {"three ranks": on_three[0][0], "two ranks, resumed": on_two[0][0]}
runs["one process, resumed"] = resumed
differences = {
    name: {
        step: abs(loss - alone[step]) / alone[step] for step, loss in losses.items()
    }
    for name, losses in runs.items()
}
for name, found in differences.items():
    first, last = min(found), max(found)
    print(
        f"{name:21} steps {first:2} to {last}: losses within {max(found.values()):.0e}"
    )

# sphinx_gallery_start_ignore
INK, PALE = "#22272b", "#8a9299"
LOOKS = {
    "three ranks": ("#56b4e9", "o", 0),
    "two ranks, resumed": ("#e69f00", "s", 1),
}
LOOKS["one process, resumed"] = ("#cc79a7", "^", 3)
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

figure, (above, below) = plt.subplots(
    2, 1, sharex=True, figsize=(8, 6), height_ratios=[2, 1], layout="constrained"
)
above.semilogy(
    list(alone),
    list(alone.values()),
    color=INK,
    lw=1.2,
    label="one process, all along",
)
for name, (colour, marker, first) in LOOKS.items():
    steps = [step for step in runs[name] if step % 4 == first]
    losses = [runs[name][step] for step in steps]
    above.semilogy(steps, losses, marker, color=colour, markersize=6, label=name)
    steps = list(differences[name])
    floor = [max(differences[name][step], 1e-17) for step in steps]
    below.semilogy(steps, floor, marker, color=colour, markersize=3)
for ax in (above, below):
    ax.axvline(SAVED + 0.5, color=PALE, lw=1, ls="--", zorder=0)
above.text(
    SAVED - 0.5,
    above.get_ylim()[0],
    "saved on three ranks",
    ha="right",
    va="bottom",
)
above.legend(frameon=False, loc="upper right")
above.set(ylabel="loss of the batch")
above.set_title(
    "One curve on three ranks, two and one", loc="left", weight="bold", fontsize=12
)
below.set(
    ylabel="relative\ndifference",
    xlabel="step",
    xlim=(0, STEPS + 1),
    ylim=(4e-18, 1e-10),
)
below.set_yticks([1e-16, 1e-14, 1e-12, 1e-10])
below.set_title(
    "Difference from one process; 0 is drawn at the bottom", loc="left", fontsize=11
)
# sphinx_gallery_end_ignore
plt.show()

# %%
# Losses differ by the rounding of sums that are added up in another order, and stay together. That
# is more than learning equally well: a bug that shows up on 48 ranks can be looked for on two.
#
# What to take away
# -----------------
#
# - ``ShardedGradients(model, factory, sizes=...)`` takes the place of the optimizer. Parameters
#   stay whole; gradients and states are in pieces of any sizes, also of none.
# - Let the loss of each rank be its part of the whole, and sum. Where ranks count rows that nobody
#   knows beforehand, divide by a :class:`varcomm.data_parallel.GlobalCount`.
# - Put modules, optimizers, generators and counters into one dict; ``save`` it on any number of
#   ranks and ``load`` it on any other. A save that is killed leaves the checkpoint before it.
# - Draw what concerns all ranks from generators in the same state, and save these.
#
# Read next: :doc:`/gradients` and :doc:`/checkpoints`. Then
# :doc:`overlap, and reading a trace </generated/tutorials/08_overlap>`.
