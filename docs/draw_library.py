"""Draw docs/images/library.png: the modules of the library, and their order of imports.

python docs/draw_library.py

Their order is the import rule in pyproject.toml. A test compares the names.
"""

import sys
import textwrap
import tomllib
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save

ROOT = Path(__file__).parent.parent

ROOMS = {
    "cli": "doctor, partition, check, inspect, simulate, bench",
    "simulate": "messages, memory and time of thousands of ranks",
    "ase": "ASE calculator",
    "models": "MeshGraphNet, PaiNN, GPT, graph transformer",
    "graph": "partitions, halos, PyG models",
    "grid": "fields that are split",
    "tensor_parallel": "layers of uneven sizes",
    "data_parallel": "gradients, summed or sharded",
    "checkpoint": "saved on P ranks, loaded on Q",
    "testing": "same_as_one_process; dot test and gradcheck across ranks",
    "plan": "ExchangePlan: the rows that go to each rank, checked once",
    "sharding": "layouts of shards; DTensor",
    "ops": "one file per collective, with its adjoint",
    "transport": "ranks, groups and engines: Gloo, NCCL, MPI",
    "sizes": "ShardSizes: rows per rank, arithmetic without communication",
    "errors": "VarcommError and its subclasses",
    "_torch_private": "every private name of torch, with its reason",
}
# modules for users, of science, of numbers on the wire; and the colours of a dark page
GROUPS = {"#d7e3f4": "#24364d", "#d8ede6": "#1f4035", "#fbe7cf": "#4d3a1c"}
WIDTH, GAP, LINE, SIDE = 8.0, 0.08, 0.2, 0.35  # inches


def layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (order,) = (one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    return [[name.strip().removeprefix("varcomm.") for name in row.split("|")] for row in order]


def draw(rows):
    """Draw a row of modules per layer; `rows` are names, the lowest layer last."""
    lines = [max(len(wrapped(room, len(row))) for room in row) for row in rows]
    heights = [LINE * (count + 1) + 0.16 for count in lines]
    depth = sum(heights) + GAP * len(rows)
    figure, axes = plt.subplots(figsize=(WIDTH, depth + 0.3))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, WIDTH), ylim=(-depth, 0.3))
    axes.axis("off")
    axes.text(SIDE, 0.14, "A module imports only modules below it.", color=figures.INK, va="center")
    y = 0.0
    for place, (row, height) in enumerate(zip(rows, heights, strict=True)):
        y -= height
        width = (WIDTH - SIDE - 0.02 - GAP * (len(row) - 1)) / len(row)
        colour = [*GROUPS][0 if place < 3 else 1 if place < 5 else 2]
        for column, room in enumerate(row):
            x = SIDE + column * (width + GAP)
            shape = {"boxstyle": "round,pad=0,rounding_size=0.06", "fc": colour, "ec": "none"}
            axes.add_patch(FancyBboxPatch((x, y), width, height, **shape))
            words = wrapped(room, len(row))
            middle = {"ha": "center", "va": "center"}
            top = y + height / 2 + LINE * len(words) / 2
            name = {"color": figures.INK, "family": "monospace", "weight": "bold"}
            axes.text(x + width / 2, top, room, **name, **middle)
            for line, text in enumerate(words, 1):
                axes.text(x + width / 2, top - LINE * line, text, color=figures.INK, **middle)
        y -= GAP
    arrow = {"arrowstyle": "-|>", "color": figures.PALE, "lw": 1.4}
    axes.annotate("", (0.26, -depth + GAP), (0.26, 0), arrowprops=arrow)
    axes.text(0.1, -depth / 2, "imports", rotation=90, ha="center", va="center", color=figures.PALE)
    return figure


def wrapped(room, columns):
    """Return the words about a module in lines that fit into one of the columns."""
    return textwrap.wrap(ROOMS[room], 84 // columns - 2)


if __name__ == "__main__":
    plt.rcParams |= figures.style()
    save(draw(layers()), ROOT / "docs" / "images" / "library.png", GROUPS)
