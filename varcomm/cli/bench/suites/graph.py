"""The suite of graphs: layers on a mesh that is split over ranks.

Bytes are the mean over ranks of the features of own nodes, 64 numbers each, or 8 where there are
few. The mesh is a grid with edges to eight neighbours, cut into strips. A layer is computed from
own nodes to own nodes, with the gradients of nodes (and edges) in backward; contenders differ in
who fetches the halo: a partitioned graph, a bare schedule, another library.

``sage`` is the mean over incoming edges and two linears; ``mesh_graph_net`` a block of
:class:`varcomm.models.MeshGraphNet`, which varcomm runs unchanged, distributed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.bench.case import FLOOR, OURS, PEER, Case, Task
from varcomm.cli.bench.floors import schedules
from varcomm.cli.bench.layout import Layout, transposed
from varcomm.cli.bench.peers import anemoi
from varcomm.cli.bench.peers.cannot import CannotError
from varcomm.cli.bench.peers.offer import PEERS
from varcomm.cli.bench.sizes import row_width, shard_sizes
from varcomm.cli.bench.suites.ops import tolerance
from varcomm.cli.bench.suites.plan import bare_backward, bare_forward
from varcomm.cli.bench.timing import Effort
from varcomm.cli.bench.ways import contender

if TYPE_CHECKING:
    from varcomm.graph import PartitionedGraph

__all__ = ["OPERATIONS", "build"]

# From own rows to these and the halo's.
_Fetch: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_COLUMNS = 8


@dataclass(frozen=True)
class _Sent(Layout):
    """Who sends which rows to whom, as a partitioned graph's plan has it on this rank."""

    send_index: torch.Tensor

    def indices(self, sender: int) -> list[torch.Tensor]:
        assert sender == self.rank, "a rank knows its own rows alone"
        return list(self.send_index.split(self.send))

    @cached_property
    def home(self) -> torch.Tensor:
        return self.send_index


@dataclass(frozen=True)
class _Mesh:
    """A grid of nodes with features, whole, and cut into strips of columns."""

    rank: int
    sizes: list[int]
    edges: torch.Tensor
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, case: Case, rank: int, device: torch.device) -> _Mesh:
        width, dtype = row_width(case.nbytes), getattr(torch, case.dtype)
        height = max(2, round(case.nbytes / (_COLUMNS * width * dtype.itemsize)))
        columns = shard_sizes(case.skew, _COLUMNS * case.world, case.world)
        sizes = [height * count for count in columns]
        return cls(rank, sizes, _grid(sum(columns), height).to(device), width, dtype)

    @property
    def nodes(self) -> slice:
        """Those that this rank owns."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    @property
    def into_nodes(self) -> torch.Tensor:
        """Edges into them."""
        targets = self.edges[1]
        return torch.nonzero((targets >= self.nodes.start) & (targets < self.nodes.stop)).view(-1)

    def of_nodes(self, what: str) -> torch.Tensor:
        """Return a row for each node of the whole."""
        return self._rows(sum(self.sizes), what)

    def of_edges(self) -> torch.Tensor:
        """Return a row for each edge of the whole."""
        return self._rows(self.edges.shape[1], "edges")

    def _rows(self, count: int, what: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
        made = torch.randn(count, self.width, generator=generator)
        return made.to(self.edges.device, self.dtype)


def build(case: Case, effort: Effort, device: torch.device) -> Task:
    """Prepare a case on this rank."""
    mesh = _Mesh.of(case, dist.get_rank(), device)
    graph = vc.graph.from_edges(mesh.edges[:, mesh.into_nodes], mesh.sizes)
    plan = graph.plan
    matrix = [[0] * case.world for _ in range(case.world)]
    matrix[mesh.rank] = list(plan.send_counts)
    for peer, rows in enumerate(plan.recv_counts):
        matrix[peer][mesh.rank] = rows
    layout = _Sent(
        *(mesh.rank, mesh.sizes, matrix, mesh.width, mesh.dtype, device, ""), plan.send_index
    )
    make, inputs, gradient, expected = _MAKE[case.operation](case, mesh, graph)
    fetches: list[tuple[str, str, _Fetch]] = [(OURS, OURS, graph.with_halo)]
    fetches += [(name, FLOOR, fetch) for name, fetch in _bare(case, layout).items()]
    cannot = {name: "fetches no halo" for name in PEERS if name != "anemoi"}
    try:
        fetches.append(("anemoi", PEER, anemoi.halo_exchange(layout)))
    except CannotError as error:
        cannot["anemoi"] = str(error)
    moved = transposed(layout) if case.backward else layout
    return Task(
        [
            contender(name, kind, make(kind, fetch), inputs, gradient)
            for name, kind, fetch in fetches
            if effort.peers or kind != PEER
        ],
        expected,
        _tolerance(case),
        sum(mesh.sizes) * layout.row_bytes // case.world,
        layout.skew,
        moved.sent,
        moved.received,
        cannot if effort.peers else {},
    )


# What an operation is made of: a function from who fetches to the layer, its inputs, the gradient
# of its result, and what is expected.
_Parts: TypeAlias = tuple[
    Callable[[str, _Fetch], Callable[..., torch.Tensor]], Any, torch.Tensor | None, Any
]


def _with_halo(case: Case, mesh: _Mesh, graph: PartitionedGraph) -> _Parts:
    x = mesh.of_nodes("x")
    here = torch.cat([graph.owned_ids, graph.halo_ids])
    if not case.backward:
        return lambda kind, fetch: fetch, x[mesh.nodes], None, x[here]
    # the gradient of a copy is that of its original: each counts as often as there are copies
    copies = 1 + torch.bincount(graph.plan.send_index, minlength=graph.num_owned)
    expected = (x[mesh.nodes].double() * copies[:, None]).to(x.dtype)
    return lambda kind, fetch: fetch, x[mesh.nodes], x[here], expected


def _sage(case: Case, mesh: _Mesh, graph: PartitionedGraph) -> _Parts:
    torch.manual_seed(0)
    of_own, of_others = (
        torch.nn.Linear(mesh.width, mesh.width).to(graph.edge_index.device, mesh.dtype)
        for _ in range(2)
    )

    def layer(edge_index: torch.Tensor, fetch: _Fetch, x: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        count = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x.dtype)
        total = torch.zeros_like(x).index_add(0, target, fetch(x).index_select(0, source))
        return of_own(x) + of_others(total / count[:, None])  # type: ignore[no-any-return]

    def make(kind: str, fetch: _Fetch) -> Callable[..., torch.Tensor]:
        return partial(layer, graph.edge_index, fetch)

    x, gradient = mesh.of_nodes("x"), mesh.of_nodes("y") if case.backward else None
    whole = contender("", OURS, partial(layer, mesh.edges, _itself), x, gradient).run()
    assert isinstance(whole, torch.Tensor)
    own = mesh.nodes
    return make, x[own], None if gradient is None else gradient[own], whole.detach()[own]


def _mesh_graph_net(case: Case, mesh: _Mesh, graph: PartitionedGraph) -> _Parts:
    from varcomm.models.mesh_graph_net import GraphNetBlock

    def block() -> Any:
        torch.manual_seed(0)
        return GraphNetBlock(mesh.width).to(graph.edge_index.device, mesh.dtype)

    plain, distributed = block(), vc.graph.distribute(block(), graph)

    def layer(
        edge_index: torch.Tensor, fetch: _Fetch, x: torch.Tensor, e: torch.Tensor
    ) -> torch.Tensor:
        """Compute what the block does, of its own modules."""
        source, target = edge_index
        of_sources = fetch(plain.from_source(x)).index_select(0, source)
        of_targets = plain.from_target(x).index_select(0, target)
        e = e + plain.edge_mlp(of_targets + of_sources + plain.from_edge(e))
        received = torch.zeros_like(x).index_add(0, target, e)
        return x + plain.node_mlp(torch.cat([x, received], dim=1))  # type: ignore[no-any-return]

    def make(kind: str, fetch: _Fetch) -> Callable[..., torch.Tensor]:
        if kind == OURS:
            return lambda x, e: distributed(x, graph.edge_index, e)[0]
        return partial(layer, graph.edge_index, fetch)

    x, e = mesh.of_nodes("x"), mesh.of_edges()
    gradient = mesh.of_nodes("y") if case.backward else None
    whole = contender("", OURS, partial(layer, mesh.edges, _itself), (x, e), gradient).run()
    own, into = mesh.nodes, mesh.into_nodes
    inputs = x[own], e[into]
    if gradient is None:
        assert isinstance(whole, torch.Tensor)
        return make, inputs, None, whole.detach()[own]
    return make, inputs, gradient[own], (whole[0][own], whole[1][into])


_MAKE: dict[str, Callable[[Case, _Mesh, PartitionedGraph], _Parts]] = {
    "with_halo": _with_halo,
    "sage": _sage,
    "mesh_graph_net": _mesh_graph_net,
}
OPERATIONS = tuple(_MAKE)


def _itself(x: torch.Tensor) -> torch.Tensor:
    """Fetch nothing: of a whole graph there is no halo."""
    return x


def _bare(case: Case, layout: Layout) -> dict[str, _Fetch]:
    """Return the bare schedules as functions that autograd knows."""
    forward = schedules(case.engine, "pick_rows", layout)
    backward = schedules(case.engine, "sum_rows", transposed(layout))

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name, ctx.mine = name, len(x)
            return bare_forward(forward[name], x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            (gradient,) = gradients
            return bare_backward(ctx.mine, backward[ctx.name], gradient.contiguous()), None

    def fetch(name: str, x: torch.Tensor) -> torch.Tensor:
        return Bare.apply(x, name)  # type: ignore[no-any-return, no-untyped-call]

    return {name: partial(fetch, name) for name in forward}


def _grid(columns: int, height: int) -> torch.Tensor:
    """Return edges to eight neighbours, and back; nodes are numbered column by column."""
    number = torch.arange(columns * height).view(columns, height)
    pairs = [
        (number[:-1], number[1:]),
        (number[:, :-1], number[:, 1:]),
        (number[:-1, :-1], number[1:, 1:]),
        (number[1:, :-1], number[:-1, 1:]),
    ]
    there = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in pairs], dim=1)
    return torch.cat([there, there.flip(0)], dim=1)


def _tolerance(case: Case) -> float:
    """Return how far a result may be off: layers in bf16 round at each step."""
    if case.operation == "with_halo":
        return tolerance(case) if case.backward else 0.0
    return 3 * tolerance(case)
