"""
Sharded gradients and checkpoints
=================================

With Adam, gradients and optimizer states take three times the memory of your parameters, and your
next job may get fewer GPUs. This tutorial trains with gradients and optimizer states that are
sharded over ranks. Three ranks save a checkpoint. Two ranks resume from this checkpoint, and so
does one process without ranks. Both runs continue with the same losses. The tutorial takes 15
minutes. You need to know ``torch.optim`` and ``state_dict``.
"""

# %%
# Memory per parameter
# --------------------
#
# Adam stores two numbers per parameter, and backward stores a gradient. Together with the parameter
# itself, a rank stores four numbers per parameter. :class:`varcomm.data_parallel.ShardedGradients`
# keeps all parameters on every rank and shards gradients and Adam's numbers, as ZeRO does. Each
# rank owns a *piece* of them, and pieces may be uneven. Here the first of three ranks has more
# memory than the other two, so its piece is larger.

import tempfile
from pathlib import Path

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
# Training on ranks and in one process
# ------------------------------------
#
# Each step draws a batch of 50 rows. All ranks draw the same batch, from generators in the same
# state. Each rank uses its part of the batch: 17, 17 and 16 rows on three ranks. The loss of a rank
# is its part of the mean over all 50 rows, so gradients are *summed* over ranks.
#
# One dict, ``state``, holds everything that a resumed run needs. ``state`` contains the module and
# the optimizer instead of their state dicts, because the optimizer records which piece this rank
# owns.

BATCH = 50


def advance(state, optimizer, rank=0, size=1):
    """Make one step, and return this rank's part of the loss."""
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
# One process trains with plain AdamW, for comparison. Three ranks train for 80 steps, and save a
# checkpoint after 40 steps.

STEPS, SAVED = 80, 40

net = make_net()
adam = make_adam(net.parameters())
state = make_state(net, adam)
alone = {step: advance(state, adam).item() for step in range(1, STEPS + 1)}

on_three = vc.launch(train_on_ranks, 3, STEPS, SAVED, False, PIECES)
for rank, (_, numbers) in enumerate(on_three):
    owned = f"rank {rank} owns {PIECES[rank]:4} elements"
    print(f"{owned}, and its Adam stores {numbers:4} numbers")

# %%
# Files of a checkpoint
# ---------------------
#
# A checkpoint is a folder of tensors, stored in the pieces that the ranks held. Saving never
# assembles a full tensor. ``read`` returns full tensors in any process:

saved = read(folder)
print(*sorted(path.name for path in folder.iterdir()), sep="\n")
print("step", saved["step"])
for name, tensor in saved["net"].items():
    print(f"{name:9}  {tuple(tensor.shape)}")

# %%
# Resume on two ranks
# -------------------
#
# ``train_on_ranks`` now runs on two ranks, with balanced pieces. ``load`` fills ``state`` in place.
# Each rank reads only the rows that it needs.

on_two = vc.launch(train_on_ranks, 2, STEPS, None, True)
print(
    [
        f"{numbers} numbers on rank {rank}"
        for rank, (_, numbers) in enumerate(on_two)
    ]
)

# %%
# Resume in one process
# ---------------------
#
# Optimizer states are saved by parameter name. A plain optimizer in a plain script can therefore
# load these states. The next code runs in one process, without ``vc.init()``.

net = make_net()
adam = make_adam(net.parameters())
state = make_state(net, adam)
load(state, folder)
resumed = {
    step: advance(state, adam).item()
    for step in range(state["step"] + 1, STEPS + 1)
}

# %%
# Compare the losses
# ------------------

runs = {"three ranks": on_three[0][0], "two ranks, resumed": on_two[0][0]}
runs["one process, resumed"] = resumed
differences = {
    name: {
        step: abs(loss - alone[step]) / alone[step] for step, loss in losses.items()
    }
    for name, losses in runs.items()
}
for name, found in differences.items():
    steps = f"steps {min(found):2} to {max(found)}"
    print(f"{name:21} {steps}: losses within {max(found.values()):.0e}")

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt

INK, PALE = vc._figures.INK, vc._figures.PALE
LOOKS = {
    "three ranks": (vc._figures.CURVES[0], "o", 0),
    "two ranks, resumed": (vc._figures.CURVES[1], "s", 1),
}
LOOKS["one process, resumed"] = (vc._figures.CURVES[2], "^", 3)
plt.rcParams |= vc._figures.style()

figure, (above, below) = plt.subplots(
    2,
    1,
    sharex=True,
    figsize=(7.2, 5.6),
    height_ratios=[2, 1],
    layout="constrained",
)
above.semilogy(
    list(alone),
    list(alone.values()),
    color=INK,
    lw=1.2,
    label="one process",
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
above.set(ylabel="loss of the batch (log scale)")
above.set_title("Loss on three ranks, two and one", weight="bold")
below.set(
    ylabel="relative\ndifference",
    xlabel="step",
    xlim=(0, STEPS + 1),
    ylim=(4e-18, 1e-10),
)
below.set_yticks([1e-16, 1e-14, 1e-12, 1e-10])
below.set_title("Difference from one process (zeros at the bottom)")
plt.show()
# sphinx_gallery_end_ignore

# %%
# The losses differ by rounding, because ranks add the same numbers in another order. A bug that
# appears on 48 ranks can therefore be studied on two ranks.
#
# Summary
# -------
#
# - Each rank's loss is its part of the total loss, and gradients are summed over ranks. If the
#   total number of rows is unknown before the step, divide the gradients by a
#   :class:`varcomm.data_parallel.GlobalCount`.
# - Put modules, optimizers, generators and counters into one dict. ``save`` the dict on any number
#   of ranks, and ``load`` it on any other number of ranks. If a rank is killed during a save,
#   the previous checkpoint remains valid.
# - Draw random numbers that all ranks share from generators in the same state, and save these
#   generators.
#
# Next: :doc:`overlap </generated/tutorials/08_overlap>`. Reference: :doc:`/gradients` and
# :doc:`/checkpoints`.
