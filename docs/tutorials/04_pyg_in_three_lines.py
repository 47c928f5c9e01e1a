"""
A PyG model in three lines
==========================

You will take a graph network of PyTorch Geometric that trains in one process, let three ranks train
it on one graph, and check that losses, parameters and predictions are the same. You need to know
how a model is trained with PyTorch and what PyTorch Geometric's layers do.
"""

# %%
# A task and a model
# ------------------
#
# The graph is the world ocean on a grid of 3 degrees: a node is a sea cell, edges join it to its
# neighbours. From position, depth, and temperature and salinity at the surface, the model predicts
# the temperature at 400 m, and learns from four tiles of the map in five.

import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from _examples import EXAMPLES  # beside this script
from torch_geometric.nn import GAT

import varcomm as vc

sys.path.append(str(EXAMPLES / "ocean"))
import ocean

data = ocean.load(spacing=3)
data.x, data.y = data.x.double(), data.y.double()  # so that we see rounding alone
print(data)


def new_model():
    """PyG's own graph attention network, without biases: the norms would cancel them."""
    torch.manual_seed(0)  # the same parameters on every rank, and in one process
    return GAT(6, 32, num_layers=3, out_channels=1, heads=4, norm="batch_norm", bias=False).double()


# %%
# In one process
# --------------
#
# The training that everybody knows. The target is unknown where the sea is shallower than 400 m, so
# the loss takes the rows of the mask.

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
# Three lines take the model to many ranks. The first, ``vc.init()``, joins a program that
# ``torchrun``, ``srun`` or ``mpirun`` has started; inside of :func:`varcomm.launch`, as here, this
# is done. The other two are marked below:
#
# - ``partition`` gives this rank its part of the graph: ``graph.x``, ``graph.y`` and
#   ``graph.train_mask`` are the rows of its own nodes.
# - ``distribute`` takes the model as it is, and lets it exchange halos where its layers propagate.
#   Normalisation over nodes becomes normalisation over the nodes of all ranks.
#
# The rest is what a loss on several ranks needs: a mean over the nodes of *all* ranks, and a sum of
# the gradients, of which each rank has the part that its own nodes brought.


def on_ranks(rank, data):
    graph = vc.graph.partition(data)  # line 2
    model = vc.graph.distribute(new_model(), graph)  # line 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        prediction = model(graph.x, graph.edge_index)
        mask = graph.train_mask
        loss = graph.mean(F.mse_loss(prediction[mask], graph.y[mask], reduction="none"), mask)
        loss.backward()
        vc.data_parallel.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "prediction": graph.gather(prediction.detach(), dst=0),  # in the order of the whole graph
        "state": model.state_dict(),
        "owned": graph.owned_ids,
        "report": graph.report(),
    }


results = vc.launch(on_ranks, 3, data)
found = results[0]
print(found["report"])

# %%
# One answer
# ----------
#
# Both began with the same parameters. Were one gradient wrong by a little, after so many steps they
# would be apart. What is left is rounding, as sums are added up in another order.


def worst(ours, theirs):
    """The largest difference, by the largest entry."""
    ours, theirs = (torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs))
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


print(f"loss, first and last: {losses[0]:.4f}, {losses[-1]:.4f}")
print(f"losses differ by      {worst(found['losses'], losses):.1e}")
print(f"predictions differ by {worst(found['prediction'], prediction):.1e}")
print(
    f"parameters differ by  {max(worst(found['state'][name], state[name]) for name in state):.1e}"
)
print(f"equal on all ranks:   {all(other['losses'] == found['losses'] for other in results)}")

# %%
# What the ranks saw
# ------------------

COLOURS = ["#56b4e9", "#e69f00", "#cc79a7"]  # one a rank; told apart by colour-blind readers too
latitude, longitude = data.pos.T.numpy()
longitude = (longitude - 20) % 360  # begin in Africa, so that each ocean is in one piece

square = {"s": 7, "marker": "s", "lw": 0}

figure, axes = plt.subplots(2, 2, figsize=(11, 5.8), facecolor="white", layout="constrained")
parts, curve, map_of_ranks, difference = axes.flat

for rank, (result, colour) in enumerate(zip(results, COLOURS, strict=True)):
    own = result["owned"]
    parts.scatter(longitude[own], latitude[own], color=colour, label=f"rank {rank}", **square)
parts.set_title("Who owns which nodes", loc="left")
below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 3, "frameon": False}
parts.legend(**below, markerscale=3, columnspacing=1)

curve.plot(losses, color="#22272b", lw=1.5, label="one process")
curve.plot(found["losses"], "o", ms=5, mfc="none", color="#0072b2", label="three ranks")
curve.set_title("Training loss", loc="left")
curve.set_xlabel("step")
curve.set_yscale("log")
curve.legend(frameon=False)
curve.spines[["top", "right"]].set_visible(False)

celsius = (found["prediction"] * data.y_std + data.y_mean)[:, 0]
shown = map_of_ranks.scatter(
    longitude, latitude, c=celsius, vmin=0, vmax=18, cmap="viridis", **square
)
figure.colorbar(shown, ax=map_of_ranks, shrink=0.7, extend="both", label="°C")
map_of_ranks.set_title("Predicted by three ranks: temperature at 400 m", loc="left")

apart = (found["prediction"] - prediction).abs()[:, 0] * data.y_std
exponent = apart.clamp(min=1e-18).log10()
shown = difference.scatter(longitude, latitude, c=exponent, vmin=-17, cmap="cividis", **square)
figure.colorbar(shown, ax=difference, shrink=0.7, extend="min", label="power of ten, °C")
difference.set_title("Difference to one process", loc="left")

for ax in (parts, map_of_ranks, difference):
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
plt.show()

# %%
# The difference does not follow the borders of the parts: there is nothing special about a node
# whose neighbours are on another rank.
#
# What to take away
# -----------------
#
# - ``vc.init``, ``partition``, ``distribute``: the model itself does not change.
# - The loss is ``graph.mean(...)``, over the nodes of all ranks; ``sum_gradients`` comes before
#   ``optimizer.step()``, and takes the place of ``DistributedDataParallel``, which would average.
# - Losses, parameters and predictions are those of one process, to rounding.
# - A layer that cannot be exact on parts is refused by ``distribute``, with the reason.
#
# Next: :doc:`second derivatives and forces <05_forces>`. What else a partitioned graph can do:
# :doc:`partitioned graphs </graphs>`.
