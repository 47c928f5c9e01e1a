"""
Your first halo exchange
========================

You will solve the heat equation on a rod that is split unevenly over three ranks, exchange the rows
at the borders with an :class:`varcomm.ExchangePlan`, and differentiate through all time steps. You
need to know PyTorch; the :doc:`first tutorial <01_uneven_shards>` says what ranks and shards are.
"""

# %%
# Who owns what
# -------------
#
# The rod has 48 points. Rank 0 owns the first 19, rank 1 the next 6, rank 2 the rest: ranks *own*
# rows, and each row has one owner. To make a time step, a rank also needs the point left of its
# first one and the point right of its last one. These are its *halo*: read-only copies of rows that
# others own, and filling them is a *halo exchange*.

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

import varcomm as vc

SIZES = vc.ShardSizes([19, 6, 23])
ranks = vc.Ranks(len(SIZES))


def needed_by(rank):
    """The points next to this rank's own, in the numbers of the whole rod."""
    own = SIZES.range(rank)
    return [
        point for point in (own.start - 1, own.stop) if 0 <= point < SIZES.total
    ]


# %%
# Each rank says what it needs, in the numbers of the whole rod. Who has to send it is found by
# arithmetic on ``SIZES``, and the ranks tell each other once. The result is a *plan*: frozen,
# checked, and used at every step.


def make_plan(rank):
    return vc.ExchangePlan.from_needed(torch.tensor(needed_by(rank)), SIZES)


def describe(rank):
    plan = make_plan(rank)
    return (
        f"rank {rank}: sends its rows {plan.send_index.tolist()}, {plan.send_counts} to each rank; "
        f"receives {plan.recv_counts} from each"
    )


print("\n".join(ranks.run(describe)))

# %%
# The plan as a picture: a line a rank, owned points filled, the halo in the colour of its owner.

COLOURS = [
    "#56b4e9",
    "#e69f00",
    "#cc79a7",
]  # one a rank; told apart by colour-blind readers too

figure, ax = plt.subplots(figsize=(9, 2.2), facecolor="white", layout="constrained")
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
    "What each rank owns (filled) and copies from others (hatched)", loc="left"
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

# %%
# A time step
# -----------
#
# ``plan(u)`` sends own rows and returns those that arrive, in the order in which they were asked
# for: the left neighbour first. At the two ends of the rod no heat passes, as if the next point
# were as warm as the last.
#
# ``solve`` is what a rank runs. It is also what one process runs, with ``None`` for the plan: there
# are no borders then but the two ends.

STEPS = 60


def solve(u, plan, rank):
    """Temperatures after all steps; u is this rank's part of those before."""
    left_border = plan is not None and rank > 0
    for _ in range(STEPS):
        halo = u[:0] if plan is None else plan(u)
        left = halo[:1] if left_border else u[:1]
        right = halo[-1:] if len(halo) > left_border else u[-1:]
        wide = torch.cat([left, u, right])
        u = u + 0.4 * (wide[:-2] - 2 * u + wide[2:])
    return u


def initial(points):
    """Warm in two places; in float64, to see rounding alone."""
    x = torch.tensor(points, dtype=torch.float64)
    return torch.exp(-(((x - 16) / 2) ** 2)) + 0.6 * torch.exp(
        -(((x - 33) / 3) ** 2)
    )


# %%
# Forward and backward on three ranks
# -----------------------------------
#
# We ask how much the temperature at one point at the end depends on each temperature at the start.
# That point belongs to rank 1. The other ranks do not know it: their part of the loss is zero, and
# they call ``backward`` all the same. At each of the steps, backward of the exchange sends the
# gradient of a copy back to the row's owner, which adds it to its own.

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
# One process, to compare
# -----------------------

whole_start = initial(range(SIZES.total)).requires_grad_()
whole_end = solve(whole_start, None, 0)
whole_end[POINT].backward()

print(f"temperatures differ by at most {(end - whole_end).abs().max():.1e}")
print(
    f"gradients differ by at most    {(gradient - whole_start.grad).abs().max():.1e}"
)

# %%
# What if the ranks did not exchange anything? Each piece of the rod would then be a rod of its own,
# and nothing would warn: shapes fit, no rank waits, and the numbers are wrong.

alone_end, alone_gradient = (
    torch.cat(shards) for shards in zip(*ranks.run(on_ranks, False), strict=True)
)

figure, axes = plt.subplots(
    2, 1, figsize=(9, 6), sharex=True, facecolor="white", layout="constrained"
)
panels = [
    ("Temperature after the last step", whole_end.detach(), end, alone_end),
    (
        f"How the last temperature at point {POINT} depends on the first ones",
        whole_start.grad,
        gradient,
        alone_gradient,
    ),
]
for ax, (title, of_one, of_ranks, without) in zip(axes, panels, strict=True):
    for rank in range(len(SIZES)):
        own = SIZES.range(rank)
        ax.axvspan(
            own.start - 0.5, own.stop - 0.5, color=COLOURS[rank], alpha=0.15, lw=0
        )
    ax.plot(
        without,
        color="#6b747b",
        ls=":",
        lw=2,
        label="three ranks that do not exchange",
    )
    ax.plot(of_one, color="#22272b", lw=1.5, label="one process")
    for rank in range(len(SIZES)):
        own = SIZES.range(rank)
        ax.plot(
            own,
            of_ranks[own.start : own.stop],
            "o",
            ms=5,
            color=COLOURS[rank],
            label=f"rank {rank}",
        )
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
figure.legend(
    *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5
)
axes[1].set_xlabel("point of the rod")
axes[1].set_xlim(-0.5, SIZES.total - 0.5)
plt.show()

# %%
# What it costs
# -------------
#
# A plan knows what a call sends, and :func:`varcomm.trace` counts what was sent in forward and
# backward: a message to each neighbour, with the rows that it needs and no others.


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
# What to take away
# -----------------
#
# - Each row has one owner. A halo is a copy of rows that others own, and an exchange fills it.
# - Make a plan once, from the rows that you need; call it at every step.
# - Autograd goes through it: the gradient of a copy returns to the owner and is added there.
# - All ranks call ``backward``, also those whose part of the loss is zero.
#
# All about plans is on :doc:`their own page </how_it_works/plans>`. A mesh has borders of any
# shape. Next: :doc:`partition a mesh and look at it <03_partition_a_mesh>`.
