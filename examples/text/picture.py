"""Picture of the losses of a model, beside those of simple baselines."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

INK, PALE, BLUE, ORANGE = "#22272b", "#9db7d3", "#2b5f94", "#d98a1f"
WINDOW = 20  # steps


def draw(
    path: Path,
    losses: Sequence[float],
    held_out: Mapping[int, float],
    guesses: Mapping[str, float],
) -> None:
    """Save the picture, in the format that the suffix of `path` says.

    All in nats a token: `losses` of each step, those on `held_out` text by the number of steps, and
    what `guesses` would lose on it.
    """
    style = {"font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with rc_context(style):
        figure = Figure(figsize=(10, 5.5), dpi=100, facecolor="white", layout="constrained")
        ax = figure.subplots()
        steps = np.arange(1, len(losses) + 1)
        ax.plot(steps, losses, color=PALE, linewidth=0.8, label="each step")
        if len(losses) > WINDOW:
            means = np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid")
            label = f"the mean of {WINDOW} steps"
            ax.plot(steps[WINDOW - 1 :], means, color=BLUE, linewidth=2, label=label)
        ax.plot(list(held_out), list(held_out.values()), "o-", color=ORANGE, label="text held out")
        for name, loss in guesses.items():
            ax.axhline(loss, color=INK, linewidth=0.8, linestyle="--")
            ax.text(steps[-1], loss + 0.03, f"{name}: {loss:.2f}", ha="right", va="bottom")
        last = held_out[max(held_out)]
        ax.annotate(
            f"{last:.2f}", (max(held_out), last), (0, 9), textcoords="offset points", ha="right"
        )
        ax.set(xlabel="step", ylabel="loss, nats a token", xlim=(0, len(losses) * 1.01))
        ax.set_title("A GPT learns to write docstrings", loc="left", weight="bold")
        ax.legend(frameon=False, loc="lower left")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        figure.savefig(path)
