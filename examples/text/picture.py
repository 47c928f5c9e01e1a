"""Picture of the losses of a model, beside those of simple baselines."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

WINDOW = 20  # steps


def draw(
    path: Path,
    losses: Sequence[float],
    held_out: Mapping[int, float],
    guesses: Mapping[str, float],
) -> None:
    """Save the picture, in the format that the suffix of `path` says.

    All in nats per token: `losses` of each step, losses on `held_out` text by the number of steps,
    and losses of simple `guesses` on it.
    """
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 4.2), layout="constrained")
        ax = figure.subplots()
        steps = np.arange(1, len(losses) + 1)
        ax.plot(steps, losses, color=figures.PALE, alpha=0.5, linewidth=0.8, label="each step")
        if len(losses) > WINDOW:
            means = np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid")
            label = f"mean of {WINDOW} steps"
            ax.plot(steps[WINDOW - 1 :], means, color=figures.CURVES[0], label=label)
        ax.plot(
            list(held_out),
            list(held_out.values()),
            "o-",
            color=figures.CURVES[1],
            label="held-out text",
        )
        for name, loss in guesses.items():
            ax.axhline(loss, color=figures.INK, linewidth=0.8, linestyle="--")
            ax.text(steps[-1], loss + 0.03, f"{name}: {loss:.2f}", ha="right", va="bottom")
        last = held_out[max(held_out)]
        ax.annotate(
            f"{last:.2f}", (max(held_out), last), (0, 9), textcoords="offset points", ha="right"
        )
        ax.set(xlabel="step", ylabel="loss (nats per token)", xlim=(0, len(losses) * 1.01))
        ax.set_title("A GPT learns to write docstrings", weight="bold")
        ax.legend(loc="lower left")
        save(figure, path)
