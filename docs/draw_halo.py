"""Draw docs/images/halo.png: owned nodes, halo and exchange of six nodes on three ranks.

python docs/draw_halo.py

The graph and its parts are those of the code on docs/explanation/halo.md.
"""

import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

import varcomm as vc
from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save
from page_code import blocks_of, run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "halo.md"
PLACES = {5: (0, 0), 0: (0, 1), 1: (1, 1), 4: (2, 1), 3: (2, 0), 2: (1, 0)}
# inches: between nodes, radius of a node, width of a rank's panel, height of the figure
STEP, RADIUS, PANEL, HEIGHT = 0.78, 0.17, 2.3, 5.2
GRAPH, PARTS, OWNED, HALO = 3.72, 1.92, 1.14, 0.2  # heights of the lowest nodes in each part
FILL = {"#f1f3f5": "#1e2126"}  # of a rank's panel


def parts():
    """Return owned ids, halo ids and local edges of each rank."""
    names = {}
    run(blocks_of(PAGE)[0].partition("\nfor found in")[0], names)
    return [(owned, halo, edges) for owned, halo, edges, _ in vc.launch(names["fn"], 3)]


def node(axes, place, number, owner, is_halo=False):
    look = {"fc": figures.RANKS[owner], "ec": figures.RANKS[owner], "lw": 2.2}
    if is_halo:
        look |= {"fc": "white", "ec": figures.LINES[owner]}
    axes.add_patch(Circle(place, RADIUS, zorder=3, **look))
    ink = figures.INK if is_halo else "black"
    middle = {"ha": "center", "va": "center_baseline", "zorder": 4}
    axes.text(*place, number, color=ink, **middle)


def arrow(axes, start, end, colour, **look):
    axes.add_patch(
        FancyArrowPatch(
            *(start, end),
            arrowstyle="-|>",
            mutation_scale=12,
            color=colour,
            shrinkA=72 * RADIUS + 3,
            shrinkB=72 * RADIUS + 3,
            zorder=2,
            **look,
        )
    )


def draw(found):
    """Draw the graph, the part of each rank, and the rows that ranks send."""
    owner = {number: rank for rank, (owned, _, _) in enumerate(found) for number in owned}
    figure, axes = plt.subplots(figsize=(figures.WIDTH, HEIGHT))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, figures.WIDTH), ylim=(-0.08, HEIGHT - 0.08))
    axes.axis("off")

    def at(number, left, low):
        x, y = PLACES[number]
        return left + x * STEP, low + y * STEP

    def heading(left, y, words, **look):
        axes.text(left, y, words, color=figures.INK, va="center", **look)

    ids = [(owned + halo, edges) for owned, halo, edges in found]
    pairs = [
        (rows[i], rows[j])
        for rows, (first, second) in ids
        for i, j in zip(first, second, strict=True)
    ]
    left = 0.42
    heading(0.12, GRAPH + STEP + 0.42, "Graph: the colour is the owner", weight="bold")
    for start, end in pairs:
        arrow(axes, at(start, left, GRAPH), at(end, left, GRAPH), figures.PALE, lw=1.4)
    for number, rank in owner.items():
        node(axes, at(number, left, GRAPH), number, rank)
    for line, (rank, is_halo, words) in enumerate(
        [(0, False, "owned node"), (0, True, "halo node: a copy of a row of its owner")]
    ):
        y = GRAPH + STEP - line * 0.48 - 0.1
        node(axes, (3.1, y), "", rank, is_halo)
        heading(3.4, y, words)
    y = GRAPH + STEP - 1.06
    axes.add_patch(
        FancyArrowPatch(
            (2.92, y), (3.28, y), arrowstyle="-|>", mutation_scale=12, color=figures.PALE, lw=1.4
        )
    )
    heading(3.4, y, "edge; its target's owner holds it")

    spots = {}
    for rank, (owned, halo, edges) in enumerate(found):
        begin = 0.12 + rank * (PANEL + 0.03)
        box = {"boxstyle": "round,pad=0,rounding_size=0.08", "fc": next(iter(FILL)), "ec": "none"}
        axes.add_patch(
            FancyBboxPatch((begin, -0.05), PANEL - 0.06, PARTS + STEP + 0.62, zorder=0, **box)
        )
        heading(begin + 0.1, PARTS + STEP + 0.4, f"Rank {rank}", weight="bold")
        rows, left = owned + halo, begin + 0.36
        for i, j in zip(*edges, strict=True):
            arrow(axes, at(rows[i], left, PARTS), at(rows[j], left, PARTS), figures.PALE, lw=1.4)
        for number in rows:
            node(axes, at(number, left, PARTS), number, owner[number], number in halo)
        for y, words, numbers in ((OWNED, "owned", owned), (HALO, "halo", halo)):
            for place, number in enumerate(numbers):
                spot = (begin + 0.9 + 0.5 * place, y)
                node(axes, spot, number, owner[number], numbers is halo)
                spots[words, rank, number] = spot
            axes.text(begin + 0.1, y, words, color=figures.PALE, va="center")
    for (words, _, number), spot in spots.items():
        if words == "halo":
            start = spots["owned", owner[number], number]
            arrow(axes, start, spot, figures.LINES[owner[number]], lw=1.6)
    return figure


if __name__ == "__main__":
    plt.rcParams |= figures.style()
    save(draw(parts()), ROOT / "docs" / "images" / "halo.png", FILL)
