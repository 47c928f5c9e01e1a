"""Draw the crystal: its ranks, the forces on its atoms, its energy over time."""

import sys
from pathlib import Path

import torch
from crystal import SPACING, Crystal
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(
    path: Path,
    crystal: Crystal,
    owner: Tensor,
    true_forces: Tensor,
    forces: Tensor,
    energies: Tensor,
    true_energies: Tensor,
    timestep: float,
) -> None:
    """Save three panels as one picture.

    `owner` (N,) is the rank of each atom. Forces (N, 3) are those at the end of the motion, in
    eV / Angstrom. Energies (T, 2) are the potential and kinetic energy per atom over time, in eV.
    `timestep` is in fs.
    """
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 7.0), layout="constrained")
        layout = [["parts", "parity"], ["time", "time"]]
        panels = figure.subplot_mosaic(layout, width_ratios=(1, 1.3))
        _parts(panels["parts"], crystal, owner)
        _parity(panels["parity"], 1000 * true_forces.flatten(), 1000 * forces.flatten())
        _energies(panels["time"], 1000 * energies, 1000 * true_energies, timestep)
        save(figure, path)


def _parts(ax: Axes, crystal: Crystal, owner: Tensor) -> None:
    """Draw the crystal's first two layers of atoms, in the colours of their ranks."""
    shown = crystal.pos[:, 2] < SPACING
    x, y, _ = crystal.pos[shown].T
    ranks = int(owner.max()) + 1
    colours = ListedColormap(figures.rank_colours(ranks))
    dots = ax.scatter(x, y, c=owner[shown], s=9, cmap=colours, vmin=-0.5, vmax=ranks - 0.5)
    ax.legend(
        *dots.legend_elements(num=list(range(ranks))),
        title="rank",
        ncols=min(ranks, 4),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22),
    )
    ax.set(xlabel="x (Å)", ylabel="y (Å)", aspect="equal")
    ax.set_title(f"Two layers of {len(crystal.pos):,} atoms")


def _parity(ax: Axes, truth: Tensor, forces: Tensor) -> None:
    """Count pairs of a true force and a predicted one."""
    limit = float(truth.abs().max())
    bins = ax.hexbin(truth, forces, gridsize=70, norm=LogNorm(), cmap="viridis", linewidths=0)
    ax.plot([-limit, limit], [-limit, limit], color=figures.INK, linewidth=0.8)
    ax.figure.colorbar(bins, ax=ax, label="components", shrink=0.8)
    error = (forces - truth).square().mean().sqrt()
    ax.set(xlabel="true force (meV/Å)", ylabel="predicted force (meV/Å)", aspect="equal")
    ax.set_title(f"Forces: RMS error {error:.1f} meV/Å")


def _energies(ax: Axes, energies: Tensor, true_energies: Tensor, timestep: float) -> None:
    """Draw energies of the mean atom over time, beside those of the true potential."""
    time = torch.arange(len(energies)) * timestep / 1000
    start = energies[0, 0]
    for name, colour, values, true in (
        (
            "potential",
            figures.CURVES[0],
            energies[:, 0] - start,
            true_energies[:, 0] - true_energies[0, 0],
        ),
        ("kinetic", figures.CURVES[1], energies[:, 1], true_energies[:, 1]),
        ("total", figures.INK, energies.sum(1) - start, None),
    ):
        ax.plot(time, values, color=colour, label=name, linewidth=2)
        if true is not None:
            ax.plot(time, true, color=figures.INK, linestyle=":", linewidth=1.5)
    ax.plot([], [], color=figures.INK, linestyle=":", label="true potential")
    ax.set(
        xlabel="time (ps)",
        ylabel="energy per atom (meV)",
        xlim=(0, float(time[-1])),
    )
    ax.legend(loc="upper right", bbox_to_anchor=(1, 0.95), ncols=2)
    off = (energies.sum(1) - energies[0].sum()).abs().max()
    ax.set_title(f"Energy: the total stays within {off:.3f} meV")
