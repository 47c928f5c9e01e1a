"""Draw atoms by the rank that owned them first, migrations, and energies."""

from pathlib import Path
from typing import Any

from argon import System
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

INK = "#22272b"
PALETTE = ["#3f6fa3", "#e3a446", "#5f9e76", "#b9586c", "#7f70b3", "#4fa9b8", "#a27a55", "#93a04a"]


def draw(
    path: Path, systems: dict[str, System], found: dict[str, Any], ranks: int, timestep: float
) -> None:
    """Save a picture, in the format of the suffix, of the runs of systems by name."""
    with rc_context({"font.size": 12, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(13, 6.4), dpi=100, facecolor="white", layout="constrained")
        grid = figure.add_gridspec(1, 2, width_ratios=(1.25, 1))
        left = grid[0].subgridspec(3, 1).subplots()
        owner, melt = found["melt"].first_owner, systems["melt"]
        _atoms(left[0], "Melt at the start", melt.cell, melt.pos, owner, ranks)
        for ax, name in zip(left[1:], ("crystal", "melt"), strict=True):
            title = f"{name.capitalize()} at the end, by the first rank of each atom"
            _atoms(ax, title, systems[name].cell, found[name].last, owner, ranks)
        right = grid[1].subgridspec(2, 1).subplots(sharex=True)
        for colour, (name, one) in zip((PALETTE[4], PALETTE[3]), found.items(), strict=True):
            history = one.history
            time = [step * timestep / 1000 for step in range(len(history))]
            total = history[:, :2].sum(1)
            right[0].step(time, history[:, 2], color=colour, linewidth=2, label=name, where="post")
            right[1].plot(time, 1e6 * (total - total[0]), color=colour, linewidth=1.2, label=name)
        right[0].set_ylabel("migrated atoms")
        right[0].set_title("Atoms that changed their rank, so far", loc="left")
        right[1].set(xlabel="time, ps", ylabel="µeV per atom", xlim=(0, time[-1]))
        right[1].set_title("Change of the total energy", loc="left")
        for panel in right:
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _atoms(ax: Axes, name: str, cell: Tensor, pos: Tensor, owner: Tensor, ranks: int) -> None:
    """Draw a layer of atoms seen along z, and the borders between ranks."""
    sides = cell.diagonal()
    pos = pos % sides
    shown = pos[:, 2] < sides[2] / 2
    width, height = sides[:2].tolist()
    for rank in range(ranks):
        x, y, _ = pos[shown & (owner == rank)].T
        ax.scatter(x, y, s=30, color=PALETTE[rank % len(PALETTE)], linewidths=0)
        if rank:
            ax.axvline(width * rank / ranks, color=INK, linestyle="--", linewidth=1)
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal", xlabel="x, Å", ylabel="y, Å")
    ax.set_title(name, loc="left")
