"""
Partition a mesh and draw the parts
===================================

Your mesh doesn't fit on one GPU, so you have to cut it, and each cut costs communication. This
tutorial reads a mesh from a file, partitions it over four ranks with several methods, draws the
parts and their halos, and prints the communication that a partition causes. The tutorial takes 10
minutes. You need to know what a mesh or a graph is, and what a halo is (:doc:`second tutorial
<02_first_halo_exchange>`).
"""

# %%
# A mesh file
# -----------
#
# The mesh fills a channel around two cylinders. The triangles are small near the cylinders. On this
# page, hidden code generates the mesh and writes ``channel.vtu``. In your project, a mesh generator
# writes the file.

import tempfile
from pathlib import Path

import meshio
import torch

import varcomm as vc

folder = Path(tempfile.mkdtemp())
file = folder / "channel.vtu"

# sphinx_gallery_start_ignore
# isort: split
import numpy as np
from scipy.spatial import Delaunay

CYLINDERS = np.array([[1.2, 0.9], [2.4, 1.3]])  # centres
RADIUS = 0.22
LENGTH, WIDTH = 5.0, 2.0


def to_cylinders(points):
    """Return the distance of each point to the nearest cylinder."""
    return np.linalg.norm(points[:, None] - CYLINDERS, axis=2).min(axis=1) - RADIUS


def border():
    """Return the fixed points on the walls and on the cylinders."""
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
    for _ in range(8):  # move each point to the mean of its neighbours
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
in_space = np.column_stack([points, np.zeros(len(points))])
meshio.Mesh(in_space, {"triangle": triangles}).write(file)
# sphinx_gallery_end_ignore
print(meshio.read(file))

# %%
# Partition the mesh
# ------------------
#
# ``read_mesh`` returns a PyTorch Geometric ``Data`` object, from any file that meshio reads. Here,
# nodes are the points of the mesh. Edges join the points of a triangle, in both directions.
# ``partition`` assigns nodes to ranks. A rank holds its owned nodes and all edges *into* them. Some
# of these edges start at nodes that other ranks own. These nodes are the rank's halo.
#
# - ``metis`` cuts few edges;
# - ``hilbert`` orders nodes along a space-filling curve through their positions, and cuts the curve
#   into pieces;
# - ``rcb`` (recursive coordinate bisection) halves the points along the longer side, repeatedly;
# - ``block`` assigns contiguous ranges of node ids. Use ``block`` if neighbouring nodes have
#   neighbouring ids. Here the ids are random.
#
# One run tries all methods, and returns the parts for the pictures below.

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
# ``graph.report()`` is the same on every rank. In its table, ``cut`` counts edges from other ranks,
# ``halo`` counts the source nodes of these edges, and ``sent`` counts the rows that a rank sends
# per exchange.

for method in METHODS:
    print(parts[0][method][2], end="\n\n")

# %%
# Pictures of the parts
# ---------------------
#
# A triangle has the colour of the rank that owns its corners. A triangle has no colour if several
# ranks own its corners. Each of these corners is in the halo of another rank.
# ``graph.plot("parts.png")`` draws a similar picture.

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

COLOURS = vc._figures.RANKS[:4]
plt.rcParams |= vc._figures.style()
PALE = vc._figures.PALE


def owners(method):
    """Return the rank of each node."""
    owner = np.empty(len(points), dtype=int)
    for rank, found in enumerate(parts):
        owner[found[method][0]] = rank
    return owner


def draw_parts(ax, method):
    owner = owners(method)
    corners = owner[triangles]
    inside = (corners == corners[:, :1]).all(axis=1)
    faces = np.where(inside, corners[:, 0], len(COLOURS))
    look = {"cmap": ListedColormap([*COLOURS, "white"]), "vmin": 0, "vmax": 4}
    ax.tripcolor(*points.T, triangles, faces, edgecolors=PALE, lw=0.15, **look)
    ax.set_aspect("equal")
    ax.axis("off")


figure, axes = plt.subplots(2, 2, figsize=(7.2, 4.2), layout="constrained")
for ax, method in zip(axes.flat, METHODS, strict=True):
    draw_parts(ax, method)
    report = parts[0][method][2]
    ax.set_title(
        f"{method}: {100 * report.edge_cut:.1f} % of edges cut",
    )
plt.show()
# sphinx_gallery_end_ignore

# %%
# The part of one rank
# --------------------
#
# Rank 1 holds its owned nodes and its halo. In the picture, the colour of a node shows its owner.
# After partitioning, no rank holds an array with a row for every node of the mesh.

# sphinx_gallery_start_ignore
from matplotlib.collections import LineCollection

METHOD, RANK = "metis", 1
owner = owners(METHOD)
own, halo, _ = parts[RANK][METHOD]
known = np.zeros(len(points), dtype=bool)
known[own] = known[halo] = True
edges = np.concatenate(
    [triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]
)
edges = edges[known[edges].all(axis=1) & (owner[edges] == RANK).any(axis=1)]

figure, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
ax.triplot(*points.T, triangles, color=vc._figures.LAND, lw=0.4, zorder=0)
ax.add_collection(
    LineCollection(points[edges], colors=PALE, linewidths=0.5, zorder=1)
)
ax.plot(
    *points[own].T, "o", ms=2.5, color=COLOURS[RANK], label=f"owned by rank {RANK}"
)
for rank in sorted(set(owner[halo])):
    there = points[halo][owner[halo] == rank]
    style = {"mfc": "white", "mec": COLOURS[rank], "mew": 1.6}
    ax.plot(*there.T, "s", ms=4, **style, label=f"halo, owned by rank {rank}")
ax.set_title(f"Owned nodes, edges and halo of rank {RANK}")
ax.legend(
    loc="upper center",
    bbox_to_anchor=(0.5, 0),
    ncols=2,
    markerscale=1.5,
)
ax.set_aspect("equal")
ax.axis("off")
plt.show()
# sphinx_gallery_end_ignore

# %%
# Predict the cost
# ----------------
#
# If you pass the width of a layer, the report states bytes. If you also pass rates, the report
# predicts the share of time that communication takes. The rates below are examples. Measure your
# own rates: the time of a layer on one rank, and the bandwidth and latency of the network.

report = parts[0]["metis"][2]
print(report.table(channels=64, bandwidth=1e9, edge_rate=10e6, latency=20e-6))

# %%
# Save a partition and load it on two ranks
# -----------------------------------------
#
# A partition is saved without pickle. Four ranks wrote this partition. Two ranks load it, and each
# of the two ranks then owns the nodes of two saved parts.


def reload(rank, folder):
    graph = vc.graph.PartitionedGraph.load(folder)
    return graph.report()


ranks.close()
print(vc.launch(reload, 2, str(folder / "parts"))[0])

# %%
# Summary
# -------
#
# - METIS cuts the fewest edges. Methods that use positions are fast. ``block`` cuts few edges only
#   if neighbouring nodes have neighbouring ids.
# - A saved partition loads on any number of ranks.
#
# Next: :doc:`train a PyG model on several ranks <04_pyg_on_ranks>`. Reference: :doc:`meshes,
# reports and pictures </meshes>`, with all formats and options.
