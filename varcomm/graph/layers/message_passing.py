"""Message passing by hand: a function of target, source and edge, and an aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.resolver import aggregation_resolver

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.layers.overlap import in_two_parts, overlaps, takes_any_order
from varcomm.graph.layers.propagate import keep_exchanges_in_graph
from varcomm.graph.layers.refused import inexact
from varcomm.graph.node_shard import described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checked_flag, checked_tensor, checking

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Message: TypeAlias = Callable[..., torch.Tensor]


def message_passing(
    graph: PartitionedGraph | EdgeShard,
    message: Message,
    x: torch.Tensor | Pair,
    *edge_values: torch.Tensor,
    aggr: str | Sequence[str] | Aggregation = "sum",
    overlap: bool = False,
) -> torch.Tensor:
    """Compute a message on each edge, and aggregate them at each owned node.

    Parameters
    ----------
    graph : PartitionedGraph or EdgeShard
        A graph with one type of edges, or the edges of one type, ``graph["author", "writes",
        "paper"]``; with halos of one hop.
    message : callable
        ``message(x_i, x_j, *edge_values)`` returns the messages of all edges, (E, *G), from the
        rows of `x` at targets and sources, (E, *F), and the edge values; E may be 0.
    x : torch.Tensor or pair of torch.Tensor
        A value of each owned node, (n, *F); or a pair as in PyG, for sources and for targets. Only
        the values of sources are sent.
    *edge_values : torch.Tensor
        Values of edges in the order of ``graph.edge_index``, (E, *H), such as ``graph.edge_attr``.
    aggr : str, sequence of str, or torch_geometric.nn.aggr.Aggregation
        The aggregation, as in a layer of PyG: a name, several names side by side, or a module with
        the same parameters on all ranks.
    overlap : bool
        Call `message` with the edges between owned nodes while the halo travels, and then with the
        others, if there are any. Each message must then depend on its own edge alone. Backward
        overlaps, too. Not in compiled code and ``torch.func``, which compute all edges at once.

    Returns
    -------
    torch.Tensor
        (n, *G), equal to one process to the rounding of sums and of matrix products.

    Raises
    ------
    ArgumentError
        On this rank: before any communication, if an argument does not fit; after the call of
        `message`, if its result does not have one row per edge.

    See Also
    --------
    distribute, edge_update

    Notes
    -----
    Communication: one exchange of `x` (of the first tensor of a pair), and its adjoint in
    backward.

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
    edges, messages, order, aggregate = _run(
        "graph.message_passing", graph, message, x, edge_values, aggr, overlap
    )
    targets = edges.edge_index[1]
    if order is not None and takes_any_order(aggregate):
        targets = targets.index_select(0, order)
    elif order is not None:
        messages = messages.index_select(0, edges.rules.split_edges.inverse)
    # PyG is not typed
    return aggregate(messages, targets, dim_size=edges.rules.layer_counts()[2], dim=0)  # type: ignore[no-any-return]


def edge_update(
    graph: PartitionedGraph | EdgeShard,
    update: Message,
    x: torch.Tensor | Pair,
    *edge_values: torch.Tensor,
    overlap: bool = False,
) -> torch.Tensor:
    """Compute a value on each edge: :func:`message_passing` without its aggregation.

    Parameters
    ----------
    graph, update, x, *edge_values, overlap
        As in :func:`message_passing`, with its errors; `update` is called `message` there.

    Returns
    -------
    torch.Tensor
        The value of each edge in the order of ``graph.edge_index``, (E, *G).

    Raises
    ------
    ArgumentError
        As :func:`message_passing`.

    See Also
    --------
    message_passing, distribute

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
    edges, values, order, _ = _run(
        "graph.edge_update", graph, update, x, edge_values, "sum", overlap
    )
    return values if order is None else values.index_select(0, edges.rules.split_edges.inverse)


def _run(
    name: str,
    graph: Any,
    message: Any,
    x: Any,
    edge_values: Sequence[Any],
    aggr: Any,
    overlap: bool,
) -> tuple[EdgeShard, torch.Tensor, torch.Tensor | None, Aggregation]:
    """Return the edges, their messages, the order of these if it is another, and the aggregation.

    The arguments are checked before any communication.
    """
    edges = graph.edges if isinstance(graph, PartitionedGraph) else graph
    if not isinstance(edges, EdgeShard):
        raise ArgumentError(
            f"{name}: graph must be a PartitionedGraph, as from graph.partition, or its edges of "
            f"one type; got {type(graph).__name__}."
        )
    sources, _, targets = edges.rules.layer_counts()
    pair = x if isinstance(x, tuple | list) else (x, x)
    with checking(name, edges.group) as where:
        checked_flag(overlap, "overlap", where)
        if not callable(message):
            raise ArgumentError(
                f"{where}the message must be a function of x_i, x_j and the edge values; got "
                f"{type(message).__name__}. The order is (graph, message, x, *edge_values)."
            )
        edges.rules.check_exchanges(where)
        if len(pair) != 2:
            raise ArgumentError(f"{where}x must be a tensor or a pair of them; got {len(pair)}.")
        rows = [("x of sources", pair[0], sources), ("x of targets", pair[1], targets)]
        count = edges.local_ids.shape[1]
        rows += [(f"edge value {at}", value, count) for at, value in enumerate(edge_values)]
        for what, value, wanted in rows:
            checked_tensor(value, where, what)
            if value.shape[:1] != (wanted,) or value.device != edges.local_ids.device:
                raise ArgumentError(
                    f"{where}{what} must have {wanted} rows, those of this rank, on "
                    f"{edges.local_ids.device}; got shape {tuple(value.shape)} on {value.device}. "
                    "Pass the local part, such as graph.x and graph.edge_attr."
                )
        aggregate = _aggregation(aggr, where)

    def compute(rows: Sequence[torch.Tensor], j: Any, i: Any, at: Any = None) -> torch.Tensor:
        values = edge_values if at is None else [value.index_select(0, at) for value in edge_values]
        messages = message(pair[1].index_select(0, i), rows[0].index_select(0, j), *values)
        if not isinstance(messages, torch.Tensor) or messages.shape[:1] != j.shape:
            with checking(name, edges.group) as where:
                raise ArgumentError(
                    f"{where}the message must return a tensor with one row for each of the "
                    f"{len(j)} edges that it was called with; got {described(messages)}."
                )
        return messages

    order = None
    if overlap and overlaps(edges.rules, edges.local_ids):
        order = edges.rules.split_edges.order
        messages, exchanged = in_two_parts(edges.rules, pair[:1], compute)
    else:
        exchanged = [edges.rules.rows_and_halo(pair[0])]
        messages = compute(exchanged, *edges.local_ids)
    if exchanged[0].requires_grad and not torch.compiler.is_compiling():
        # a message may ignore the halo on one rank
        messages = keep_exchanges_in_graph(messages, [], exchanged)
    return edges, messages, order, aggregate


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
        if isinstance(part, Aggregation) and (reason := _inexact(type(part))):
            raise ArgumentError(f"{where}{reason}.")
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


torch.compiler.assume_constant_result(_refusal)
_inexact = torch.compiler.assume_constant_result(inexact)
