"""Draws what the primitives move, for the first tutorial.

Of each primitive and rank it is given the moments of a run: the input, the result, and their
gradients. Each is a tensor (rows, columns, marks), where an entry's marks count the entries that
went into it, and the number of such entries that each rank had.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

COLOURS = ["#56b4e9", "#e69f00", "#cc79a7"]  # one a rank; told apart by colour-blind readers too
INK, PALE = "#22272b", "#6b747b"
WIDTH, HEIGHT, GAP = 1.35, 0.62, 0.22  # of a rank's column, of a row, between columns
BLOCK = 3 * WIDTH + 2 * GAP
ARROW = 1.9  # between what was and what comes of it
PITCH = 1.08 * HEIGHT


def words(ax, x, y, text, size=8, color=INK, **style):
    ax.text(x, y, text, ha="center", va="center", size=size, color=color, **style)


def draw_entry(ax, x, y, width, marks, counts):
    """One entry as a box, with a field for each entry that went into it."""
    sources = [k for k, count in enumerate(marks.int()) for _ in range(count)]
    x, width = x + 0.03, width - 0.06
    if not sources:
        ax.add_patch(Rectangle((x, y), width, HEIGHT, facecolor="white", edgecolor=PALE, lw=0.7))
        words(ax, x + width / 2, y + HEIGHT / 2, "0", color=PALE)
    for place, source in enumerate(sources):
        owner = next(rank for rank in range(len(counts)) if source in counts.range(rank))
        left, field = x + place * width / len(sources), width / len(sources)
        ax.add_patch(Rectangle((left, y), field, HEIGHT, facecolor=COLOURS[owner], lw=0))
        words(ax, left + field / 2, y + HEIGHT / 2, source - counts.offsets[owner])


def draw_block(ax, left, top, title, found):
    """What all ranks have at one moment, side by side."""
    words(ax, left + BLOCK / 2, top + 1.0, title, size=9)
    for rank, (entries, counts) in enumerate(found):
        x = left + rank * (WIDTH + GAP)
        words(ax, x + WIDTH / 2, top + 0.35, f"rank {rank}", color=PALE)
        if len(entries) == 0:
            words(ax, x + WIDTH / 2, top - HEIGHT / 2, "no rows", 7, PALE, style="italic")
        for row, entry in enumerate(entries):
            width = WIDTH / len(entry)
            for column, marks in enumerate(entry):
                draw_entry(ax, x + column * width, top - (row + 1) * PITCH, width, marks, counts)


def draw_arrow(ax, y, label, start, end):
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.5}
    ax.annotate("", (end, y), (start, y), arrowprops=style)
    words(ax, (start + end) / 2, y + 0.3, label)


def draw_panel(ax, title, found, rows):
    """Forward above, from left to right; backward below, from right to left."""
    right, height = BLOCK + ARROW, rows * PITCH
    low, middle = -height - 1.9, min(height, 3 * PITCH) / 2
    places = [(0, 0), (right, 0), (right, low), (0, low)]
    for (left, top), moment in zip(places, found[0], strict=True):
        draw_block(ax, left, top, moment, [of_rank[moment] for of_rank in found])
    draw_arrow(ax, -middle, "forward", BLOCK + 0.15, right - 0.15)
    draw_arrow(ax, low - middle, "backward", right - 0.15, BLOCK + 0.15)
    style = {"size": 12, "weight": "bold", "color": INK, "family": "monospace"}
    ax.text(0, 1.75, title, **style)
    ax.set_xlim(-0.6, right + BLOCK + 0.6)
    ax.set_ylim(low - height - 0.5, 2.5)
    ax.set_aspect("equal")


def draw(panels, columns=2):
    """A figure with a panel a primitive."""
    names = list(panels)
    lines = [names[start : start + columns] for start in range(0, len(names), columns)]
    rows = [
        max(len(part[0]) for name in line for of_rank in panels[name] for part in of_rank.values())
        for line in lines
    ]
    heights = [2 * count * PITCH + 4.9 for count in rows]
    figure, axes = plt.subplots(
        len(lines),
        columns,
        figsize=(4.5 * columns, 0.385 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        facecolor="white",
        layout="constrained",
    )
    for ax in axes.flat:
        ax.axis("off")
    for line, across, count in zip(lines, axes, rows, strict=True):
        for name, ax in zip(line, across, strict=False):
            draw_panel(ax, name, panels[name], count)
    return figure


def explain(figure):
    """Say in the last panel of a figure what its boxes mean."""
    lines = [
        "Colour: the rank where a row was\nwhen the arrow began.",
        "Number: its place there.",
        "Several fields: a sum of rows.",
        "White: zeros.",
    ]
    ax = figure.axes[-1]
    ax.text(0.1, 0.5, "\n\n".join(lines), transform=ax.transAxes, va="center", size=11, color=INK)
