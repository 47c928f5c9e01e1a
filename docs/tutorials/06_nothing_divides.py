"""
Tensor parallelism with indivisible sizes
=========================================

You have a transformer with 5 attention heads, and you have three GPUs. This tutorial shards its
layers over three ranks, although three doesn't divide the numbers of heads, features and tokens.
The losses and gradients equal those of one process, without padding. The tutorial takes 15 minutes.
You need to know the layers of a transformer block.
"""

# %%
# Indivisible sizes
# -----------------
#
# Three ranks share a vocabulary of 131 tokens, 5 attention heads and 107 hidden features. In
# varcomm, ``sizes`` lists the number of tokens, heads or features on each rank. By default, sizes
# are balanced.

from functools import partial

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
    parts = " + ".join(map(str, sizes[name]))
    print(f"{n:4} {name:8} = {parts}   (with padding: {padded})")

# %%
# Each bar is the share of one rank. The hatched area is the padding that other libraries would add:

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt

COLOURS = vc._figures.RANKS
INK, PALE = vc._figures.INK, vc._figures.PALE
plt.rcParams |= vc._figures.style()


def draw_sizes(sizes):
    _, axes = plt.subplots(1, len(sizes), figsize=(7.2, 2.4), layout="constrained")
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
            middle = {"ha": "center", "va": "center"}
            ax.text(count / 2, rank, count, **middle, weight="bold", color="black")
        ax.set_yticks(range(P), [f"rank {rank}" for rank in range(P)])
        ax.set(xticks=[], ylim=(P - 0.4, -0.6))
        ax.spines["bottom"].set_visible(False)
        ax.set_title(f"{counts.total} {name}", weight="bold")


draw_sizes(sizes)
# sphinx_gallery_end_ignore

# %%
# Two linear layers
# -----------------
#
# The next script uses Megatron's pair of layers. The first layer is split by outputs (*column
# parallel*), the second by inputs (*row parallel*). Between the two layers, each rank holds only
# its own features. The result of the second layer on each rank is *partial*: the sum of these
# results over ranks is the output. ``from_linear`` copies this rank's part of an existing layer.
# Here all ranks make the same layers from the same seed.
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
    calls = f"{forward} forward, {len(calls) - forward} backward"
    return f"rank {rank}: shapes {shapes}, calls: {calls}"


print("\n".join(ranks.run(two_layers)))

# %%
# The script prints the shapes of the first weight, the hidden features and the second weight. The
# result and the gradients equal those of one process: ``assert_close`` raised no error. In forward,
# one collective sums the partial results. In backward, one collective sums the gradients of ``x``.
# Every rank calls ``backward()`` on its copy of the same loss, and the loss counts once.
#
# Shard an existing model
# -----------------------
#
# :class:`varcomm.models.GPT` is made of plain modules, without code for ranks. ``tp.parallelize``
# replaces modules according to a plan, which maps names to layers. Names may contain ``*``.
#
# Queries, keys and values come from one fused layer. The sizes of this layer are therefore a list
# with one entry per block, and each of the three blocks is split separately. Attention needs
# complete heads, so sizes are multiples of 8, the features per head. Five heads on three ranks are
# 2, 2 and 1: balanced sizes differ by at most one, and the first ranks have the larger sizes.

HEAD = 8  # features per head


def plan(heads, features):
    """Return the layer for each module, from heads and features per rank."""
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
    """Train on the text; `rank` is None in one process."""
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
        if gradient is None:  # the full gradient of the first step
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
# The output layer, ``head``, shares its weight with the embedding, in one process and on ranks.
# Each rank computes the logits for its part of the vocabulary, and the loss uses these shards of
# the logits. No rank holds all logits.
#
# Choose sizes
# ------------
#
# Balanced sizes suit ranks of equal speed. Choose a smaller size for a slower rank or a rank with
# less memory. A size may be zero. Here the third rank has no heads and few features.

uneven = ranks.run(train, [3, 2, 0], [50, 50, 7])
ranks.close()


def largest_difference(found):
    """Return the differences of losses and of a gradient from one process."""
    losses = torch.tensor([of_rank[0] for of_rank in found], dtype=torch.float64)
    reference = torch.tensor(alone, dtype=torch.float64)
    gradients = torch.stack([of_rank[1] for of_rank in found])
    of_gradients = (
        gradients - true_gradient
    ).abs().max() / true_gradient.abs().max()
    return (
        (losses - reference) / reference
    ).abs().max().item(), of_gradients.item()


losses = f"losses {alone[0]:.6f} to {alone[-1]:.6f}"
print(f"one process:       {whole} parameters, {losses}")
for name, found in {"heads 2 + 2 + 1": even, "heads 3 + 2 + 0": uneven}.items():
    held = " + ".join(str(of_rank[2]) for of_rank in found)
    of_losses, of_gradients = largest_difference(found)
    errors = f"losses within {of_losses:.0e}, gradient within {of_gradients:.0e}"
    print(f"{name}:   {held} parameters\n  {errors}")

# %%
# The differences are rounding errors. Each rank holds all parameters of the norms, so the counts of
# parameters add up to slightly more than the total.

# sphinx_gallery_start_ignore
figure, ax = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
steps = range(1, STEPS + 1)
ax.plot(steps, alone, color=INK, linewidth=1.5, label="one process")
styles = {"heads 2 + 2 + 1": (even, "o", 0), "heads 3 + 2 + 0": (uneven, "s", 1)}
for name, (
    found,
    marker,
    first,
) in styles.items():  # markers at alternate steps, so that both are visible
    look = {
        "color": vc._figures.CURVES[first],
        "mec": INK,
        "mew": 0.4,
        "markersize": 7,
        "label": f"three ranks, {name}",
    }
    ax.plot(steps[first::2], found[0][0][first::2], marker, **look)
ax.set(
    xlabel="step",
    ylabel="loss (nats per token)",
    ylim=(0, None),
    xlim=(0, STEPS + 1),
)
ax.set_title("The same loss at every step", weight="bold")
ax.legend(frameon=False)
plt.show()
# sphinx_gallery_end_ignore

# %%
# Summary
# -------
#
# - Every layer accepts ``sizes``. The default is balanced; zeros are allowed.
# - Column layers split outputs, and row layers split inputs. A fused layer has sizes for each
#   block. Heads stay complete if sizes are multiples of the features per head.
# - ``tp.shard_spec(parameter)`` returns the layout of a sharded parameter. Its ``gather`` method
#   assembles the full parameter or the full gradient.
#
# Next: :doc:`sharded gradients and checkpoints </generated/tutorials/07_sharded_gradients>`.
# Reference: :doc:`/tensor_parallel`, with sequence parallelism, a loss on sharded logits, and
# random numbers.
