"""Draw a training that was interrupted, beside one that was not."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from history import Run
from matplotlib import rc_context
from matplotlib.figure import Figure

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(path: Path, alone: Run, runs: Sequence[Run]) -> None:
    """Save the losses of each run, and how far they are from those of one process."""
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 5.4), layout="constrained")
        losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        losses.plot([*alone.losses], [*alone.losses.values()], color=figures.LAND, linewidth=8)
        losses.plot([], [], color=figures.LAND, linewidth=8, label="one process")
        for run, colour in zip(runs, figures.CURVES, strict=False):
            steps = [*run.losses]
            losses.plot(steps, [*run.losses.values()], color=colour, label=f"{run.ranks} ranks")
            away = [abs(run.losses[step] / alone.losses[step] - 1) for step in steps]
            apart.plot(steps, away, ".", color=colour, markersize=4)
        for run, following in pairwise(runs):
            killed = max(run.losses, default=run.start)
            losses.axvline(killed, color=figures.INK, linestyle=":")
            losses.text(
                killed + 1, 0.95, "a rank is killed", transform=losses.get_xaxis_transform()
            )
            losses.axvline(following.start, color=figures.INK, linewidth=0.8)
            losses.text(
                *(following.start - 1, 0.03, "the checkpoint"),
                transform=losses.get_xaxis_transform(),
                ha="right",
            )
        losses.set(ylabel="loss", yscale="log")
        losses.set_title("Three ranks, then two: the losses of one process")
        losses.legend(loc="center right")
        apart.set(xlabel="step", ylabel="relative difference\nfrom one process")
        save(figure, path)
