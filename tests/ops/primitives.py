"""Every primitive in one table: what each rank puts in, how it calls it, what one process gives.

A reference is made of plain torch operations on the inputs of all ranks, so that autograd of it is
the single-process twin of every derivative as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import pytest
import torch

import varcomm
from varcomm import ExchangePlan, ShardSizes
from varcomm.transport.group import resolve

PATTERNS = ("even", "off by one", "one empty", "all on one")

# Numbers of ranks with a pattern: every pattern and every number, in few pairs.
SLOW = [(2, "even"), (2, "one empty"), (3, "even"), (3, "all on one"), (5, "off by one")]
SPLITS = [
    (1, "even"),
    (3, "off by one"),
    (3, "one empty"),
    *[pytest.param(*split, marks=pytest.mark.slow) for split in SLOW],
]


@dataclass(frozen=True)
class Setting:
    """How rows are split, along which dimension of what, and who is the root."""

    sizes: tuple[int, ...]
    dim: int = 0
    rest: tuple[int, ...] = ()
    root: int = 0

    @property
    def ranks(self):
        return len(self.sizes)

    @property
    def axis(self):
        return self.dim % (len(self.rest) + 1)

    def shape(self, rows):
        return (*self.rest[: self.axis], rows, *self.rest[self.axis :])

    @property
    def shards(self):
        return tuple(self.shape(rows) for rows in self.sizes)

    @property
    def whole(self):
        return self.shape(sum(self.sizes))

    @property
    def counts(self):
        """Rows from i to j: not symmetric, and some pairs have none where a size is zero."""
        n = self.ranks
        return [[self.sizes[(2 * i + j) % n] for j in range(n)] for i in range(n)]

    def drawn(self, high, count, seed):
        """Indices below `high`, in no order, with repeats; none if there is nothing to pick."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(max(high, 1), (count if high else 0,), generator=generator)

    @cached_property
    def indices(self):
        """Own rows for each rank: ``indices[i][j]`` are those from i to j."""
        return [
            [self.drawn(n, (i + 2 * j + 1) % 4, 10 * i + j) for j in range(self.ranks)]
            for i, n in enumerate(self.sizes)
        ]

    @cached_property
    def needed(self):
        """Global rows that each rank needs: owner by owner, own ones too, in no order within."""
        owned = ShardSizes(self.sizes)
        return [
            torch.cat(
                [
                    owned.offsets[i] + self.drawn(n, (3 * i + j + 1) % 4, 10 * j + i)
                    for i, n in enumerate(self.sizes)
                ]
            )
            for j in range(self.ranks)
        ]

    @cached_property
    def needed_indices(self):
        """Those of `needed`, as each owner's rows for each rank."""
        owned = ShardSizes(self.sizes)
        return [
            [ids[owned.owner(ids) == i] - owned.offsets[i] for ids in self.needed]
            for i in range(self.ranks)
        ]


def setting(pattern, ranks, dim=0, rest=(2, 3)):
    """Split rows by `pattern`; no root is where torch's defaults would put it if it can be."""
    if pattern == "even":
        return Setting((2,) * ranks, dim, rest, root=ranks - 1)
    if pattern == "off by one":
        return Setting(ShardSizes.balanced(2 * ranks - 1, ranks), dim, rest, root=ranks // 2)
    if pattern == "one empty":
        empty = min(1, ranks - 1)  # and it is the root
        sizes = tuple(0 if rank == empty else 1 + rank % 3 for rank in range(ranks))
        return Setting(sizes, dim, rest, root=empty)
    return Setting((*[0] * (ranks - 1), 4), dim, rest, root=0)


@dataclass(frozen=True)
class Case:
    """One primitive in one setting.

    `bind` is collective and gives what a rank calls as ``op(x)`` or ``op(x, async_op=True)``;
    `reference` takes the inputs of all ranks and gives the outputs of all. The shape is None where
    a rank has no input. Losses are "own", one per rank; or "one", which all ranks compute of a
    replicated result; or "alike", of replicated inputs as well.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    bind: Callable
    reference: Callable
    sums: bool = False
    has_async: bool = True
    losses: str = "own"

    def draw(self, dtype, seed=0):
        """Draw the inputs of all ranks, alike on every rank."""
        generator = torch.Generator().manual_seed(seed)
        if self.losses == "alike":
            return [random(self.shapes[0], dtype, generator)] * len(self.shapes)
        return [s if s is None else random(s, dtype, generator) for s in self.shapes]

    def filled(self, dtype, seed=0):
        """Draw inputs of all ranks; a rank without one has one like the root's, as in a graph."""
        drawn = self.draw(dtype, seed)
        like = next(x for x in drawn if x is not None)
        return [torch.ones_like(like) if x is None else x for x in drawn]

    def input(self, rank, dtype, seed=0):
        """Draw this rank's input; where it has none, one that is not to be read."""
        x = self.draw(dtype, seed)[rank]
        return torch.ones(3, dtype=dtype) if x is None else x


PRIMITIVES = {}


def primitive(builder):
    PRIMITIVES[builder.__name__] = builder
    return builder


def case(name, pattern, ranks, dim=0, rest=(2, 3)):
    return PRIMITIVES[name](setting(pattern, ranks, dim, rest))


def calling(op, *arguments):
    """Return the `bind` of a call with the same arguments on all ranks."""
    return lambda group=None: lambda x, **how: op(x, *arguments, group=group, **how)


def rank_in(group):
    return resolve(group).rank


def at_root(s, shape):
    return tuple(shape if rank == s.root else None for rank in range(s.ranks))


def whole_of(xs):
    return sum(xs[1:], xs[0])


@primitive
def all_gather_v(s):
    call = calling(varcomm.all_gather_v, s.sizes, s.dim)
    return Case(s.shards, call, lambda xs: [torch.cat(xs, s.dim)] * s.ranks)


@primitive
def gather_v(s):
    def reference(xs):
        whole = torch.cat(xs, s.dim)
        return [whole if r == s.root else whole.narrow(s.dim, 0, 0) for r in range(s.ranks)]

    return Case(s.shards, calling(varcomm.gather_v, s.sizes, s.dim, s.root), reference)


@primitive
def scatter_v(s):
    call = calling(varcomm.scatter_v, s.sizes, s.dim, s.root)
    return Case(at_root(s, s.whole), call, lambda xs: list(xs[s.root].split(s.sizes, s.dim)))


@primitive
def reduce_scatter_v(s):
    call = calling(varcomm.reduce_scatter_v, s.sizes, s.dim)
    return Case(
        (s.whole,) * s.ranks, call, lambda xs: list(whole_of(xs).split(s.sizes, s.dim)), sums=True
    )


@primitive
def all_to_all_v(s):
    def bind(group=None):
        rank = rank_in(group)
        send, recv = s.counts[rank], [row[rank] for row in s.counts]
        return lambda x, **kw: varcomm.all_to_all_v(x, send, recv, s.dim, group, **kw)

    def reference(xs):
        blocks = [x.split(row, s.dim) for x, row in zip(xs, s.counts, strict=True)]
        return [torch.cat(column, s.dim) for column in zip(*blocks, strict=True)]

    return Case(tuple(s.shape(sum(row)) for row in s.counts), bind, reference)


@primitive
def indexed_all_to_all_v(s):
    def bind(group=None):
        rows = [index.tolist() for index in s.indices[rank_in(group)]]
        sizes = [[len(index) for index in row] for row in s.indices]

        def call(x, **kw):
            indices = [torch.tensor(row, dtype=torch.int64) for row in rows]  # fake where x is
            return varcomm.indexed_all_to_all_v(x, indices, sizes, dim=s.dim, group=group, **kw)

        return call

    return Case(s.shards, bind, lambda xs: exchanged(xs, s.indices, s.dim))


@primitive
def transpose_v(s):
    """Unsharded along the dimension before: its sizes are the same in reverse."""
    split_dim, split_sizes = (s.axis or len(s.rest) + 1) - 1, s.sizes[::-1]
    shards = []
    for rows in s.sizes:
        shape = list(s.whole)
        shape[split_dim], shape[s.axis] = sum(s.sizes), rows
        shards.append(tuple(shape))
    call = calling(varcomm.transpose_v, split_dim, split_sizes, s.dim, s.sizes)
    return Case(
        tuple(shards), call, lambda xs: list(torch.cat(xs, s.dim).split(split_sizes, split_dim))
    )


@primitive
def shard_v(s):
    def reference(xs):
        return [x.split(s.sizes, s.dim)[rank] for rank, x in enumerate(xs)]

    call = calling(varcomm.shard_v, s.sizes, s.dim)
    return Case((s.whole,) * s.ranks, call, reference, has_async=False)


@primitive
def all_reduce(s):
    call = calling(varcomm.all_reduce)
    return Case((s.whole,) * s.ranks, call, lambda xs: [whole_of(xs)] * s.ranks, sums=True)


@primitive
def reduce(s):
    def reference(xs):
        total = whole_of(xs)
        return [total if rank == s.root else torch.zeros_like(total) for rank in range(s.ranks)]

    def bind(group=None):
        return lambda x, **kw: varcomm.reduce(x, s.root, group=group, **kw)

    return Case((s.whole,) * s.ranks, bind, reference, sums=True)


@primitive
def broadcast(s):
    def bind(group=None):
        return lambda x, **kw: varcomm.broadcast(x, s.root, group=group, **kw)

    return Case(at_root(s, s.whole), bind, lambda xs: [xs[s.root]] * s.ranks)


def with_like(s, rows, call, reference):
    """A call with `like`: the root sends no description; `rows` has the input of a non-root."""

    def bind(group=None):
        at_root = rank_in(group) == s.root
        return lambda x, **kw: call(x if at_root else None, like=x, group=group, **kw)

    shapes = tuple(s.whole if rank == s.root else s.shape(rows) for rank in range(s.ranks))
    return Case(shapes, bind, reference)


@primitive
def scatter_v_like(s):
    call = partial(varcomm.scatter_v, sizes=s.sizes, dim=s.dim, src=s.root)
    return with_like(s, 3, call, scatter_v(s).reference)  # of any number of rows


@primitive
def broadcast_like(s):
    call = partial(varcomm.broadcast, src=s.root)
    return with_like(s, sum(s.sizes), call, broadcast(s).reference)


@primitive
def plan_from_indices(s):
    call = planned(plan_of_indices, s)
    return Case(s.shards, call, lambda xs: exchanged(xs, s.indices, s.dim))


@primitive
def plan_from_needed(s):
    def reference(xs):
        whole = torch.cat(xs, s.dim)
        return [whole.index_select(s.dim, ids.to(whole.device)) for ids in s.needed]

    return Case(s.shards, planned(plan_of_needed, s), reference)


@primitive
def adjoint_from_indices(s):
    return adjoint_case(s, s.indices, plan_of_indices)


@primitive
def adjoint_from_needed(s):
    return adjoint_case(s, s.needed_indices, plan_of_needed)


def plan_of_indices(s, group=None):
    rank = rank_in(group)
    return ExchangePlan.from_indices(s.indices[rank], s.sizes[rank], None, group)


def plan_of_needed(s, group=None):
    return ExchangePlan.from_needed(s.needed[rank_in(group)], s.sizes, group)


def planned(plan_of, s):
    def bind(group=None):
        plan = plan_of(s, group)
        return lambda x, async_op=False: plan.start(x, s.dim) if async_op else plan(x, s.dim)

    return bind


def adjoint_case(s, indices, plan_of):
    def bind(group=None):
        plan = plan_of(s, group)
        return lambda y: plan.adjoint(y, s.dim)

    def reference(ys):
        counts = [[len(row[j]) for row in indices] for j in range(s.ranks)]
        blocks = [y.split(count, s.dim) for y, count in zip(ys, counts, strict=True)]
        totals = []
        for i, n in enumerate(s.sizes):
            total = ys[0].new_zeros(s.shape(n))
            for j in range(s.ranks):
                total = total.index_add(s.dim, indices[i][j], blocks[j][i])
            totals.append(total)
        return totals

    received = [sum(len(row[j]) for row in indices) for j in range(s.ranks)]
    shapes = tuple(s.shape(rows) for rows in received)
    return Case(shapes, bind, reference, sums=True, has_async=False)


def exchanged(xs, indices, dim):
    """Give each rank the rows that are for it, sender by sender."""
    ranks = range(len(xs))
    return [torch.cat([xs[i].index_select(dim, indices[i][j]) for i in ranks], dim) for j in ranks]


def random(shape, dtype, generator):
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-(2**60), 2**60, shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
