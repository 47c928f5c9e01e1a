"""
Uneven shards and the primitives
================================

.. index:: ! uneven all_gather, ! all gather different sizes, ! all_gather, ! gather rows

You have data that doesn't divide evenly over your processes, and you need gradients through their
communication. This tutorial shows which rows each collective of varcomm moves between ranks,
forward and backward. The drawings come from real runs. You need PyTorch and its autograd, and about
15 minutes. You need no MPI and no second processor: the ranks are processes on this machine.
"""

# %%
# A first run
# -----------
#
# A *rank* is one of several processes that run the same function. Each rank holds a part of a
# tensor, its *shard*. Shards may differ in length: ``sizes`` lists the rows per rank, and zero is
# allowed.
#
# :class:`varcomm.Ranks` starts processes on this machine and keeps them for the next run.
# :func:`varcomm.launch` starts processes for a single run. Both call your function with the rank's
# number and return a list with the result of each rank.

import textwrap

import torch

import varcomm as vc

# sphinx_gallery_start_ignore
# Drawing, which the page does not show.

# isort: split
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

COLOURS = vc._figures.RANKS
plt.rcParams |= vc._figures.style()
INK, PALE = vc._figures.INK, vc._figures.PALE
# of a rank's column, of a row, between columns
WIDTH, HEIGHT, GAP = 1.5, 0.68, 0.2
BLOCK = 3 * WIDTH + 2 * GAP
ARROW = 3.4  # length of an arrow
EDGE = 0.4  # of a panel
UNIT = 3.6 / (2 * BLOCK + ARROW + 2 * EDGE)  # inches
PITCH = 1.08 * HEIGHT


def words(ax, x, y, text, color=INK, **style):
    ax.text(x, y, text, ha="center", va="center", color=color, **style)


def draw_entry(ax, x, y, width, marks, counts):
    """Draw one entry as a box, with a field for each entry that it contains."""
    sources = [k for k, count in enumerate(marks.int()) for _ in range(count)]
    x, width = x + 0.03, width - 0.06
    if not sources:
        ax.add_patch(
            Rectangle(
                (x, y), width, HEIGHT, facecolor="white", edgecolor=PALE, lw=0.7
            )
        )
        words(ax, x + width / 2, y + HEIGHT / 2, "0", color=PALE)
    for place, source in enumerate(sources):
        owner = next(
            rank for rank in range(len(counts)) if source in counts.range(rank)
        )
        left, field = x + place * width / len(sources), width / len(sources)
        ax.add_patch(
            Rectangle((left, y), field, HEIGHT, facecolor=COLOURS[owner], lw=0)
        )
        number = source - counts.offsets[owner]
        words(ax, left + field / 2, y + HEIGHT / 2, number, color="black")


def draw_block(ax, left, top, title, found):
    """Draw the rows of all ranks at one moment, side by side."""
    words(ax, left + BLOCK / 2, top + 1.15, title)
    for rank, (entries, counts) in enumerate(found):
        x = left + rank * (WIDTH + GAP)
        words(ax, x + WIDTH / 2, top + 0.4, rank, color=PALE)
        if len(entries) == 0:
            place = x + WIDTH / 2, top - HEIGHT / 2
            words(ax, *place, "none", color=PALE, style="italic")
        for row, entry in enumerate(entries):
            width = WIDTH / len(entry)
            for column, marks in enumerate(entry):
                draw_entry(
                    ax,
                    x + column * width,
                    top - (row + 1) * PITCH,
                    width,
                    marks,
                    counts,
                )


def draw_arrow(ax, y, label, start, end):
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.5}
    ax.annotate("", (end, y), (start, y), arrowprops=style)
    words(ax, (start + end) / 2, y + 0.4, label)


def draw_panel(ax, title, found, rows):
    """Draw forward above, from left to right, and backward below, from right to left."""
    right, height = BLOCK + ARROW, rows * PITCH
    low, middle = -height - 1.9, PITCH * (1 if rows < 3 else 1.5)
    places = [(0, 0), (right, 0), (right, low), (0, low)]
    for (left, top), moment in zip(places, found[0], strict=True):
        draw_block(ax, left, top, moment, [of_rank[moment] for of_rank in found])
    for top in (0, low):
        words(ax, BLOCK + ARROW / 2, top + 0.4, "← rank →", color=PALE)
    draw_arrow(ax, -middle, "forward", BLOCK + 0.15, right - 0.15)
    draw_arrow(ax, low - middle, "backward", right - 0.15, BLOCK + 0.15)
    style = {"size": 12, "weight": "bold", "color": INK, "family": "monospace"}
    ax.text(0, 1.85, title, **style)
    ax.set_xlim(-EDGE, right + BLOCK + EDGE)
    ax.set_ylim(low - height - 0.6, 2.9)
    ax.set_aspect("equal")


def draw(panels, columns=2):
    """Return a figure with one panel per collective."""
    names = list(panels)
    lines = [
        names[start : start + columns] for start in range(0, len(names), columns)
    ]
    rows = [
        max(
            len(part[0])
            for name in line
            for of_rank in panels[name]
            for part in of_rank.values()
        )
        for line in lines
    ]
    heights = [2 * count * PITCH + 5.4 for count in rows]
    figure, axes = plt.subplots(
        len(lines),
        columns,
        figsize=(3.6 * columns, UNIT * sum(heights)),
        height_ratios=heights,
        squeeze=False,
    )
    figure.subplots_adjust(0, 0, 1, 1, wspace=0, hspace=0)
    for ax in axes.flat:
        ax.axis("off")
    for line, across, count in zip(lines, axes, rows, strict=True):
        for name, ax in zip(line, across, strict=False):
            draw_panel(ax, name, panels[name], count)
    return figure


def explain(figure):
    """Draw the legend into the last panel of a figure."""
    lines = [
        "Colour: the rank that held the row\nwhen the arrow began.",
        "Number: the row's place on that rank.",
        "Several fields: a sum of rows.",
        "No colour: zeros.",
    ]
    ax = figure.axes[-1]
    ax.text(
        0.1,
        0.5,
        "\n\n".join(lines),
        transform=ax.transAxes,
        va="center",
        color=INK,
    )


# sphinx_gallery_end_ignore

SIZES = [3, 0, 1]
ranks = vc.Ranks(len(SIZES))


def first_run(rank):
    own = (10.0 * rank + torch.arange(SIZES[rank])).requires_grad_()
    full = vc.all_gather_v(own, SIZES)
    sums = vc.reduce_scatter_v(full, SIZES)
    full.sum().backward()
    return [x.tolist() for x in (own, full, sums, own.grad)]


for rank, lists in enumerate(ranks.run(first_run)):
    own, full, sums, gradient = lists
    print(f"rank {rank} has {own}, gathers {full},")
    print(f"       sums {sums}, and has the gradient {gradient}")

# %%
# Every rank has received the rows of all ranks, although rank 1 has no rows. ``reduce_scatter_v``
# has summed three equal tensors, and each rank has its own rows of the sum.
#
# The gradient shows the difference from a plain copy. All three ranks used every row in their own
# loss, so the gradient of a row is the sum of three gradients. Two of the three gradients came from
# other ranks. Therefore *backward is collective too*: every rank must call it.

# %%
# all_gather_v and reduce_scatter_v
# ---------------------------------
#
# ``all_gather_v`` copies the rows of all ranks to every rank. ``reduce_scatter_v`` sums full
# tensors of all ranks and leaves each rank its own rows of the sum.
#
# To see which rows a collective moves, mark each entry with a vector of its own: a one in one
# place, and zeros elsewhere. A copy keeps its mark, and a sum has the marks of all its terms.
# ``follow`` marks the input of a collective and, for backward, the gradient of its result.
# ``shapes`` lists the shape of each rank's input, with None for a rank without input.

MARKS = 16  # at least the number of entries on all ranks


def marked(shape, first):
    """Return a tensor of this shape, and one more dimension with the marks."""
    count = torch.Size(shape).numel()
    return torch.eye(MARKS)[first : first + count].view(*shape, MARKS)


def follow(rank, primitive, shapes):
    """Run forward and backward on marked rows; None is a rank without input."""
    inputs = vc.ShardSizes(
        0 if shape is None else torch.Size(shape).numel() for shape in shapes
    )
    x = None
    if shapes[rank] is not None:
        x = marked(shapes[rank], inputs.offsets[rank]).requires_grad_()
    result = primitive(rank, x)
    results = vc.ShardSizes.from_local(result[..., 0].numel())
    gradient = marked(result.shape[:-1], results.offsets[rank])
    result.backward(gradient)
    nothing = torch.empty(0, 1, MARKS)
    before, back = (nothing, nothing) if x is None else (x.detach(), x.grad)
    return {
        "input": (before, inputs),
        "result": (result.detach(), inputs),
        "result gradient": (gradient, results),
        "input gradient": (back, results),
    }


# %%
# The drawings show the result of ``follow``. In each drawing, the upper half is the forward pass,
# from left to right. The lower half is the backward pass, from right to left. The colour of a row
# shows which rank held the row at the start of the arrow, and the number is the index of the row on
# that rank. A row with several fields is the sum of several rows.

drawn = {
    "all_gather_v": ranks.run(
        follow, lambda rank, x: vc.all_gather_v(x, SIZES), [(n, 1) for n in SIZES]
    ),
    "reduce_scatter_v": ranks.run(
        follow, lambda rank, x: vc.reduce_scatter_v(x, SIZES), [(4, 1)] * 3
    ),
}
# sphinx_gallery_start_ignore
draw(drawn)
plt.show()
# sphinx_gallery_end_ignore

# %%
# The backward pass in each drawing is the forward pass in the other drawing. The two collectives
# are *adjoints* of each other: as matrices of zeros and ones, each is the transpose of the other.
#
# gather_v and scatter_v
# ----------------------
#
# ``gather_v`` collects all rows on the rank ``dst``. The other ranks receive a tensor without rows
# that belongs to the autograd graph, so that they can call ``backward``. ``scatter_v`` sends each
# rank its rows of the tensor on rank ``src``. The other ranks pass None instead of a tensor.

pair = {
    "gather_v": ranks.run(
        follow,
        lambda rank, x: vc.gather_v(x, SIZES, dst=0),
        [(n, 1) for n in SIZES],
    ),
    "scatter_v": ranks.run(
        follow, lambda rank, x: vc.scatter_v(x, SIZES, src=0), [(4, 1), None, None]
    ),
}
# sphinx_gallery_start_ignore
draw(pair)
plt.show()
drawn |= pair
# sphinx_gallery_end_ignore

# %%
# all_to_all_v and indexed_all_to_all_v
# -------------------------------------
#
# ``all_to_all_v`` sends a block of rows from each rank to each rank. ``indexed_all_to_all_v`` sends
# chosen rows, in any order and any number of times. Backward returns the gradients of all copies of
# a row and sums them. In the drawing, the gradient of a row that was sent twice therefore has two
# fields. A halo exchange uses ``indexed_all_to_all_v``. If you repeat the same exchange, make a
# :class:`varcomm.ExchangePlan`: it runs the checks once, and you call it at every step.

BLOCKS = [
    [1, 2, 0],
    [1, 0, 1],
    [0, 1, 1],
]  # BLOCKS[i][j]: rows from rank i to rank j
CHOSEN = [
    [[], [2, 0], [2]],
    [[1], [], [1]],
    [[], [0], []],
]  # CHOSEN[i][j]: which ones


def all_to_all(rank, x):
    return vc.all_to_all_v(x, BLOCKS[rank], [row[rank] for row in BLOCKS])


def indexed(rank, x):
    indices = [torch.tensor(rows, dtype=torch.int64) for rows in CHOSEN[rank]]
    return vc.indexed_all_to_all_v(
        x, indices, [[len(rows) for rows in row] for row in CHOSEN]
    )


pair = {
    "all_to_all_v": ranks.run(
        follow, all_to_all, [(sum(row), 1) for row in BLOCKS]
    ),
    "indexed_all_to_all_v": ranks.run(follow, indexed, [(3, 1), (2, 1), (1, 1)]),
}
# sphinx_gallery_start_ignore
draw(pair)
plt.show()
drawn |= pair
# sphinx_gallery_end_ignore

# %%
# broadcast, reduce, all_reduce and shard_v
# -----------------------------------------
#
# ``broadcast`` and ``reduce`` are adjoints of each other. ``all_reduce`` is its own adjoint: if
# every rank uses the sum in its loss, each rank's row contributes to all of these losses.
# ``shard_v`` selects the rank's rows of a tensor that all ranks have, without a message. The
# backward of ``shard_v`` puts these rows into a tensor of zeros.

four = {
    "broadcast": ranks.run(
        follow, lambda rank, x: vc.broadcast(x, src=0), [(2, 1), None, None]
    ),
    "reduce": ranks.run(follow, lambda rank, x: vc.reduce(x, dst=0), [(2, 1)] * 3),
    "all_reduce": ranks.run(follow, lambda rank, x: vc.all_reduce(x), [(2, 1)] * 3),
    "shard_v": ranks.run(
        follow, lambda rank, x: vc.shard_v(x, SIZES), [(4, 1)] * 3
    ),
}
# sphinx_gallery_start_ignore
draw(four)
plt.show()
drawn |= four
# sphinx_gallery_end_ignore

# %%
# Other dimensions and transpose_v
# --------------------------------
#
# All collectives accept ``dim``. ``transpose_v`` accepts two dimensions: a tensor sharded by rows
# becomes sharded by columns. For example, attention can use ``transpose_v`` to convert shards of a
# sequence to shards of heads, and back.

drawn["transpose_v"] = ranks.run(
    follow,
    lambda rank, x: vc.transpose_v(
        x, split_dim=1, split_sizes=[1, 1, 2], concat_dim=0, concat_sizes=[2, 1, 1]
    ),
    [(2, 4), (1, 4), (1, 4)],
)
# sphinx_gallery_start_ignore
draw({"transpose_v": drawn["transpose_v"]}, columns=1)
plt.show()
# sphinx_gallery_end_ignore

# %%
# Test an adjoint
# ---------------
#
# The adjoint :math:`A^*` of :math:`A` satisfies
# :math:`\langle A x, y \rangle = \langle x, A^* y \rangle` for all :math:`x` and :math:`y`. The
# inner products are summed over ranks.
#
# :func:`varcomm.testing.dot_test` draws a random :math:`y` and raises an error on every rank if the
# two sides differ by more than rounding. Use ``dot_test`` for your own functions. Here ``dot_test``
# finds a backward that lacks the sum over ranks:


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return vc.all_gather_v(shard, SIZES)

    @staticmethod
    def backward(ctx, gradient):
        return vc.shard_v(gradient, SIZES)  # without the other ranks' gradients


def prove(rank):
    shard = torch.randn(SIZES[rank], 2, dtype=torch.float64)
    vc.testing.dot_test(lambda x: vc.all_gather_v(x, SIZES), shard)
    try:
        vc.testing.dot_test(Forgetful.apply, shard)
    except AssertionError as error:
        return str(error)


print(textwrap.fill(ranks.run(prove)[0], 84))

# %%
# Wrong use is an error
# ---------------------
#
# Each rank checks its own arguments before it sends. Some mistakes, such as sizes that differ
# between ranks, can be found only by comparing ranks. Inside ``with vc.debug():`` ranks compare
# each call, and all ranks raise the same error. Use ``debug()`` while you develop: without
# ``debug()``, ranks that disagree may wait until the timeout. This code prints only the first line
# of the error. The other lines name the line of code on each rank.


def disagree(rank):
    sizes = [3, 0, 1] if rank != 2 else [3, 1, 1]
    try:
        with vc.debug():
            vc.all_gather_v(torch.zeros(sizes[rank], 2), sizes)
    except vc.DisagreementError as error:
        return str(error).splitlines()[0]


print(ranks.run(disagree)[0])

# %%
# All collectives in one figure
# -----------------------------

# sphinx_gallery_start_ignore
overview = draw(drawn, columns=2)
explain(overview)
plt.show()
# sphinx_gallery_end_ignore
ranks.close()

# %%
# Summary
# -------
#
# - The backward of a copy is a sum, and the backward of a sum is a copy. Each backward is the
#   adjoint of its forward. ``backward`` differentiates the sum of all ranks' losses.
# - All ranks make the same calls in the same order, in forward and in backward.
# - ``vc.testing.dot_test`` tests adjoints; ``vc.debug()`` finds ranks that disagree.
#
# Next: :doc:`your first halo exchange <02_first_halo_exchange>`. Theory:
# :doc:`adjoints </explanation/adjoints>`.
