"""
Uneven shards and the primitives
================================

You will learn what an uneven shard is, and what each of varcomm's primitives moves: rank by rank,
forward and backward, in drawings that are made from real runs. You need to know PyTorch and its
autograd. You need not know MPI, nor have more than one processor: the ranks here are processes on
this machine.
"""

# %%
# A first run
# -----------
#
# A *rank* is one of several processes that run the same function. Each holds its own part of a
# tensor, its *shard*. Shards need not be equally long: ``sizes`` says how many rows each rank
# holds, and zero is a size as good as any.
#
# :class:`varcomm.Ranks` starts processes on this machine and keeps them for the next run;
# :func:`varcomm.launch` does the same for a single run. Each calls the function with the number of
# its rank, and we get back a list of what all ranks returned.

import matplotlib.pyplot as plt
import torch
from _drawing import draw, explain  # beside this script

import varcomm as vc

SIZES = [3, 0, 1]
ranks = vc.Ranks(len(SIZES))


def first_run(rank):
    shard = torch.full((SIZES[rank], 2), float(rank), requires_grad=True)
    whole = vc.all_gather_v(shard, SIZES)
    whole.sum().backward()
    gradient = shard.grad[:, 0].tolist()
    return f"rank {rank}: holds {len(shard)} rows, gathers {len(whole)}, gradient {gradient}"


print("\n".join(ranks.run(first_run)))

# %%
# Every rank got all rows, although one of them brought none. The gradient tells how a primitive
# differs from a plain copy: all three ranks used every row in their own loss, so each row is used
# three times, and the gradient of a row is the sum of what three ranks say about it. It had to
# travel back. That is why *backward is collective too*: every rank has to call it.
#
# Rows that remember where they come from
# ---------------------------------------
#
# To see what moves, we give each row a mark of its own: row number ``k`` of all input is the
# ``k``-th row of an identity matrix. After any copying and adding up, a row says which input rows
# went into it. With gradients we do the same: the gradient of the result, which autograd is given
# at the start of backward, is marked row by row, and we look at what arrives at the input.

MARKS = 16  # as many as there are rows to tell apart


def marked(shape, first):
    """A tensor of this shape, with one more dimension that holds the mark of each entry."""
    count = torch.Size(shape).numel()
    return torch.eye(MARKS)[first : first + count].view(*shape, MARKS)


def follow(rank, primitive, shapes):
    """Run a primitive forward and backward on marked rows; None is a rank without input."""
    inputs = vc.ShardSizes(0 if shape is None else torch.Size(shape).numel() for shape in shapes)
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
        "gradient of the result": (gradient, results),
        "gradient of the input": (back, results),
    }


# %%
# All to all ranks, and the sum back to the owners
# ------------------------------------------------
#
# ``all_gather_v`` copies the rows of all ranks to every rank. ``reduce_scatter_v`` begins with a
# whole tensor on every rank, adds them up, and leaves each rank its own rows of the sum.
#
# In each drawing, forward is above and read from left to right; backward is below and read from
# right to left. The colour of a row is that of the rank where it was at the start of the arrow, and
# its number is its place there. A row with several fields is a sum.

drawn = {
    "all_gather_v": ranks.run(
        follow, lambda rank, x: vc.all_gather_v(x, SIZES), [(n, 1) for n in SIZES]
    ),
    "reduce_scatter_v": ranks.run(
        follow, lambda rank, x: vc.reduce_scatter_v(x, SIZES), [(4, 1)] * 3
    ),
}
draw(drawn)
plt.show()

# %%
# Look at the left drawing from below and at the right one from above: backward of the one is
# forward of the other. Such a pair are each other's *adjoints*, the transposes of two matrices that
# have a one wherever a row goes.
#
# To one rank, and from one rank
# ------------------------------
#
# ``gather_v`` collects all rows on the rank ``dst``; the others get a tensor of zero rows, which
# belongs to the graph, so that they too can call ``backward``. ``scatter_v`` hands out the rows of
# the rank ``src``; the others pass None.

pair = {
    "gather_v": ranks.run(
        follow, lambda rank, x: vc.gather_v(x, SIZES, dst=0), [(n, 1) for n in SIZES]
    ),
    "scatter_v": ranks.run(
        follow, lambda rank, x: vc.scatter_v(x, SIZES, src=0), [(4, 1), None, None]
    ),
}
draw(pair)
plt.show()
drawn |= pair

# %%
# From each rank to each
# ----------------------
#
# ``all_to_all_v`` cuts the rows of each rank into blocks, one for each rank.
# ``indexed_all_to_all_v`` lets each rank choose its rows, in any order, as often as it likes. In
# backward the gradients of all copies of a row come home and are added up: a row that is sent twice
# has two fields. This is the primitive under a halo exchange, and :class:`varcomm.ExchangePlan` is
# the same with all checks done once, for use at every step.

BLOCKS = [[1, 2, 0], [1, 0, 1], [0, 1, 1]]  # BLOCKS[i][j]: rows from rank i to rank j
CHOSEN = [[[], [2, 0], [2]], [[1], [], [1]], [[], [0], []]]  # CHOSEN[i][j]: which ones


def all_to_all(rank, x):
    return vc.all_to_all_v(x, BLOCKS[rank], [row[rank] for row in BLOCKS])


def indexed(rank, x):
    indices = [torch.tensor(rows, dtype=torch.int64) for rows in CHOSEN[rank]]
    return vc.indexed_all_to_all_v(x, indices, [[len(rows) for rows in row] for row in CHOSEN])


pair = {
    "all_to_all_v": ranks.run(follow, all_to_all, [(sum(row), 1) for row in BLOCKS]),
    "indexed_all_to_all_v": ranks.run(follow, indexed, [(3, 1), (2, 1), (1, 1)]),
}
draw(pair)
plt.show()
drawn |= pair

# %%
# Copies and sums
# ---------------
#
# ``broadcast`` and ``reduce`` are each other's adjoints. ``all_reduce`` is its own: if every rank
# uses the sum in its loss, every rank's row matters to all of these losses. ``shard_v`` keeps a
# rank's own rows of a tensor that all ranks have, without any message; backward puts them at their
# place among zeros.

four = {
    "broadcast": ranks.run(follow, lambda rank, x: vc.broadcast(x, src=0), [(2, 1), None, None]),
    "reduce": ranks.run(follow, lambda rank, x: vc.reduce(x, dst=0), [(2, 1)] * 3),
    "all_reduce": ranks.run(follow, lambda rank, x: vc.all_reduce(x), [(2, 1)] * 3),
    "shard_v": ranks.run(follow, lambda rank, x: vc.shard_v(x, SIZES), [(4, 1)] * 3),
}
draw(four)
plt.show()
drawn |= four

# %%
# Another dimension
# -----------------
#
# All of them take ``dim``. ``transpose_v`` takes two: a tensor that is sharded by rows becomes
# sharded by columns. Attention does so when it goes from shards of a sequence to shards of heads.

drawn["transpose_v"] = ranks.run(
    follow,
    lambda rank, x: vc.transpose_v(
        x, split_dim=1, split_sizes=[1, 1, 2], concat_dim=0, concat_sizes=[2, 1, 1]
    ),
    [(2, 4), (1, 4), (1, 4)],
)
draw({"transpose_v": drawn["transpose_v"]}, columns=1)
plt.show()

# %%
# Proof, not pictures
# -------------------
#
# A drawing shows one case. What defines the adjoint :math:`A^*` of :math:`A` is that :math:`\langle
# A x, y \rangle = \langle x, A^* y \rangle` for all :math:`x` and :math:`y`, with inner products
# summed over ranks. :func:`varcomm.testing.dot_test` draws :math:`y` by chance and raises on every
# rank if the two sides differ by more than rounding. It takes your own functions too, and notices a
# backward that forgets to sum over ranks:


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return vc.all_gather_v(shard, SIZES)

    @staticmethod
    def backward(ctx, gradient):
        return vc.shard_v(gradient, SIZES)  # this rank's rows of its own gradient, and no other's


def prove(rank):
    shard = torch.randn(SIZES[rank], 2, dtype=torch.float64)
    vc.testing.dot_test(lambda x: vc.all_gather_v(x, SIZES), shard)
    try:
        vc.testing.dot_test(Forgetful.apply, shard)
    except AssertionError as error:
        return str(error)


print(ranks.run(prove)[0])

# %%
# Wrong use is an error
# ---------------------
#
# A rank checks what it can before it sends anything. What no rank can see alone, such as sizes that
# differ between ranks, all ranks find out together inside ``with vc.debug():``. Use it while you
# develop; without it a disagreement may leave ranks waiting for each other. All ranks raise the
# same error; we print its first line, and what follows tells at which line of code each rank was.


def disagree(rank):
    sizes = [3, 0, 1] if rank != 2 else [3, 1, 1]
    try:
        with vc.debug():
            vc.all_gather_v(torch.zeros(sizes[rank], 2), sizes)
    except vc.DisagreementError as error:
        return str(error).splitlines()[0]


print(ranks.run(disagree)[0])
ranks.close()

# %%
# All primitives at a glance
# --------------------------

overview = draw(drawn, columns=3)
explain(overview)
plt.show()

# %%
# What to take away
# -----------------
#
# - ``sizes`` says how many rows each rank holds. Any sizes will do, zeros included.
# - Backward of a copy is a sum, and backward of a sum is a copy: each primitive's backward is its
#   adjoint, for losses that are summed over ranks.
# - All ranks make the same calls in the same order, in forward and in backward.
# - ``vc.testing.dot_test`` proves such code; ``vc.debug()`` finds ranks that disagree.
#
# Next: :doc:`your first halo exchange <02_first_halo_exchange>`. Behind it all:
# :doc:`adjoints </how_it_works/adjoints>`.
