"""
Your first halo exchange
========================

.. index:: ! halo exchange, ! halo, ! ghost exchange

You split a simulation over ranks, and at each border a rank needs its neighbour's values. This
tutorial solves the heat equation on a rod that is split over three ranks. Ranks exchange the rows
at their borders with an :class:`varcomm.ExchangePlan`, and gradients flow through all time steps.
The tutorial takes 10 minutes. You need to know PyTorch, and :doc:`ranks and shards
<01_uneven_shards>`.
"""

# %%
# Owned rows and halo rows
# ------------------------
#
# The rod has 48 points. Rank 0 owns the first 19 points, rank 1 the next 6, and rank 2 the last 23.
# Each point has one owner. For a time step, a rank also needs the point left of its first point and
# the point right of its last point. These copies of other ranks' rows are the rank's *halo* (ghost
# cells). A *halo exchange* fills the halo.

import torch

import varcomm as vc

SIZES = vc.ShardSizes([19, 6, 23])
ranks = vc.Ranks(len(SIZES))


def needed_by(rank):
    """Return the points next to the rank's points, with indices of the full rod."""
    own = SIZES.range(rank)
    return [
        point for point in (own.start - 1, own.stop) if 0 <= point < SIZES.total
    ]


# %%
# Each rank lists the rows that it needs, with their indices in the full rod. ``SIZES`` determines
# the owner of each row, and each rank sends its list to the owners once. The result is a *plan*,
# which you make once and call at every step.


def make_plan(rank):
    return vc.ExchangePlan.from_needed(torch.tensor(needed_by(rank)), SIZES)


def describe(rank):
    plan = make_plan(rank)
    return (
        f"rank {rank}: sends its rows {plan.send_index.tolist()}, "
        f"{plan.send_counts} per rank; receives {plan.recv_counts} per rank"
    )


print("\n".join(ranks.run(describe)))

# %%
# The picture shows the plan, with one line per rank. Owned points are filled. Halo points are
# hatched in the colour of their owner.

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

COLOURS = vc._figures.RANKS
plt.rcParams |= vc._figures.style()

figure, ax = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
for rank in range(len(SIZES)):
    for point in SIZES.range(rank):
        ax.add_patch(
            Rectangle((point - 0.45, -rank), 0.9, 0.7, facecolor=COLOURS[rank])
        )
    for point in needed_by(rank):
        owner = COLOURS[SIZES.owner(point)]
        style = {
            "facecolor": "white",
            "edgecolor": owner,
            "hatch": "/////",
            "lw": 1.5,
        }
        ax.add_patch(Rectangle((point - 0.4, -rank + 0.05), 0.8, 0.6, **style))
ax.set_title(
    "Owned points (filled) and halo points (hatched) of each rank", loc="left"
)
ax.set_xlim(-0.6, SIZES.total - 0.4)
ax.set_ylim(1 - len(SIZES) - 0.1, 0.8)
ax.set_yticks(
    [0.35 - rank for rank in range(len(SIZES))], ["rank 0", "rank 1", "rank 2"]
)
ax.tick_params(left=False)
ax.set_xlabel("point of the rod")
ax.spines[["left", "top", "right"]].set_visible(False)
plt.show()
# sphinx_gallery_end_ignore

# %%
# A time step
# -----------
#
# ``plan(u)`` sends rows of ``u`` and returns the received rows, in the order in which the rank
# listed them: the left neighbour first. The two ends of the rod are insulated.
#
# ``solve`` runs on each rank, and also in one process with ``plan=None``.

STEPS = 60


def solve(u, plan, rank):
    """Return the final temperatures of the points whose initial ones are u."""
    left_border = plan is not None and rank > 0
    for _ in range(STEPS):
        halo = u[:0] if plan is None else plan(u)
        left = halo[:1] if left_border else u[:1]
        right = halo[-1:] if len(halo) > left_border else u[-1:]
        wide = torch.cat([left, u, right])
        u = u + 0.4 * (wide[:-2] - 2 * u + wide[2:])
    return u


def initial(points):
    """Return temperatures with two warm places, in fp64."""
    x = torch.tensor(points, dtype=torch.float64)
    return torch.exp(-(((x - 16) / 2) ** 2)) + 0.6 * torch.exp(
        -(((x - 33) / 3) ** 2)
    )


# %%
# Forward and backward on three ranks
# -----------------------------------
#
# The loss is the final temperature at one point. The gradient of the loss shows how much this final
# temperature depends on each initial temperature. Rank 1 owns the point, so the loss of the other
# ranks is zero. The other ranks must also call ``backward``. At each step, the backward of the
# exchange sends the gradient of a halo row to the owner of the row. The owner adds this gradient to
# its own gradient for the row.

POINT = 22


def on_ranks(rank, exchange=True):
    plan = make_plan(rank) if exchange else None
    start = initial(SIZES.range(rank)).requires_grad_()
    end = solve(start, plan, rank)
    own = torch.tensor(SIZES.range(rank)) == POINT
    end[own].sum().backward()
    return end.detach(), start.grad


parts = ranks.run(on_ranks)
end, gradient = (torch.cat(shards) for shards in zip(*parts, strict=True))

# %%
# Compare with one process
# ------------------------

whole_start = initial(range(SIZES.total)).requires_grad_()
whole_end = solve(whole_start, None, 0)
whole_end[POINT].backward()

apart = (end - whole_end).abs().max(), (gradient - whole_start.grad).abs().max()
print(f"temperatures differ by at most {apart[0]:.1e}")
print(f"gradients differ by at most    {apart[1]:.1e}")

# %%
# Without the exchange, each part of the rod is computed as a separate rod. No error is raised,
# because all shapes match, but the numbers are wrong.

alone_end, alone_gradient = (
    torch.cat(shards) for shards in zip(*ranks.run(on_ranks, False), strict=True)
)
print(f"temperatures differ by up to {(alone_end - whole_end).abs().max():.2f}")

# sphinx_gallery_start_ignore
figure, axes = plt.subplots(
    2, 1, figsize=(7.2, 5.4), sharex=True, layout="constrained"
)
panels = [
    (
        "Final temperature",
        "temperature (scaled)",
        whole_end.detach(),
        end,
        alone_end,
    ),
    (
        f"Gradient of the final temperature at point {POINT}",
        "gradient (per unit)",
        whole_start.grad,
        gradient,
        alone_gradient,
    ),
]
for ax, (title, unit, of_one, of_ranks, without) in zip(axes, panels, strict=True):
    for rank in range(len(SIZES)):
        own = SIZES.range(rank)
        ax.axvspan(
            own.start - 0.5, own.stop - 0.5, color=COLOURS[rank], alpha=0.3, lw=0
        )
    ax.plot(
        without,
        color=vc._figures.PALE,
        ls=":",
        lw=2,
        label="three ranks without exchange",
    )
    ax.plot(of_one, color=vc._figures.INK, lw=1.5, label="one process")
    for rank in range(len(SIZES)):
        own = SIZES.range(rank)
        ax.plot(
            own,
            of_ranks[own.start : own.stop],
            "o",
            ms=5,
            color=COLOURS[rank],
            mec=vc._figures.INK,
            mew=0.4,
            label=f"rank {rank}",
        )
    ax.set_title(title)
    ax.set_ylabel(unit)
figure.legend(
    *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3
)
axes[1].set_xlabel("point of the rod")
axes[1].set_xlim(-0.5, SIZES.total - 0.5)
plt.show()
# sphinx_gallery_end_ignore

# %%
# Messages and bytes
# ------------------
#
# ``plan.nbytes`` returns the bytes that one call sends. :func:`varcomm.trace` counts messages and
# bytes, forward and backward. A rank sends one message to each neighbour, with only the rows that
# the neighbour needs.


def count(rank):
    plan = make_plan(rank)
    start = initial(SIZES.range(rank)).requires_grad_()
    with vc.trace() as calls:
        solve(start, plan, rank).sum().backward()
    return (
        f"one exchange sends {plan.nbytes(start)} bytes from rank {rank}\n\n{calls}"
    )


print(ranks.run(count)[1])
ranks.close()

# %%
# Summary
# -------
#
# - Make a plan once, from the rows that you need, and call it at every step.
# - Autograd differentiates the exchange: the gradient of a halo row returns to the owner of the
#   row, which adds it to its own gradient.
# - All ranks call ``backward``, including ranks whose part of the loss is zero.
#
# Next: :doc:`partition a mesh and draw the parts <03_partition_a_mesh>`. Reference: :doc:`plans
# </explanation/plans>`.
