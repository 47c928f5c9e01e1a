"""Draw docs/images/library.png: the rooms of the library, and who may import whom.

python docs/draw_library.py

The rooms and their order are those of the import rule in pyproject.toml, which a test holds.
"""

import tomllib
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parent.parent

ROOMS = {
    "cli": "doctor, bench, partition, inspect, simulate",
    "simulate": "what thousands of ranks would send, keep and wait for",
    "ase": "a calculator for ASE on several ranks",
    "models": "MeshGraphNet, PaiNN, GPT, graph transformer: a file each",
    "graph": "partitions, halos,\nPyG models as they are",
    "tensor_parallel": "layers and losses\nthat do not divide",
    "data_parallel": "gradients, summed\nor sharded",
    "checkpoint": "saved on P ranks,\nloaded on Q",
    "testing": "dot test and gradcheck across ranks",
    "plan": "ExchangePlan: who sends which rows to whom, checked once",
    "sharding": "marks of pieces; to and from DTensor",
    "ops": "one file a primitive, its adjoint beside it: "
    "all_gather_v and reduce_scatter_v, gather_v and scatter_v, ...",
    "transport": "the only room that knows collectives of torch.distributed: Gloo, NCCL, MPI",
    "sizes": "ShardSizes: rows per rank, arithmetic without communication",
    "errors": "VarcommError and its few children",
}
COLOURS = ("#d7e3f4", "#d8ede6", "#fbe7cf")  # for users, of science, of numbers on the wire
INK, FAINT = "#1c2733", "#5b6875"
WIDTH, GAP, HEIGHT, TALL = 12.0, 0.14, 0.62, 0.98


def layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (order,) = (one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    return [[name.strip().removeprefix("varcomm.") for name in row.split("|")] for row in order]


def draw(rows):
    tall = [len(row) > 2 for row in rows]
    depth = sum(TALL if one else HEIGHT for one in tall) + GAP * len(rows)
    figure, axes = plt.subplots(figsize=(WIDTH, depth + 0.5), facecolor="white")
    axes.set(xlim=(0, WIDTH), ylim=(-depth, 0.5))
    axes.axis("off")
    y = 0.0
    for place, row in enumerate(rows):
        height = TALL if tall[place] else HEIGHT
        y -= height
        width = (WIDTH - 0.9 - GAP * (len(row) - 1)) / len(row)
        colour = COLOURS[0 if place < 3 else 1 if place < 5 else 2]
        for column, room in enumerate(row):
            x = 0.8 + column * (width + GAP)
            corner = FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.08",
                fc=colour,
                ec="none",
            )
            axes.add_patch(corner)
            middle, words = x + width / 2, ROOMS[room]
            up = 0.30 if "\n" in words else 0.13
            axes.text(
                middle,
                y + height / 2 + up,
                room,
                ha="center",
                va="center",
                color=INK,
                family="monospace",
                weight="bold",
                size=11,
            )
            axes.text(
                middle,
                y + height / 2 - 0.14,
                words,
                ha="center",
                va="center",
                color=FAINT,
                size=8.6,
            )
        y -= GAP
    axes.annotate(
        "",
        (0.4, -depth + GAP),
        (0.4, 0),
        arrowprops={"arrowstyle": "-|>", "color": FAINT, "lw": 1.4},
    )
    axes.text(
        0.22, -depth / 2, "imports", rotation=90, ha="center", va="center", color=FAINT, size=10
    )
    axes.text(
        0.8,
        0.22,
        "A room imports only what stands below it; rooms side by side do not know each other.",
        color=INK,
        size=10.5,
        va="center",
    )
    return figure


if __name__ == "__main__":
    draw(layers()).savefig(
        ROOT / "docs" / "images" / "library.png", dpi=150, bbox_inches="tight", pad_inches=0.1
    )
