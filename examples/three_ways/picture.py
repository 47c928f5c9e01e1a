"""Draw the share of each rank of a mesh, and the losses of each mesh and of one process."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

LINES = ["--", ":", "-."]  # of meshes, each over the ones before


@dataclass(frozen=True)
class Part:
    """The share of one rank."""

    at: tuple[int, int, int]  # along data, graph and tensor
    nodes: np.ndarray
    halo: int
    samples: range  # of each batch
    heads: range
    wide: range

    def __str__(self) -> str:
        """Return the share in a line."""
        return (
            f"{len(self.samples)} samples, {len(self.nodes)} nodes and {self.halo} of others, "
            f"{len(self.heads)} heads, {len(self.wide)} wide features"
        )


def draw(
    path: Path,
    pos: np.ndarray,
    meshes: Sequence[Sequence[Part]],
    alone: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
) -> None:
    """Save the picture, in the format of the suffix of `path`.

    ``pos`` (N, 2) has the places of all nodes, and `meshes` the ranks of each mesh. `curves` has
    the losses of each mesh by name, in the same order. `alone` has the losses of one process, and
    `baselines` the errors of simple methods.
    """
    with rc_context(figures.style()):
        ranks = max(map(len, meshes))
        figure = Figure((figures.WIDTH, 2.6 * len(meshes) + 4.6), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[2.6 * len(meshes), 4.6])
        rows = above.subfigures(len(meshes), 1, squeeze=False)
        for place, parts, name in zip(rows.flat, meshes, curves, strict=True):
            place.suptitle(f"{name} ranks (data x graph x tensor)", weight="bold", fontsize=11)
            boxes = place.subplots(1, ranks, squeeze=False)
            for rank, (box, part) in enumerate(zip(boxes.flat, parts, strict=True)):
                box.set_title(f"rank {rank}")
                holding(box, pos, part, parts)
        left, right = below.subplots(2, 1, sharex=True)
        compare_losses(left, alone, curves, baselines)
        compare_digits(right, alone, curves)
        save(figure, path)


def holding(ax: Axes, pos: np.ndarray, part: Part, ranks: Sequence[Part]) -> None:
    """Draw the share of a rank in colour: its nodes, samples, heads and wide features."""
    colour = figures.RANKS[ranks.index(part) % len(figures.RANKS)]
    nodes = ax.inset_axes((0, 0.5, 1, 0.5))
    nodes.scatter(*pos.T, s=2, color=figures.LAND, linewidths=0)
    nodes.scatter(*pos[part.nodes].T, s=4, color=colour, linewidths=0)
    nodes.set_aspect("equal", anchor="W")
    nodes.set_axis_off()
    held = (("samples", "samples"), ("heads", "heads"), ("wide", "features"))
    for line, (name, what) in enumerate(held):
        mine: range = getattr(part, name)
        total = max(getattr(other, name).stop for other in ranks)
        y = 0.3 - 0.17 * line
        ax.text(0, y + 0.06, f"{len(mine)}/{total} {what}", va="center")
        ax.add_patch(Rectangle((0, y - 0.05), 1, 0.045, color=figures.LAND, linewidth=0))
        left, width = mine.start / total, len(mine) / total
        ax.add_patch(Rectangle((left, y - 0.05), width, 0.045, color=colour, linewidth=0))
        for cut in range(1, total) if total < 20 else ():
            ax.plot([cut / total] * 2, [y - 0.05, y - 0.005], color="white", linewidth=1)
    ax.set(xlim=(0, 1), ylim=(-0.1, 1))
    ax.set_axis_off()


def styled(
    curves: Mapping[str, Sequence[float]],
) -> Iterator[tuple[str, Sequence[float], dict[str, str]]]:
    """Curves, their names, and how to draw them."""
    for number, (name, losses) in enumerate(curves.items()):
        style = {"linestyle": LINES[number % 3], "color": figures.CURVES[number % 3]}
        yield name, losses, style


def compare_losses(
    ax: Axes,
    alone: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
) -> None:
    """Draw the losses of each step, which coincide, and the errors of simple methods."""
    steps = np.arange(1, len(alone) + 1)
    ax.semilogy(steps, alone, color=figures.LAND, linewidth=7, label="one process")
    for _, losses, style in styled(curves):
        ax.semilogy(steps, losses, linewidth=1.8, **style)
    for (name, error), dash in zip(baselines.items(), (":", "--", "-."), strict=False):
        ax.axhline(error, color=figures.INK, linewidth=1, linestyle=dash, label=name)
    ax.set(ylabel="mean squared error", xlim=(1, len(alone)))
    ax.set_title("The losses of all meshes coincide", weight="bold")
    ax.set_ylim(top=20 * max(alone))  # above the curves there is room
    ax.legend(loc="upper right", ncols=2)  # the panel below names the meshes


def compare_digits(ax: Axes, alone: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Draw the distance of losses from one process: rounding, which training amplifies."""
    steps, wanted, most = np.arange(1, len(alone) + 1), np.array(alone), 1e-6
    for name, losses, style in styled(curves):
        apart = np.abs(np.array(losses) - wanted) / wanted
        ax.semilogy(steps, np.maximum(apart, 1e-8), label=f"{name} ranks", **style)
        most = max(most, apart.max())
    ax.set(xlabel="step", ylabel="relative difference", xlim=(1, len(alone)))
    ax.set_ylim(1e-8, 500 * most)
    ax.set_title("Difference from one process, in single precision", weight="bold")
    ax.legend(loc="upper left", ncols=2)
