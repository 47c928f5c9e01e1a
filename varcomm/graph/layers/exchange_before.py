"""``exchange_before``: halo exchanges before submodules that index rows of nodes themselves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.layers.deep_halos import NodeRows
from varcomm.graph.node_shard import described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checking
from varcomm.ops.nested import mapped
from varcomm.transport.agreement import share

_WHAT = "graph.exchange_before"


def exchange_before(
    model: torch.nn.Module,
    graph: PartitionedGraph | EdgeShard,
    arguments: Mapping[str, Sequence[str]],
) -> Exchanges:
    """Append halo rows to named arguments of submodules, and keep owned rows of results.

    Collective. Use this function for submodules that need edges as ordinary tensors of local ids,
    such as TorchScript and compiled kernels. In other code, ``x[row]`` with ``graph.edge_index``
    fetches the rows.

    Parameters
    ----------
    model : torch.nn.Module
        Equal on every rank; changed in place by forward hooks.
    graph : PartitionedGraph or EdgeShard
        A graph with halos of one hop, or the edges of one type in a graph with several types.
    arguments : mapping of str to sequence of str
        Names of arguments of ``forward`` by patterns of submodule names. ``*`` matches characters
        between two dots: ``"interactions.*"`` matches ``interactions.0``, but not submodules of
        ``interactions.0``. List every argument with a row per node.

    Returns
    -------
    Exchanges
        ``remove()`` ends the exchanges, for instance before a call for another graph.

    Raises
    ------
    ArgumentError
        On every rank, if a pattern matches no submodule, or if a matching submodule has no such
        argument. Also raised if results with a row per node cannot be distinguished from results
        with a row per edge. A call raises the error on this rank, before any communication, if an
        argument does not have one row per owned node.

    See Also
    --------
    distribute, message_passing

    Notes
    -----
    ``graph.edge_index`` becomes ordinary local ids in the call. Ranks agree at the first call on
    the results that have a row per node.

    Communication: one exchange per call for all named arguments of one dtype, and its adjoint in
    backward.

    In one process: nothing.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> class Neighbours(torch.nn.Module):
    ...     def forward(self, x, row, col):
    ...         return torch.zeros_like(x).index_add(0, col, x[row])
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.arange(4.0), edge_index=edge_index)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     model = torch.nn.Sequential(Neighbours())
    ...     varcomm.graph.exchange_before(model, graph, {"0": ["x"]})
    ...     return model[0](graph.x, *graph.edges.local_ids).tolist()
    >>> varcomm.launch(fn, 2)
    [[3.0, 0.0], [1.0, 2.0]]
    """
    if not isinstance(graph, PartitionedGraph | EdgeShard):
        raise ArgumentError(
            f"{_WHAT}: graph must be a PartitionedGraph or one of its EdgeShards; got "
            f"{type(graph).__name__}."
        )
    edges = graph if isinstance(graph, EdgeShard) else graph.edges

    def check() -> tuple[bool, int, list[Any]]:
        found.update(_matching(model, arguments))
        edges.rules.check_exchanges()
        named = {module: name for name, module in model.named_modules()}
        names = [[named[module], *wanted] for module, wanted in found.items()]
        return edges.num_owned == edges.num_sources + edges.num_halo, edges.num_halo, names

    found: dict[torch.nn.Module, dict[str, None]] = {}
    equal, halos, names = zip(*share(_WHAT, check, edges.group), strict=True)
    if other := next((rank for rank, own in enumerate(names) if own != names[0]), None):
        raise DisagreementError(
            f"{_WHAT}: rank 0 exchanges {names[0]}, and rank {other} {names[other]}. Pass the same "
            "model and arguments on every rank."
        )
    if all(equal) and any(halos):
        raise ArgumentError(
            f"{_WHAT}: every rank has as many edges as owned and halo nodes, so rows of nodes and "
            "of edges cannot be distinguished. Call graph.with_halo in the model."
        )
    handles = []
    for module, names in found.items():
        rows = NodeRows(_WHAT, edges)
        exchange = _Exchange(edges, tuple(names), inspect.signature(module.forward), rows)
        handles.append(module.register_forward_pre_hook(exchange.before, with_kwargs=True))
        handles.append(module.register_forward_hook(exchange.after))
    return Exchanges(handles)


@dataclass(frozen=True)
class Exchanges:
    """The hooks of one :func:`exchange_before`."""

    handles: Sequence[RemovableHandle] = field(repr=False)

    def remove(self) -> None:
        """End these exchanges; a second call does nothing."""
        for handle in self.handles:
            handle.remove()


def _matching(model: Any, arguments: Any) -> dict[torch.nn.Module, dict[str, None]]:
    """Return the names of arguments, in order, of each submodule that matches a pattern."""
    if not isinstance(model, torch.nn.Module) or not isinstance(arguments, Mapping):
        raise ArgumentError(
            "the arguments are a torch.nn.Module, a graph, and a mapping of patterns to names; got "
            f"{type(model).__name__} and {type(arguments).__name__}."
        )
    names: dict[torch.nn.Module, dict[str, None]] = {}
    for pattern, wanted in arguments.items():
        parts = str(pattern).split(".")
        matching = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if len(name.split(".")) == len(parts) and all(map(fnmatchcase, name.split("."), parts))
        }
        if not matching or isinstance(wanted, str) or not isinstance(wanted, Sequence):
            have = ", ".join(name for name, _ in model.named_children())
            raise ArgumentError(
                f"arguments[{pattern!r}] must be names of arguments of submodules that match; got "
                f"{wanted!r}, and {len(matching)} submodules match. The model has {have}."
            )
        for name, module in matching.items():
            has = inspect.signature(module.forward).parameters
            if unknown := [one for one in wanted if one not in has]:
                raise ArgumentError(
                    f"arguments[{pattern!r}]: the forward of {name or 'the model'} "
                    f"({type(module).__name__}) has no argument {unknown[0]!r}; it has "
                    f"{', '.join(has)}."
                )
            names.setdefault(module, {}).update(dict.fromkeys(wanted))
    for module in names:
        if inner := next((part for part in list(module.modules())[1:] if part in names), None):
            raise ArgumentError(
                f"arguments name a {type(module).__name__} and its part, a {type(inner).__name__}: "
                "the rows would be exchanged twice. Name one of them."
            )
    return names


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The hooks of one submodule."""

    edges: EdgeShard
    names: tuple[str, ...]
    signature: inspect.Signature
    rows: NodeRows
    exchanged: list[str] = field(default_factory=list)  # in the present call

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self.signature.bind(*args, **kwargs)
        given = call.arguments
        with checking(_WHAT, self.edges.group) as where:
            for name in self.names:
                value, owned = given.get(name), self.edges.num_sources
                if (
                    value is not None
                    and (
                        isinstance(value, PartitionedIndex)  # whose halo would count in readouts
                        or not isinstance(value, torch.Tensor)
                        or value.shape[:1] != (owned,)
                    )
                ):
                    raise ArgumentError(
                        f"{where}{name} of {type(module).__name__} must have one row of values for "
                        f"each of the {owned} owned nodes, and be no vector of the graph such as "
                        f"graph.batch; got {described(value)}."
                    )
        self.exchanged[:] = [name for name in self.names if given.get(name) is not None]
        rows = self.edges.rules.rows_and_halos([given[name] for name in self.exchanged])
        given.update({name: mapped(plain, value) for name, value in given.items()})
        given.update(zip(self.exchanged, rows, strict=True))
        return call.args, call.kwargs

    def after(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        return self.rows.owned(out, tuple(self.exchanged))
