"""
Tensor parallelism when nothing divides
=======================================

You will learn to share out the layers of a transformer over ranks whose number divides neither its
heads, nor its features, nor its vocabulary, and to get the losses and gradients of one process. You
need to know what is inside of a transformer's block. Nothing has to be rounded up to a number that
divides, and no weight is padded.
"""

# %%
# A model of awkward numbers
# --------------------------
#
# Three ranks shall share 131 tokens, 5 heads and 107 hidden features. Everywhere in varcomm,
# ``sizes`` says how much each rank holds. Balanced sizes are what is taken where we do not choose.

from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn

import varcomm as vc
from varcomm import tensor_parallel as tp
from varcomm.models import GPT

P = 3
WHOLE = {"tokens": 131, "heads": 5, "features": 107}
sizes = {name: vc.ShardSizes.balanced(n, P) for name, n in WHOLE.items()}

for name, n in WHOLE.items():
    padded = -(-n // P) * P
    print(
        f"{n:4} {name:8} = {' + '.join(map(str, sizes[name]))}   (padded, it would be {padded})"
    )

# %%
# In a picture, each bar is what one rank holds, and hatched is what padding would add:

# sphinx_gallery_start_ignore
COLOURS = [
    "#56b4e9",
    "#e69f00",
    "#cc79a7",
]  # one a rank; told apart by colour-blind readers too
INK, PALE = "#22272b", "#8a9299"
plt.rcParams |= {
    "font.size": 11,
    "axes.edgecolor": PALE,
    "figure.facecolor": "white",
}
plt.rcParams |= {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
}


def draw_sizes(sizes):
    _, axes = plt.subplots(1, len(sizes), figsize=(9, 2.6), layout="constrained")
    for ax, (name, counts) in zip(axes, sizes.items(), strict=True):
        widest = max(counts)
        for rank, count in enumerate(counts):
            ax.barh(rank, count, color=COLOURS[rank])
            padding = {
                "left": count,
                "fill": False,
                "hatch": "////",
                "edgecolor": PALE,
                "lw": 0,
            }
            ax.barh(rank, widest - count, **padding)
            ax.text(count / 2, rank, count, ha="center", va="center", weight="bold")
        ax.set_yticks(range(P), [f"rank {rank}" for rank in range(P)])
        ax.set(xticks=[], ylim=(P - 0.4, -0.6))
        ax.spines["bottom"].set_visible(False)
        ax.set_title(
            f"{counts.total} {name}", loc="left", weight="bold", fontsize=12
        )


# sphinx_gallery_end_ignore
draw_sizes(sizes)

# %%
# Two linear layers
# -----------------
#
# Megatron's pair: the first layer is split by its outputs (*column parallel*), the second one by
# its inputs (*row parallel*). Between them each rank has its own features only, and the second
# layer's results are *partial*: their sum over ranks is the value. ``from_linear`` takes each
# rank's part of a layer that is there. Here all ranks make the same layers, by the same seed.
#
# :class:`varcomm.Ranks` starts three local ranks and keeps them for all runs of this page.

ranks = vc.Ranks(P)


def two_layers(rank):
    torch.manual_seed(0)
    first, second = nn.Linear(40, 107).double(), nn.Linear(107, 40).double()
    x = torch.randn(16, 40, dtype=torch.float64, requires_grad=True)
    expected = second(torch.relu(first(x)))
    expected.square().sum().backward()
    expected_gradient, x.grad = x.grad, None

    up = tp.ColumnParallelLinear.from_linear(first)
    down = tp.RowParallelLinear.from_linear(second)
    with vc.trace() as calls:
        hidden = torch.relu(up(x))
        y = down(hidden)
        forward = len(calls)
        y.square().sum().backward()
    rows = sizes["features"].range(rank)
    weight_gradient = first.weight.grad[rows.start : rows.stop]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, expected_gradient)
    torch.testing.assert_close(up.weight.grad, weight_gradient)
    shapes = [tuple(tensor.shape) for tensor in (up.weight, hidden, down.weight)]
    return f"rank {rank}: shapes {shapes}, calls {forward} forward, {len(calls) - forward} backward"


print("\n".join(ranks.run(two_layers)))

# %%
# The shapes are those of the first weight, of what lies between the layers, and of the second
# weight; result and gradients are those of one process, or a check would have raised. One call
# forward sums the partial results, and one backward sums what ranks have for the gradient of ``x``.
# Every rank calls ``backward()`` on its copy of the same loss, and it counts once.
#
# A whole model
# -------------
#
# A small GPT that knows nothing of ranks: :class:`varcomm.models.GPT` is made of plain modules, and
# you can do the same to yours. A plan says which module becomes what. Names may have ``*``.
#
# Two details deserve a look. Queries, keys and values come from one fused layer, so its sizes are a
# list of three blocks, each split on its own. And attention wants whole heads: sizes of 8 features
# a head are multiples of 8. Five heads over three ranks are then 2, 2 and 1.

HEAD = 8  # features of one


def plan(heads, features):
    """What each module becomes, where ranks hold so many heads and hidden features."""
    queries = [HEAD * count for count in heads]
    column, row = (
        tp.ColumnParallelLinear.from_linear,
        tp.RowParallelLinear.from_linear,
    )
    return {
        "embedding": "embedding",
        "blocks.*.attention.qkv": partial(
            column, sizes=[queries, queries, queries]
        ),
        "blocks.*.attention.out": partial(row, sizes=queries),
        "blocks.*.mlp.gate_up": partial(column, sizes=[features, features]),
        "blocks.*.mlp.down": partial(row, sizes=features),
        "head": "column",
    }


TEXT = "Nothing has to divide. Five heads on three ranks are two, two and one. " * 2
ids = torch.tensor(list(TEXT.encode()))  # ASCII: tokens below 131
STEPS = 30


def train(rank, heads=None, features=None):
    """Train on the text; `rank` None is one process."""
    torch.manual_seed(0)
    model = GPT(131, 5 * HEAD, num_layers=2, num_heads=5, mlp_size=107).double()
    if rank is not None:
        tp.parallelize(model, plan(heads, features))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, gradient = [], None
    for _ in range(STEPS):
        loss = model.loss(ids[:-1], ids[1:])
        optimizer.zero_grad()
        loss.backward()
        if gradient is None:  # of the first step, put together from all ranks
            weight = model.blocks[0].attention.qkv.weight
            spec = tp.shard_spec(weight)
            gradient = (
                weight.grad.clone() if spec is None else spec.gather(weight.grad)
            )
        optimizer.step()
        losses.append(loss.item())
    return (
        losses,
        gradient,
        sum(parameter.numel() for parameter in model.parameters()),
    )


alone, true_gradient, whole = train(None)
even = ranks.run(train, sizes["heads"], sizes["features"])

# %%
# The head's weight is that of the embedding, and stays shared. The loss is computed from logits of
# which each rank has its tokens only; no rank ever has them all.
#
# Sizes as you like
# -----------------
#
# Balanced sizes suit ranks that are equally fast. Where one is slower, or has less memory, give it
# less, or nothing at all: a size may be zero. The third rank now has no head, and few features.

uneven = ranks.run(train, [3, 2, 0], [50, 50, 7])
ranks.close()


def largest_difference(found):
    """Of losses and of a gradient, on any rank, relative to those of one process."""
    losses = torch.tensor([of_rank[0] for of_rank in found], dtype=torch.float64)
    reference = torch.tensor(alone, dtype=torch.float64)
    gradients = torch.stack([of_rank[1] for of_rank in found])
    of_gradients = (
        gradients - true_gradient
    ).abs().max() / true_gradient.abs().max()
    return (
        (losses - reference) / reference
    ).abs().max().item(), of_gradients.item()


print(
    f"one process:       {whole} parameters, losses {alone[0]:.6f} to {alone[-1]:.6f}"
)
for name, found in {"heads 2 + 2 + 1": even, "heads 3 + 2 + 0": uneven}.items():
    held = " + ".join(str(of_rank[2]) for of_rank in found)
    of_losses, of_gradients = largest_difference(found)
    errors = f"losses within {of_losses:.0e}, gradient within {of_gradients:.0e}"
    print(f"{name}:   {held} parameters; {errors}")

# %%
# Rounding is all that differs. (Parameters of norms are on every rank, which is why the counts add
# up to a little more than the whole.)

# sphinx_gallery_start_ignore
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
steps = range(1, STEPS + 1)
ax.plot(steps, alone, color=INK, linewidth=1.5, label="one process")
styles = {"heads 2 + 2 + 1": (even, "o", 0), "heads 3 + 2 + 0": (uneven, "s", 1)}
for name, (
    found,
    marker,
    first,
) in styles.items():  # markers in turns, or one would hide the other
    look = {
        "color": COLOURS[first],
        "markersize": 7,
        "label": f"three ranks, {name}",
    }
    ax.plot(steps[first::2], found[0][0][first::2], marker, **look)
ax.set(
    xlabel="step", ylabel="loss, nats a token", ylim=(0, None), xlim=(0, STEPS + 1)
)
ax.set_title("The same loss at every step", loc="left", weight="bold", fontsize=12)
ax.legend(frameon=False)
# sphinx_gallery_end_ignore
plt.show()

# %%
# What to take away
# -----------------
#
# - ``sizes`` is an argument of every layer; left out, it is balanced. Zeros are sizes too.
# - Column layers split outputs, row layers inputs. A fused layer has sizes for each of its blocks,
#   and heads stay whole where sizes are multiples of a head's features.
# - ``tp.parallelize(model, plan)`` turns a model that is there into a sharded one in place, with
#   the losses and gradients of one process, to rounding.
# - ``tp.shard_spec(parameter)`` knows how a parameter is sharded, and gathers it or its gradient.
#
# Read next: :doc:`/tensor_parallel`, with sequence parallelism, a loss that never holds the logits,
# and random numbers. Then
# :doc:`sharded gradients and checkpoints </generated/tutorials/07_sharded_gradients>`.
