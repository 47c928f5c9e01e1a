"""Suites of layers on a partitioned graph, and of tensor-parallel layers.

Graph: bytes are the mean over ranks of the features of owned nodes. The mesh is a grid with edges
to eight neighbours, cut into strips. Backward includes the gradients of nodes and edges. Contenders
differ in the halo exchange. "sage" is the mean over incoming edges and two linears, and
"mesh_graph_net" is a block of varcomm.models.MeshGraphNet.

Tensor parallelism: bytes are of the full input. Linears have as many tokens as features, the cross
entropy has eight times as many classes as tokens. The floors are the same products and sums by
torch, into new memory, and bare collectives, in sequence.
"""

from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from suite.exchanges import bare_backward, bare_forward
from suite.floors import schedules
from suite.peers import PEERS, CannotError, anemoi_halo
from suite.task import FLOOR, OURS, PEER, Contender, Layout, Task, contender, tolerance
from torch.nn.functional import cross_entropy, linear

import varcomm as vc
from varcomm.cli.workload import shard_sizes

COLUMNS = 8
# Numbers per token that ranks exchange for a cross entropy: the largest logit, the sum of
# exponentials, and the target's logit, in fp32.
NUMBERS = 3


def made(what, shape, dtype, device, scale=1.0):
    """Return values that are equal on all ranks."""
    generator = torch.Generator().manual_seed(crc32(what.encode()))
    return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)


class Halo(Layout):
    """The layout of a partitioned graph's plan, with the rows of this rank."""

    def indices(self, sender):
        assert sender == self.rank
        return list(self.plan.send_index.split(self.send))

    @property
    def home(self):
        return self.plan.send_index


def build_graph(case, peers, device):
    """Prepare a graph layer on this rank."""
    rank, world, dtype = dist.get_rank(), case.world, getattr(torch, case.dtype)
    width = 64 if case.nbytes >= 16 * 2**10 else 8
    height = max(2, round(case.nbytes / (COLUMNS * width * dtype.itemsize)))
    columns = shard_sizes(case.skew, COLUMNS * world, world)
    sizes = [height * count for count in columns]
    edges = grid(sum(columns), height).to(device)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    into = torch.nonzero((edges[1] >= own.start) & (edges[1] < own.stop)).view(-1)
    graph = vc.graph.from_edges(edges[:, into], sizes)
    layout = halo_of(graph, sizes, width, dtype, device)
    back = replace(layout, matrix=layout.transposed().matrix)
    vars(back)["plan"] = graph.plan
    x = made("x", (sum(sizes), width), dtype, device)
    y = made("y", (sum(sizes), width), dtype, device) if case.backward else None
    make, inputs, gradient, expected = GRAPH[case.operation](graph, x, y, edges, own, into)
    fetches = [(OURS, OURS, graph.with_halo)]
    fetches += [(name, FLOOR, fetch) for name, fetch in bare(case, layout, back).items()]
    cannot = {name: "fetches no halo" for name in PEERS if name != "anemoi"} if peers else {}
    if peers:
        try:
            fetches.append(("anemoi", PEER, anemoi_halo(layout)))
        except CannotError as error:
            cannot["anemoi"] = str(error)
    exact = 0.0 if case.operation == "with_halo" and not case.backward else tolerance(case)
    return Task(
        [
            contender(name, kind, make(kind, fetch), inputs, gradient)
            for name, kind, fetch in fetches
        ],
        expected,
        exact if case.operation == "with_halo" else 3 * exact,  # layers in bf16 round at each step
        sum(sizes) * width * dtype.itemsize // world,
        layout.skew,
        (back if case.backward else layout).fewest(),
        cannot,
    )


def halo_of(graph, sizes, width, dtype, device):
    """Return the layout of a graph's plan: this rank's row and column of its counts."""
    rank, matrix = dist.get_rank(), [[0] * len(sizes) for _ in sizes]
    matrix[rank] = list(graph.plan.send_counts)
    for peer, rows in enumerate(graph.plan.recv_counts):
        matrix[peer][rank] = rows
    layout = Halo(rank, sizes, matrix, width, dtype, device)
    vars(layout)["plan"] = graph.plan
    return layout


def bare(case, layout, back):
    """Return the bare schedules as autograd functions."""
    forward = schedules(case.engine, "pick_rows", layout)
    backward = schedules(case.engine, "sum_rows", back)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name, ctx.mine = name, len(x)
            return bare_forward(forward[name], x)

        @staticmethod
        def backward(ctx, gradient):
            return bare_backward(ctx.mine, backward[ctx.name], gradient.contiguous()), None

    return {name: lambda x, name=name: Bare.apply(x, name) for name in forward}


def with_halo(graph, x, y, edges, own, into):
    here = torch.cat([graph.owned_ids, graph.halo_ids])
    if y is None:
        return lambda kind, fetch: fetch, x[own], None, x[here]
    # a gradient counts once per copy of its row
    copies = 1 + torch.bincount(graph.plan.send_index, minlength=graph.num_owned)
    expected = (x[own].double() * copies[:, None]).to(x.dtype)
    return lambda kind, fetch: fetch, x[own], x[here], expected


def sage(graph, x, y, edges, own, into):
    torch.manual_seed(0)
    width = x.shape[1]
    of_own, of_others = (torch.nn.Linear(width, width).to(x.device, x.dtype) for _ in range(2))

    def layer(edge_index, fetch, x):
        source, target = edge_index
        count = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x.dtype)
        total = torch.zeros_like(x).index_add(0, target, fetch(x).index_select(0, source))
        return of_own(x) + of_others(total / count[:, None])

    full = contender("", OURS, partial(layer, edges, lambda x: x), x, y).run()
    gradient = None if y is None else y[own]
    return (
        lambda kind, fetch: partial(layer, graph.edge_index.plain, fetch),
        x[own],
        gradient,
        (full.detach()[own]),
    )


def run_block(block, fetch, source, target, x, e):
    """Run a block of MeshGraphNet in plain torch; `fetch` returns the rows that sources select."""
    of_sources = fetch(block.from_source(x)).index_select(0, source)
    of_targets = block.from_target(x).index_select(0, target)
    e = e + block.edge_mlp(of_targets + of_sources + block.from_edge(e))
    received = torch.zeros_like(x).index_add(0, target, e)
    return x + block.node_mlp(torch.cat([x, received], dim=1)), e


def mesh_graph_net(graph, x, y, edges, own, into):
    from varcomm.models.mesh_graph_net import GraphNetBlock

    def block():
        torch.manual_seed(0)
        return GraphNetBlock(x.shape[1]).to(x.device, x.dtype)

    plain, distributed = block(), vc.graph.distribute(block(), graph)

    def layer(edge_index, fetch, x, e):
        return run_block(plain, fetch, *edge_index, x, e)[0]

    def make(kind, fetch):
        if kind == OURS:
            return lambda x, e: distributed(x, graph.edge_index, e)[0]
        return partial(layer, graph.edge_index.plain, fetch)

    e = made("edges", (edges.shape[1], x.shape[1]), x.dtype, x.device)
    full = contender("", OURS, partial(layer, edges, lambda x: x), (x, e), y).run()
    inputs = x[own], e[into]
    if y is None:
        return make, inputs, None, full.detach()[own]
    return make, inputs, y[own], (full[0][own], full[1][into])


GRAPH = {"with_halo": with_halo, "sage": sage, "mesh_graph_net": mesh_graph_net}


def grid(columns, height):
    """Return directed edges to eight neighbours; nodes are numbered column by column."""
    number = torch.arange(columns * height).view(columns, height)
    pairs = [
        (number[:-1], number[1:]),
        (number[:, :-1], number[:, 1:]),
        (number[:-1, :-1], number[1:, 1:]),
        (number[1:, :-1], number[:-1, 1:]),
    ]
    there = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in pairs], dim=1)
    return torch.cat([there, there.flip(0)], dim=1)


@dataclass(frozen=True)
class Parts:
    """Tokens and features of all ranks, and the part of this rank."""

    case: object
    rank: int
    tokens: int
    features: int
    device: object

    @property
    def dtype(self):
        return getattr(torch, self.case.dtype)

    def sizes(self, count):
        return shard_sizes(self.case.skew, count, self.case.world)

    def own(self, count):
        start = sum(self.sizes(count)[: self.rank])
        return slice(start, start + self.sizes(count)[self.rank])

    def made(self, what, *shape, scale=1.0):
        return made(what, shape, self.dtype, self.device, scale)

    def layout(self, sizes, matrix, width, dtype):
        return Layout(self.rank, sizes, matrix, width, dtype, self.device)

    def rows(self, are_summed):
        """Gather the rows of a sequence, or sum them over ranks."""
        sizes = self.sizes(self.tokens)
        matrix = [sizes if are_summed else [size] * len(sizes) for size in sizes]
        return self.layout(sizes, matrix, self.features, self.dtype)


def build_tensor_parallel(case, peers, device):
    """Prepare a tensor-parallel operation on this rank."""
    count = case.nbytes / getattr(torch, case.dtype).itemsize
    is_loss = case.operation == "cross_entropy"
    tokens = max(1, round((count / 8) ** 0.5 if is_loss else count**0.5))
    parts = Parts(case, dist.get_rank(), tokens, 8 * tokens if is_loss else tokens, device)
    function, inputs, gradient, floors, expected, fewest = TENSOR_PARALLEL[case.operation](parts)
    split = parts.sizes(parts.features if is_loss else tokens)
    return Task(
        [
            contender(OURS, OURS, function, inputs, gradient),
            *(Contender(name, FLOOR, run) for name, run in floors.items()),
        ],
        expected,
        3 * tolerance(case),
        tokens * parts.features * parts.dtype.itemsize,
        max(split) * len(split) / max(sum(split), 1),
        fewest,
        dict.fromkeys(PEERS, "no uneven tensor parallelism") if peers else {},
    )


def wide(function, *inputs):
    """Return the expected result, computed in fp64."""
    return function(*(x.double() for x in inputs)).to(inputs[0].dtype)


def column_linear(parts):
    """Gather the rows of a sequence, and compute own columns."""
    tokens, features = parts.tokens, parts.features
    rows, columns = parts.own(tokens), parts.own(features)
    x = parts.made("x", tokens, features)
    weight = parts.made("weight", features, features, scale=features**-0.5)
    own, own_weight = x[rows], weight[columns].contiguous()
    ours = partial(
        vc.tensor_parallel.column_parallel_linear,
        sequence_sizes=parts.sizes(tokens),
        save="gathered",
    )
    if not parts.case.backward:
        layout = parts.rows(are_summed=False)
        ways = schedules(parts.case.engine, "all_gather", layout)
        floors = {name: lambda way=way: linear(way(own), own_weight) for name, way in ways.items()}
        return ours, (own, own_weight), None, floors, wide(linear, x, own_weight), layout.fewest()
    gradients = parts.made("y", tokens, features)
    gradient, layout = gradients[:, columns].contiguous(), parts.rows(are_summed=True)
    ways = schedules(parts.case.engine, "reduce_scatter", layout)
    floors = {
        name: lambda way=way: (way(gradient @ own_weight), gradient.T @ x)
        for name, way in ways.items()
    }
    both = wide(torch.matmul, gradients, weight)[rows], wide(torch.matmul, gradient.T, x)
    return ours, (own, own_weight), gradient, floors, both, layout.fewest()


def row_linear(parts):
    """Sum the products of all ranks, and keep own rows."""
    tokens, features = parts.tokens, parts.features
    rows, columns = parts.own(tokens), parts.own(features)
    x = parts.made("x", tokens, features)
    weight = parts.made("weight", features, features, scale=features**-0.5)
    own, own_weight = x[:, columns].contiguous(), weight[:, columns].contiguous()
    ours = partial(vc.tensor_parallel.row_parallel_linear, sequence_sizes=parts.sizes(tokens))
    if not parts.case.backward:
        layout = parts.rows(are_summed=True)
        ways = schedules(parts.case.engine, "reduce_scatter", layout)
        floors = {name: lambda way=way: way(linear(own, own_weight)) for name, way in ways.items()}
        expected = wide(linear, x, weight)[rows]
        return ours, (own, own_weight), None, floors, expected, layout.fewest()
    gradients, layout = parts.made("y", tokens, features), parts.rows(are_summed=False)
    gradient = gradients[rows]

    def backward(way):
        full = way(gradient)
        return full @ own_weight, full.T @ own

    ways = schedules(parts.case.engine, "all_gather", layout)
    floors = {name: partial(backward, way) for name, way in ways.items()}
    expected = wide(torch.matmul, gradients, own_weight), wide(torch.matmul, gradients.T, own)
    return ours, (own, own_weight), gradient, floors, expected, layout.fewest()


def loss_of_classes(parts):
    """Return the loss per token from logits that are sharded by classes."""
    tokens, classes, world = parts.tokens, parts.features, parts.case.world
    own, full = parts.own(classes), parts.made("logits", tokens, classes)
    logits = full[:, own].contiguous()
    of_loss = torch.promote_types(parts.dtype, torch.float32)
    target = torch.arange(tokens, device=parts.device) * 7 % classes
    here = ((target >= own.start) & (target < own.stop)).nonzero().view(-1)
    local = target[here] - own.start

    def ours(x):
        return vc.tensor_parallel.vocab_parallel_cross_entropy(x, target, parts.sizes(classes))

    if not parts.case.backward:
        layout = parts.layout([tokens] * world, [[tokens] * world] * world, NUMBERS, of_loss)

        def forward(way):
            z = logits.to(of_loss)
            mine = z.new_zeros(tokens, NUMBERS)
            if z.shape[1]:
                mine[:, 0] = z.amax(1)
                mine[:, 1] = (z - mine[:, :1]).exp_().sum(1)
            else:
                mine[:, 0] = -torch.inf
            mine[here, 2] = z[here, local]
            largest, total, found = way(mine).view(-1, tokens, NUMBERS).unbind(2)
            highest = largest.amax(0)
            return (total * (largest - highest).exp()).sum(0).log() + highest - found.sum(0)

        ways = schedules(parts.case.engine, "all_gather", layout)
        floors = {name: partial(forward, way) for name, way in ways.items()}
        expected = cross_entropy(full.double(), target, reduction="none").to(of_loss)
        return ours, logits, None, floors, expected, layout.fewest()
    gradient = parts.made("loss", tokens).to(of_loss)
    z = full.double().requires_grad_()
    loss = cross_entropy(z, target, reduction="none")
    (of_logits,) = torch.autograd.grad(loss, z, gradient.double())
    likely = full.double().softmax(1)[:, own].to(of_loss)

    def backward():
        result = likely * gradient[:, None]
        result[here, local] -= gradient[here]
        return result.to(parts.dtype)

    expected = of_logits[:, own].to(parts.dtype)
    return ours, logits, gradient, {"no messages": backward}, expected, (0, 0)


TENSOR_PARALLEL = {
    "column_linear": column_linear,
    "row_linear": row_linear,
    "cross_entropy": loss_of_classes,
}
