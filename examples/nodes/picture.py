"""Draw a graph without coordinates: ranks and parts of its nodes, errors, accuracies."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

# of Okabe and Ito: parts to be predicted are not ranks
PARTS = ("#56b4e9", "#d55e00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#e69f00", "#999999")
DRAWN = 12_000  # nodes at most


def draw(
    path: Path,
    place: np.ndarray,
    rank: np.ndarray,
    part: np.ndarray,
    guess: np.ndarray,
    curves: dict[str, list[float]],
    simple: dict[str, float],
) -> None:
    """Save a picture in the format of the suffix of `path`.

    Each node has a ``place`` (N, 2) in the picture, a ``rank`` (N,) that owns it, and a ``part``
    (N,). ``guess`` (N,) is the part that the last model predicts. ``curves`` has the accuracies of
    each model per step. ``simple`` has the accuracies of methods without a network.
    """
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 7.2), layout="constrained")
        panels = figure.subplots(2, 2)
        drawn = np.random.default_rng(0).permutation(len(place))[:DRAWN]
        last = list(curves)[-1]
        right = (guess == part).astype(int)
        for panel, values, kind, palette, heading in (
            (panels[0, 0], rank, "rank", figures.RANKS, f"Owner of {len(place):,} nodes"),
            (panels[0, 1], part, "part", PARTS, "Parts of METIS, to be predicted"),
            (panels[1, 0], right, "", (figures.WRONG, figures.LAND), f"Errors of {last}, in red"),
        ):
            cloud(panel, place[drawn], values[drawn], kind, palette)
            panel.set_title(heading)
        compare(panels[1, 1], curves, simple)
        lines = panels[1, 1].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=3, columnspacing=1)
        save(figure, path)


def cloud(
    panel: Axes, place: np.ndarray, values: np.ndarray, kind: str, palette: tuple[str, ...]
) -> None:
    """Nodes at their first two components of the distances; these axes have no unit."""
    colours = np.array(palette)[values % len(palette)]
    panel.scatter(*place.T, s=3, c=colours, linewidths=0)
    count = int(values.max()) + 1
    look = {"marker": "o", "linestyle": "", "markersize": 8}
    marks = [Line2D([], [], color=palette[value % len(palette)], **look) for value in range(count)]
    if kind:
        under = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "handletextpad": 0}
        panel.legend(
            marks, [str(n) for n in range(count)], title=kind, ncols=4, columnspacing=0.8, **under
        )
    panel.set(aspect="equal")
    panel.set_axis_off()


def compare(panel: Axes, curves: dict[str, list[float]], simple: dict[str, float]) -> None:
    """Accuracies over the steps, and, as lines, those of methods without training.

    The curve of "NAME, sampled" is dashed, in the colour of NAME.
    """
    models = dict.fromkeys(name.partition(",")[0] for name in curves)
    colours = dict(zip(models, figures.CURVES, strict=False))
    for name, shares in curves.items():
        model, sampled, _ = name.partition(",")
        style = "--" if sampled else "-"
        panel.plot(100 * np.array(shares), color=colours[model], linestyle=style, label=name)
    for (name, share), style in zip(simple.items(), (":", "--", "-."), strict=True):
        panel.axhline(100 * share, color=figures.INK, linewidth=1, linestyle=style, label=name)
    panel.set(xlabel="step", ylabel="accuracy, other nodes (%)", ylim=(0, 100))
    panel.set_title("Accuracy")
