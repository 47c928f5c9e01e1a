"""Message passing by hand: messages of interior edges are computed while the halo travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.resolver import aggregation_resolver

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.exact import EXACT_AGGREGATIONS
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking

__all__ = ["edge_update", "message_passing"]

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Message: TypeAlias = Callable[..., torch.Tensor]


def message_passing(
    graph: PartitionedGraph | EdgeShard,
    message: Message,
    x: torch.Tensor | Pair,
    *edge_values: torch.Tensor,
    aggr: str | Sequence[str] | Aggregation = "sum",
) -> torch.Tensor:
    """Compute a message on each edge, and aggregate them at each owned node.

    The halo exchange overlaps with the messages of ``graph.interior``, the edges whose source is on
    this rank; the messages of ``graph.boundary`` follow. In backward likewise. Compiled code
    exchanges first.

    Parameters
    ----------
    graph : PartitionedGraph or EdgeShard
        A graph with one type of edges, or the edges of one type, ``graph["author", "writes",
        "paper"]``; with halos of one hop.
    message : callable
        ``message(x_i, x_j, *edge_values)`` returns the messages of some edges, (e, *G), from the
        rows of `x` at their targets and sources, (e, *F), and their edge values. It is called
        twice, so an edge's message must not depend on other edges; for no edges, it returns zero
        rows.
    x : torch.Tensor or pair of torch.Tensor
        A value of each owned node, (n, *F); or a pair as in PyG, for sources and for targets, of
        which the first travels.
    *edge_values : torch.Tensor
        Values of edges in the order of ``graph.edge_index``, (E, *H), such as ``graph.edge_attr``.
    aggr : str, sequence of str, or torch_geometric.nn.aggr.Aggregation
        The aggregation, as in a layer of PyG: a name, several names side by side, or a module with
        the same parameters on all ranks.

    Returns
    -------
    torch.Tensor
        (n, *G), equal to one process to the rounding of sums and of matrix products.

    Raises
    ------
    ArgumentError
        On this rank, before any communication, if an argument does not fit; after a call of
        `message`, if its result does not have one row per edge.

    Notes
    -----
    Communication: one exchange of `x`, or of the first of a pair; in backward, its adjoint. Values
    of nodes that are computed before the exchange are computed once per node, not once per edge.

    Dropout in `message` draws the masks of edges in another order than a layer of PyG.

    In one process: `aggr` of ``message(x[edge_index[1]], x[edge_index[0]], *edge_values)``, at
    ``edge_index[1]``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     data = Data(x=torch.tensor([[1.0], [2.0], [3.0], [4.0]]), edge_index=ring)
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     steps = varcomm.graph.message_passing(graph, lambda x_i, x_j: x_i - x_j, graph.x)
    ...     return steps.flatten().tolist()
    >>> varcomm.launch(fn, 2)
    [[-3.0, 1.0], [1.0, 1.0]]
    """
    edges = _edges("graph.message_passing", graph)
    with checking("graph.message_passing", edges.group) as where:
        ends = _checked(edges, message, x, edge_values, where)
        aggregate = _aggregation(aggr, where)
    messages = _messages("graph.message_passing", edges, message, ends, edge_values)
    target = edges.local_ids[1].index_select(0, _order(edges))
    # PyG is not typed
    return aggregate(messages, target, dim_size=edges.layer_counts()[2], dim=0)  # type: ignore[no-any-return]


def edge_update(
    graph: PartitionedGraph | EdgeShard,
    update: Message,
    x: torch.Tensor | Pair,
    *edge_values: torch.Tensor,
) -> torch.Tensor:
    """Compute a value on each edge, interior ones while the halo travels.

    This is :func:`message_passing` without its aggregation, for networks that keep values of edges.

    Parameters
    ----------
    graph, update, x, *edge_values
        As in :func:`message_passing`, with its errors; `update` is called `message` there.

    Returns
    -------
    torch.Tensor
        The value of each edge in the order of ``graph.edge_index``, (E, *G).

    Notes
    -----
    Communication: as :func:`message_passing`.

    In one process: ``update(x[edge_index[1]], x[edge_index[0]], *edge_values)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     path = torch.tensor([[2, 0, 1], [3, 1, 2]])
    ...     data = Data(x=torch.tensor([1.0, 2.0, 4.0, 8.0]), edge_index=path)
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     return varcomm.graph.edge_update(graph, lambda x_i, x_j: x_i - x_j, graph.x).tolist()
    >>> varcomm.launch(fn, 2)
    [[1.0], [4.0, 2.0]]
    """
    edges = _edges("graph.edge_update", graph)
    with checking("graph.edge_update", edges.group) as where:
        ends = _checked(edges, update, x, edge_values, where)
    values = _messages("graph.edge_update", edges, update, ends, edge_values)
    return torch.empty_like(values).index_copy_(0, _order(edges), values)


def _messages(
    name: str, edges: EdgeShard, message: Message, ends: Pair, edge_values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the messages of interior edges and then those of boundary edges."""
    (source, target), (j, i) = ends, edges.local_ids
    begun = edges.plan.start(source)
    inner, outer = edges.interior, edges.boundary
    x_j = source.index_select(0, j.index_select(0, inner))
    x_i = target.index_select(0, i.index_select(0, inner))
    first = message(x_i, x_j, *(value.index_select(0, inner) for value in edge_values))
    _check_messages(name, edges, first, len(inner))
    # Everything that does not need the halo comes before wait(): backward overlaps likewise.
    x_i = target.index_select(0, i.index_select(0, outer))
    values = [value.index_select(0, outer) for value in edge_values]
    x_j = begun.wait().index_select(0, j.index_select(0, outer) - edges.layer_counts()[0])
    last = message(x_i, x_j, *values)
    _check_messages(name, edges, last, len(outer), first)
    if first.dim() == 1:
        # torch.cat drops an empty tensor of one dimension from the autograd graph
        return torch.cat([first.unsqueeze(1), last.unsqueeze(1)]).squeeze(1)
    return torch.cat([first, last])


def _order(edges: EdgeShard) -> torch.Tensor:
    """Return the position in ``edge_index`` of each message."""
    return torch.cat([edges.interior, edges.boundary])


def _edges(name: str, graph: Any) -> EdgeShard:
    if isinstance(graph, PartitionedGraph):
        return graph.edges
    if not isinstance(graph, EdgeShard):
        raise ArgumentError(
            f"{name}: graph must be a PartitionedGraph, as graph.partition gives, or its edges of "
            f"one type; got {type(graph).__name__}."
        )
    return graph


def _checked(
    edges: EdgeShard, message: Any, x: Any, edge_values: Sequence[Any], where: str
) -> Pair:
    """Return the values at sources and at targets, if all arguments fit the edges."""
    if not callable(message):
        raise ArgumentError(
            f"{where}the message must be a function of x_i, x_j and the edge values; got "
            f"{type(message).__name__}. The order is (graph, message, x, *edge_values)."
        )
    if edges.hops > 1:
        raise ArgumentError(
            f"{where}the graph has halos of {edges.hops} hops, which are exchanged once for as "
            "many layers; there is no exchange to overlap with. Partition it with hops=1."
        )
    if isinstance(x, tuple | list) and len(x) != 2:
        raise ArgumentError(
            f"{where}x must be a tensor or a pair of them, for sources and for targets; got "
            f"{len(x)}. Put several values of nodes side by side: torch.cat([a, b], dim=1)."
        )
    source, target = x if isinstance(x, tuple | list) else (x, x)
    names = ("x", "x") if target is source else ("x of sources", "x of targets")
    sources, _, targets = edges.layer_counts()
    nodes = (sources, targets)
    for name, value, rows in zip(names, (source, target), nodes, strict=True):
        _check_rows(name, value, rows, "nodes", edges, where)
    for number, value in enumerate(edge_values):
        name = f"edge value {number}"
        _check_rows(name, value, edges.local_ids.shape[1], "edges", edges, where)
    return source, target


def _check_rows(
    name: str, value: Any, rows: int, of_what: str, edges: EdgeShard, where: str
) -> None:
    checked_tensor(value, where, name)
    if value.shape[:1] != (rows,):
        raise ArgumentError(
            f"{where}{name} has shape {tuple(value.shape)}, but this rank owns {rows} {of_what}: "
            "it must have one row for each. Pass the local part, such as graph.x and "
            "graph.edge_attr; the halo is added here."
        )
    if value.device != edges.local_ids.device:
        raise ArgumentError(
            f"{where}{name} is on {value.device}, the graph on {edges.local_ids.device}. Move "
            f"one of them: graph.to({str(value.device)!r})."
        )


def _check_messages(
    name: str, edges: EdgeShard, messages: Any, count: int, others: torch.Tensor | None = None
) -> None:
    """Raise unless there is one message for each of `count` edges, of the same kind as `others`."""
    with checking(name, edges.group) as where:
        if not isinstance(messages, torch.Tensor) or messages.shape[:1] != (count,):
            got = type(messages).__name__
            if isinstance(messages, torch.Tensor):
                got = f"shape {tuple(messages.shape)}"
            raise ArgumentError(
                f"{where}the message must return a tensor with one row for each of the {count} "
                f"edges that it was called with; got {got}."
            )
        if others is None:
            return
        kinds = [(list(part.shape[1:]), part.dtype) for part in (others, messages)]
        if kinds[0] != kinds[1]:
            raise ArgumentError(
                f"{where}the message must return rows of one shape and dtype whatever the edges; "
                f"got {kinds[0][0]} of {kinds[0][1]} for {len(others)} of them, and "
                f"{kinds[1][0]} of {kinds[1][1]} for {count}."
            )


# Aggregations that PyG made of names: constants to torch.compile.
_made: dict[str | tuple[Any, ...], Aggregation] = {}


def _aggregation(aggr: Any, where: str) -> Aggregation:
    """Return the module that `aggr` stands for, if it is exact on a sharded graph."""
    if isinstance(aggr, Aggregation):
        module = aggr
    else:
        name = tuple(aggr) if isinstance(aggr, list) else aggr
        if why := _refusal(name):
            raise ArgumentError(
                f"{where}aggr must be the name of an aggregation of PyG, several of them, or a "
                f"module; got {aggr!r}: {why}."
            )
        module = _made[name]
    for part in module.modules():
        if isinstance(part, Aggregation) and (known := _inexact(type(part))) is not None:
            raise ArgumentError(
                f"{where}{known} is not known to be exact on a part of the graph. Known are "
                f"{', '.join(sorted(EXACT_AGGREGATIONS))}, and own subclasses of Aggregation."
            )
    return module


def _refusal(name: Any) -> str:
    """Let PyG make the aggregation of a name, or several; return the error, if any."""
    try:
        if not isinstance(name, str | tuple):
            raise TypeError(f"{type(name).__name__} is none of these")
        _made[name] = aggregation_resolver(name)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _inexact(kind: type[Aggregation]) -> str | None:
    """Return PyG's name of a class that is neither exact nor an own subclass of Aggregation."""
    known = next(c for c in kind.__mro__ if c.__module__.startswith("torch_geometric."))
    own = known is Aggregation and kind is not Aggregation
    return None if own or known.__name__ in EXACT_AGGREGATIONS else known.__name__


torch.compiler.assume_constant_result(_refusal)
torch.compiler.assume_constant_result(_inexact)
