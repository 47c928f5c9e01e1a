"""
Partition a mesh and look at it
===============================

You will read a mesh from a file, split it over four ranks by several methods, look at the parts and
their halos, and read the report that says what a partition costs. You need to know what a mesh or
a graph is, and from the :doc:`second tutorial <02_first_halo_exchange>` what a halo is.
"""

# %%
# A mesh
# ------
#
# Points around two cylinders in a channel, close to each other near the cylinders and far apart
# elsewhere, joined to triangles. We write it to a file and go on as if a mesh generator had made
# it.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import meshio
import numpy as np
import torch
from matplotlib.collections import LineCollection
from scipy.spatial import Delaunay

import varcomm as vc

CYLINDERS = np.array([[1.2, 0.9], [2.4, 1.3]])  # centres
RADIUS = 0.22
LENGTH, WIDTH = 5.0, 2.0


def to_cylinders(points):
    """Distance of each point to the surface of the nearest cylinder."""
    return np.linalg.norm(points[:, None] - CYLINDERS, axis=2).min(axis=1) - RADIUS


def border():
    """Points on the walls and on the cylinders, which stay where they are."""
    along, across = np.linspace(0, LENGTH, 41), np.linspace(0, WIDTH, 17)[1:-1]
    walls = [np.column_stack([along, np.full(41, y)]) for y in (0, WIDTH)]
    ends = [np.column_stack([np.full(15, x), across]) for x in (0, LENGTH)]
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    circle = RADIUS * np.column_stack([np.cos(angle), np.sin(angle)])
    return np.concatenate(
        [*walls, *ends, *(centre + circle for centre in CYLINDERS)]
    )


def make_mesh():
    random = np.random.default_rng(0)
    drawn = random.random((16_000, 2)) * [LENGTH, WIDTH]
    away = to_cylinders(drawn)
    dense = random.random(len(drawn)) < 0.04 + 0.96 * np.exp(-away / 0.15)
    fixed, free = border(), drawn[dense & (away > 0.01)]
    for _ in range(8):  # move each point to the mean of those around it
        points = np.concatenate([free, fixed])
        triangles = Delaunay(points).simplices
        outside = to_cylinders(points[triangles].mean(axis=1)) > 0
        triangles = triangles[outside]
        total, count = np.zeros_like(points), np.zeros(len(points))
        for here, there in [(0, 1), (1, 2), (2, 0)]:
            np.add.at(total, triangles[:, here], points[triangles[:, there]])
            np.add.at(count, triangles[:, here], 1)
        free = (total / count[:, None])[: len(free)]
    return points, triangles


points, triangles = make_mesh()
folder = Path(tempfile.mkdtemp())
file = folder / "channel.vtu"
in_space = np.column_stack([points, np.zeros(len(points))])
meshio.Mesh(in_space, {"triangle": triangles}).write(file)
print(f"{len(points):,} points, {len(triangles):,} triangles")

# %%
# From a file to parts
# --------------------
#
# ``read_mesh`` makes a PyTorch Geometric ``Data`` of any file that meshio reads: here nodes are the
# mesh's points, and edges join the points of a triangle, in both directions. ``partition`` gives
# each rank the nodes that it owns and all edges *into* them. What lies at the other end of these
# edges and belongs to others is the halo.
#
# - ``metis`` looks at the edges, and cuts few of them;
# - ``hilbert`` cuts a curve through the positions of the nodes into pieces;
# - ``rcb``, recursive coordinate bisection, halves the points along the longer side, again and
#   again;
# - ``block`` takes nodes by their numbers. It is right where neighbours have numbers close to each
#   other. Ours were drawn by chance.
#
# One run does it all, and brings back what we want to draw.

METHODS = ["metis", "hilbert", "rcb", "block"]


def split(rank, file, folder):
    data = vc.graph.read_mesh(file, dtype=torch.float32).data
    found = {}
    for method in METHODS:
        graph = vc.graph.partition(data, method=method)
        found[method] = (graph.owned_ids, graph.halo_ids, graph.report())
        if method == "metis":
            graph.save(folder)
    return found


ranks = vc.Ranks(4)
parts = ranks.run(split, str(file), str(folder / "parts"))

# %%
# The report
# ----------
#
# The report is the same on every rank. ``cut`` counts the edges that come from other ranks,
# ``halo`` the nodes at their other end, ``sent`` the rows that a rank sends in each exchange.

for method in METHODS:
    print(parts[0][method][2], end="\n\n")

# %%
# Look at it
# ----------
#
# Each triangle is drawn in the colour of its corners' rank, and white where they have different
# ones: that is where halos are. ``graph.plot("parts.png")`` draws a similar picture, from the ranks
# themselves.

COLOURS = [
    "#56b4e9",
    "#e69f00",
    "#cc79a7",
    "#009e73",
]  # told apart by colour-blind readers too


def owners(method):
    """The rank of each node."""
    owner = np.empty(len(points), dtype=int)
    for rank, found in enumerate(parts):
        owner[found[method][0]] = rank
    return owner


def draw_parts(ax, method):
    owner = owners(method)
    corners = owner[triangles]
    inside = (corners == corners[:, :1]).all(axis=1)
    for rank, colour in enumerate(COLOURS):
        own = triangles[inside & (corners[:, 0] == rank)]
        ax.triplot(*points.T, own, color=colour, lw=0.5)
        ax.plot(*points[owner == rank].T, ".", ms=2, color=colour)
    ax.set_aspect("equal")
    ax.axis("off")


figure, axes = plt.subplots(
    2, 2, figsize=(11, 5.6), facecolor="white", layout="constrained"
)
for ax, method in zip(axes.flat, METHODS, strict=True):
    draw_parts(ax, method)
    report = parts[0][method][2]
    ax.set_title(
        f"{method}: {100 * report.edge_cut:.1f} % of edges between ranks",
        loc="left",
    )
plt.show()

# %%
# One rank's view
# ---------------
#
# What does rank 1 know? Its own nodes, and the halo in the colours of the owners. Everything else
# is not there: no rank has an array as long as the whole mesh after partitioning.

METHOD, RANK = "metis", 1
owner = owners(METHOD)
own, halo, _ = parts[RANK][METHOD]
known = np.zeros(len(points), dtype=bool)
known[own] = known[halo] = True
edges = np.concatenate(
    [triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]
)
edges = edges[known[edges].all(axis=1) & (owner[edges] == RANK).any(axis=1)]

figure, ax = plt.subplots(
    figsize=(11, 5.2), facecolor="white", layout="constrained"
)
ax.triplot(*points.T, triangles, color="#e3e6e8", lw=0.4, zorder=0)
ax.add_collection(
    LineCollection(points[edges], colors="#6b747b", linewidths=0.5, zorder=1)
)
ax.plot(
    *points[own].T, "o", ms=3, color=COLOURS[RANK], label=f"owned by rank {RANK}"
)
for rank in sorted(set(owner[halo])):
    there = points[halo][owner[halo] == rank]
    style = {"mfc": "white", "mec": COLOURS[rank], "mew": 1.6}
    ax.plot(*there.T, "s", ms=5, **style, label=f"halo, owned by rank {rank}")
ax.set_title(f"What rank {RANK} has: its nodes, their edges, its halo", loc="left")
ax.legend(
    loc="upper center",
    bbox_to_anchor=(0.5, 0),
    ncols=4,
    frameon=False,
    markerscale=1.5,
)
ax.set_aspect("equal")
ax.axis("off")
plt.show()

# %%
# What it will cost
# -----------------
#
# With the width of a layer, the report tells bytes. With rates of your machine, it predicts which
# share of the time communication takes, by the simplest model that is of use. The rates here are
# made up: time a layer on one rank, and take the network's figures, before you believe them.

report = parts[0]["metis"][2]
print(report.table(channels=64, bandwidth=1e9, edge_rate=10e6, latency=20e-6))

# %%
# Save it, and load it on another number of ranks
# -----------------------------------------------
#
# A partition is saved without pickle. Four ranks wrote this one; two can load it, and each then
# owns what two ranks did.


def reload(rank, folder):
    graph = vc.graph.PartitionedGraph.load(folder)
    return graph.report()


ranks.close()
print(vc.launch(reload, 2, str(folder / "parts"))[0])

# %%
# What to take away
# -----------------
#
# - ``read_mesh`` and ``partition`` make a part for each rank of a mesh file; a rank has its own
#   nodes, the edges into them, and the halo.
# - METIS cuts fewest edges. Methods that look at positions alone are fast; blocks need numbers that
#   follow the mesh.
# - ``graph.report()`` says what each exchange will send, before you train.
# - A saved partition can be loaded on any number of ranks.
#
# Next: :doc:`train a PyG model on several ranks <04_pyg_on_ranks>`. The page :doc:`meshes, reports
# and pictures </meshes>` has all formats and options.
