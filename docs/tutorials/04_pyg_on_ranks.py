"""
Train a PyG model on several ranks
==================================

You have a training script of PyTorch Geometric, and its graph has become too large for one process.
This tutorial changes such a script so that three ranks train on one graph, and compares losses,
parameters and predictions with one process. The tutorial takes 10 minutes. You need to know how a
PyTorch model is trained and which layers PyTorch Geometric has.
"""

# %%
# Task and model
# --------------
#
# Sensors on a plate with a hole measure a temperature, with noise. A node is a sensor. Edges join
# each sensor to its neighbours in a triangulation. The model predicts temperatures without the
# noise. It learns from the nodes of ``train_mask``, whose true temperature is known.

import difflib
import inspect

import torch
import torch.nn.functional as F
from scipy.spatial import Delaunay
from torch_geometric.data import Data
from torch_geometric.nn import GAT
from torch_geometric.utils import to_undirected

import varcomm as vc


def plate(points=3000):
    generator = torch.Generator().manual_seed(0)
    pos = torch.rand(points, 2, generator=generator, dtype=torch.float64)
    pos = pos[(pos - 0.5).norm(dim=1) > 0.2]  # the hole
    triangles = torch.from_numpy(Delaunay(pos.numpy()).simplices).long()
    edges = torch.cat(
        [triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]
    )
    length = (pos[edges[:, 0]] - pos[edges[:, 1]]).norm(dim=1)
    edges = edges[length < 0.1]  # no edges across the hole
    y = torch.sin(6 * pos[:, :1]) * torch.cos(9 * pos[:, 1:])
    noise = 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return Data(
        x=torch.cat([pos, y + noise], dim=1),
        pos=pos,
        y=y,
        edge_index=to_undirected(edges.T.contiguous()),
        train_mask=torch.rand(len(pos), generator=generator) < 0.3,
    )


data = plate()
print(data)


def new_model():
    """Return PyG's GAT, without biases, which the norms would cancel."""
    torch.manual_seed(0)  # the same parameters on every rank and in one process
    model = GAT(
        3, 32, num_layers=3, out_channels=1, heads=4, norm="batch_norm", bias=False
    )
    return model.double()  # fp64, so that differences are rounding only


# %%
# In one process
# --------------

STEPS = 40


def in_one_process(data):
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        prediction = model(data.x, data.edge_index)
        mask = data.train_mask
        loss = F.mse_loss(prediction[mask], data.y[mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prediction.detach(), model.state_dict()


losses, prediction, state = in_one_process(data)

# %%
# On three ranks
# --------------
#
# Five changes, numbered below, make the script run on ranks.
#
# 1. ``vc.init()`` joins the ranks that ``torchrun``, ``srun`` or ``mpiexec`` has started. Here,
#    :func:`varcomm.launch` starts three local ranks instead.
# 2. ``partition`` returns this rank's part of the graph. ``graph.x``, ``graph.y`` and
#    ``graph.train_mask`` hold the rows of the nodes that this rank owns.
# 3. ``distribute`` returns the same model. The layers of the model now fetch the rows of other
#    ranks' nodes, and the norms use the mean and variance over the nodes of all ranks.
# 4. ``graph.mean`` is the mean over the nodes of all ranks.
# 5. ``sum_gradients`` sums the gradients of all ranks, once per step.
#    ``DistributedDataParallel`` would average the gradients.


def on_ranks(rank, data):  # 1
    graph = vc.graph.partition(data)  # 2
    model = vc.graph.distribute(new_model(), graph)  # 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        prediction = model(graph.x, graph.edge_index)
        mask = graph.train_mask
        error = F.mse_loss(prediction[mask], graph.y[mask], reduction="none")
        loss = graph.mean(error, mask)  # 4
        loss.backward()
        vc.data_parallel.sum_gradients(model)  # 5
        optimizer.step()
        losses.append(loss.item())
    prediction = graph.gather(prediction.detach(), dst=0)  # all nodes
    return losses, prediction, model.state_dict(), graph.owned_ids, graph.report()


results = vc.launch(on_ranks, 3, data)
losses_of_ranks, prediction_of_ranks, state_of_ranks, _, report = results[0]
print(report)

# %%
# ``in_one_process`` and ``on_ranks`` differ in these lines:

lines = [
    inspect.getsource(function).splitlines()
    for function in (in_one_process, on_ranks)
]
print("\n".join(list(difflib.unified_diff(*lines, n=1, lineterm=""))[3:]))

# %%
# Compare the results
# -------------------
#
# Both runs started with the same parameters. A small error in one gradient would grow over the
# steps. The remaining differences are rounding errors, because ranks add the same numbers in
# another order.


def worst(ours, theirs):
    """Return the largest difference relative to the largest entry."""
    ours, theirs = (
        torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs)
    )
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


apart = max(worst(state_of_ranks[name], state[name]) for name in state)
print(f"loss, first and last: {losses[0]:.4f}, {losses[-1]:.4f}")
print(f"losses differ by      {worst(losses_of_ranks, losses):.1e}")
print(f"predictions differ by {worst(prediction_of_ranks, prediction):.1e}")
print(f"parameters differ by  {apart:.1e}")
print(f"equal on all ranks:   {all(r[0] == losses_of_ranks for r in results)}")

# %%
# Pictures
# --------

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt

COLOURS = vc._figures.RANKS[:3]
plt.rcParams |= vc._figures.style()
figure, axes = plt.subplots(2, 2, figsize=(7.2, 6), layout="constrained")
parts, measured, curve, predicted = axes.flat
for rank, (result, colour) in enumerate(zip(results, COLOURS, strict=True)):
    own = data.pos[result[3]]
    parts.scatter(*own.T, s=5, color=colour, label=f"rank {rank}")
parts.set_title("Owner of each node")
below = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, 0),
    "ncols": 3,
}
parts.legend(**below, markerscale=3, columnspacing=1)
maps = {
    measured: (data.x[:, 2], "Measured"),
    predicted: (prediction_of_ranks[:, 0], "Predicted by three ranks"),
}
for ax, (values, title) in maps.items():
    shown = ax.scatter(*data.pos.T, c=values, s=5, vmin=-1, vmax=1, cmap="viridis")
    ax.set_title(title)
figure.colorbar(
    shown, ax=predicted, shrink=0.7, extend="both", label="temperature (scaled)"
)
for ax in (parts, measured, predicted):
    ax.set_aspect("equal")
    ax.set_axis_off()
curve.plot(losses, color=vc._figures.INK, lw=1.5, label="one process")
curve.plot(
    losses_of_ranks,
    "o",
    ms=5,
    mfc="none",
    color=vc._figures.CURVES[0],
    label="three ranks",
)
curve.set_title("Training loss: both coincide")
curve.set_ylabel("mean squared error")
curve.set_xlabel("step")
curve.set_yscale("log")
curve.legend()
plt.show()
# sphinx_gallery_end_ignore

# %%
# Summary
# -------
#
# - The model does not change. Five lines of the script change.
# - Losses, parameters and predictions equal those of one process, to rounding.
# - ``distribute`` refuses layers that cannot be exact on a partitioned graph, and its error states
#   the reason.
# - ``vc.testing.same_as_one_process(model, data)`` makes this comparison for your own model.
#
# Next: :doc:`second derivatives and forces <05_forces>`. Reference:
# :doc:`partitioned graphs </graphs>`.
