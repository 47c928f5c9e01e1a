"""Draw atoms by the rank that owned them first, migrations, and energies."""

import sys
from pathlib import Path
from typing import Any

from argon import System
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(
    path: Path, systems: dict[str, System], found: dict[str, Any], ranks: int, timestep: float
) -> None:
    """Save a picture, in the format of the suffix, of the runs of systems by name."""
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 5.2), layout="constrained")
        grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.1))
        melt, crystal = found["melt"], found["crystal"]
        panels = {
            "Melt at the start,\nby rank": ("melt", systems["melt"].pos),
            "Crystal at the end,\nby first rank": ("crystal", crystal.last),
            "Melt at the end,\nby first rank": ("melt", melt.last),
        }
        for column, (title, (name, pos)) in enumerate(panels.items()):
            ax = figure.add_subplot(grid[0, 2 * column : 2 * column + 2])
            _atoms(ax, title, systems[name].cell, pos, found[name].first_owner, ranks)
        colours = enumerate(figures.rank_colours(ranks))
        marks = [Patch(color=colour, label=f"rank {rank}") for rank, colour in colours]
        figure.legend(handles=marks, loc="outside upper left", ncols=ranks, handlelength=1)
        below = [figure.add_subplot(grid[1, :3]), figure.add_subplot(grid[1, 3:])]
        for colour, (name, one) in zip(
            (figures.CURVES[0], figures.CURVES[1]), found.items(), strict=True
        ):
            history = one.history
            time = [step * timestep / 1000 for step in range(len(history))]
            total = history[:, :2].sum(1)
            below[0].step(time, history[:, 2], color=colour, label=name, where="post")
            below[1].plot(time, 1e6 * (total - total[0]), color=colour, linewidth=1.2, label=name)
        below[0].set(xlabel="time (ps)", ylabel="atoms", xlim=(0, time[-1]))
        below[0].set_title("Atoms that changed rank")
        below[1].set(xlabel="time (ps)", ylabel="µeV per atom", xlim=(0, time[-1]))
        below[1].set_title("Change of the total energy")
        for panel in below:
            panel.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)


def _atoms(ax: Axes, name: str, cell: Tensor, pos: Tensor, owner: Tensor, ranks: int) -> None:
    """Draw a layer of atoms seen along z, and the borders between ranks."""
    sides = cell.diagonal()
    pos = pos % sides
    shown = pos[:, 2] < sides[2] / 3
    width, height = sides[:2].tolist()
    for rank in range(ranks):
        x, y, _ = pos[shown & (owner == rank)].T
        ax.scatter(x, y, s=9, color=figures.rank_colours(ranks)[rank], linewidths=0)
        if rank:
            ax.axvline(width * rank / ranks, color=figures.INK, linestyle="--", linewidth=1)
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal", xlabel="x (Å)", ylabel="y (Å)")
    ax.set_title(name)
