"""Draw docs/images/equality.png: one training on 1, 2 and 3 ranks, its losses and its bytes.

python docs/draw_equality.py

The picture contains its numbers. A test runs the training again and compares them.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.tri import Triangulation
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import varcomm as vc
from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import save

PICTURE = Path(__file__).parent / "images" / "equality.png"
WORLDS = 1, 2, 3
STEPS = 60
WIDTHS = 4, 32, 32, 2  # features before and after each of three layers
BYTES = 8  # of a number
RADIUS = 0.2


def mesh():
    """Return the points of a channel around a cylinder, and the triangles between them."""
    random = np.random.default_rng(0)
    rings = []
    for ring in range(9):
        angle = 2 * np.pi * (np.arange(40) + ring / 2) / 40
        rings.append(RADIUS * 1.13**ring * np.stack([np.cos(angle), np.sin(angle)], axis=1))
    x, y = np.meshgrid(np.arange(-1.0, 2.45, 0.085), np.linspace(-0.6, 0.6, 16))
    x[1::2] += 0.0425
    cloud = np.stack([x, y], axis=-1)
    cloud[1:-1] += 0.02 * random.uniform(-1, 1, cloud[1:-1].shape)
    cloud = cloud.reshape(-1, 2)
    cloud = cloud[np.hypot(*cloud.T) > np.hypot(*rings[-1][0]) + 0.03]
    points = np.concatenate([*rings, cloud])
    triangles = Triangulation(*points.T).triangles
    return points, triangles[(triangles >= len(rings[0])).any(axis=1)]


def flow():
    """Return the mesh as a graph, with the velocity of an ideal flow around the cylinder."""
    points, triangles = mesh()
    edges = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    edges = np.unique(np.sort(edges, axis=1), axis=0)
    pos, ends = torch.from_numpy(points), torch.from_numpy(edges.astype(np.int64)).T
    z = torch.complex(*pos.T)
    velocity = torch.view_as_real((1 - RADIUS**2 / z**2).conj().resolve_conj())
    distance = pos.norm(dim=1, keepdim=True)
    x = torch.cat([pos, RADIUS / distance, distance.log()], dim=1)
    return Data(x=x, pos=pos, y=velocity, edge_index=torch.cat([ends, ends.flip(0)], dim=1))


def train(rank):
    """Return this rank's losses, and the nodes, halo rows and bytes per step of all ranks."""
    data = flow()
    torch.manual_seed(0)
    model = GraphSAGE(4, 32, num_layers=3, out_channels=2).double()
    graph = vc.graph.partition(data, method="rcb")
    model = vc.graph.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with vc.trace() as calls:
            out = model(graph.x, graph.edge_index)
            loss = graph.mean(F.mse_loss(out, graph.y, reduction="none"))
            loss.backward()
        vc.data_parallel.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    sent = sum(call.sent for call in calls if call.name.startswith("exchange"))
    return losses, graph.num_owned, len(graph.halo(graph.x)), sent


def numbers(launch=vc.launch):
    """Return the numbers of the picture by number of ranks."""
    found = {}
    for world in WORLDS:
        losses, owned, halo, sent = zip(*launch(train, world), strict=True)
        assert all(each == losses[0] for each in losses), "ranks return one loss"
        found[str(world)] = {"losses": losses[0], "owned": owned, "halo": halo, "sent": sent}
    return found


def fewest(halo):
    """Return the bytes of a step that sends each halo row, and its gradient back, once."""
    rows = WIDTHS[:-1]  # a layer sends its input
    return halo * BYTES * (sum(rows) + sum(rows[1:]))  # the input needs no gradient


def difference(found):
    """Return the largest relative difference of a loss from that of one rank."""
    losses = np.array([found[str(world)]["losses"] for world in WORLDS])
    return abs(losses / losses[0] - 1).max()


def draw_mesh(axes, ranks):
    points, triangles = mesh()
    owner = vc.graph.assign(flow(), ranks, "rcb").numpy()[triangles]
    one = (owner == owner[:, :1]).all(axis=1)
    pieces = np.where(one[:, None], np.array([to_rgb(c) for c in figures.RANKS])[owner[:, 0]], 1)
    axes.add_collection(PolyCollection(points[triangles], facecolors=pieces, edgecolors="white"))
    axes.collections[0].set_linewidth(0.4)
    axes.set(xlim=(points[:, 0].min(), points[:, 0].max()), aspect="equal")
    axes.set(ylim=(points[:, 1].min(), points[:, 1].max()))
    axes.axis("off")


def draw(found):
    """Return the picture of these numbers."""
    figure = plt.figure(figsize=(figures.WIDTH, 6.0), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 1], width_ratios=[1.25, 1], wspace=0.06)
    axes = figure.add_subplot(grid[0, :])
    draw_mesh(axes, 3)
    first, second, third = found["3"]["owned"]
    axes.set_title(f"One mesh: 3 ranks own {first}, {second} and {third} nodes")

    axes = figure.add_subplot(grid[1, 0])
    looks = [
        {"color": figures.LAND, "lw": 9},
        {"color": figures.CURVES[0], "lw": 4},
        {"color": figures.RANKS[1], "lw": 1.8, "ls": (0, (2, 1.5))},
    ]
    for world, look in zip(WORLDS, looks, strict=True):
        name = f"{world} rank{'s' if world > 1 else ''}"
        axes.semilogy(found[str(world)]["losses"], label=name, solid_capstyle="round", **look)
    axes.set(xlabel="step", ylabel="mean squared error")
    axes.set_title("Losses on 1, 2 and 3 ranks: one curve")
    ticks = [0.05, 0.1, 0.2, 0.5]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.legend(handlelength=3)

    axes = figure.add_subplot(grid[1, 1])
    names = "varcomm", "all rows to all ranks"
    for place, world in enumerate(WORLDS[1:]):
        one = found[str(world)]
        every = fewest(sum(one["owned"]) * (world - 1))
        for side, value in enumerate((sum(one["sent"]), every)):
            colour = (figures.CURVES[0], figures.LAND)[side]
            at = place + 0.4 * side - 0.2
            axes.bar(at, value / 1000, 0.38, color=colour, label=None if place else names[side])
            axes.text(at, value / 1000, f"{value / 1000:,.0f}", ha="center", va="bottom")
    axes.set_xticks(range(2), [f"{world} ranks" for world in WORLDS[1:]])
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_ylim(0, 1.45 * every / 1000)
    axes.legend(loc="upper left", borderaxespad=0)
    axes.set_title("KB sent for layers, per step")
    return figure


if __name__ == "__main__":
    found = numbers()
    with plt.rc_context(figures.style()):
        save(draw(found), PICTURE, numbers=found, colours=64)
    print("largest difference of a loss from that of one rank:", difference(found))
    print("last losses:", [found[str(world)]["losses"][-1] for world in WORLDS])
