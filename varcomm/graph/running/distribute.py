"""``distribute``: let a model of PyTorch Geometric run on a partitioned graph, unchanged."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.over_nodes.norms import global_norm, is_global_norm
from varcomm.graph.over_nodes.readouts import global_readout
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.running.block import enclose
from varcomm.graph.running.layers import FUNCTIONS, check_deep, check_exact, functions_at
from varcomm.graph.running.place import Place
from varcomm.graph.running.propagate import attach
from varcomm.graph.running.rebind import Rebinding
from varcomm.graph.running.told import listen
from varcomm.ops.digest import differing, digest
from varcomm.transport.agreement import share

__all__ = ["distribute"]

Model = TypeVar("Model", bound=torch.nn.Module)

# Where a module keeps its place.
_AT = "_place_of_varcomm"


def distribute(model: Model, graph: PartitionedGraph) -> Model:
    """Let every message-passing layer of a model exchange halos before it propagates.

    Collective: every rank calls it with the same model, and all raise if one has to.

    The model then takes the local part, ``model(graph.x, graph.edge_index, ...)``, or
    ``model(graph.x_dict, graph.edge_index_dict, ...)``, and gives the owned rows of what it gives
    for the whole graph in one process; so do its derivatives of any order. Nothing in the model
    changes but how its layers propagate and count degrees; its ``state_dict`` stays as it is.
    Calling this again moves it to another graph, say one for validation.

    Parameters
    ----------
    model : torch.nn.Module
        Made of layers of PyTorch Geometric or of own subclasses of its ``MessagePassing``, in which
        values of nodes reach edges as arguments of ``propagate`` and ``edge_updater``. The same
        parameters and buffers on every rank; of lazy ones, what there is so far is compared, so
        seed the ranks alike.
    graph : PartitionedGraph
        What it will run on.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        On every rank, if a module of PyTorch or PyG is known not to be exact, or not known to be:
        the message says why. On this rank, before any communication, if `graph` is none.
    DisagreementError
        On every rank, if names, shapes, dtypes or values of parameters or buffers differ, or what
        layers of torch and PyG were told: aggregations, sizes, options. Modules of one's own are
        not compared.

    Notes
    -----
    A layer's own ``propagate`` gets what is about to be propagated. Values that a message reads at
    its source become pairs: owned rows and halo for sources, owned rows for targets. As all edges
    into owned nodes are local, any aggregation over them is exact.

    For ``flow="target_to_source"``, and in ``DirGNNConv``, edges go to the owners of their sources,
    and values of edges with them. Functions of PyG that need the whole graph, such as ``gcn_norm``,
    are exchanged for exact ones wherever methods of a module reach them: by a name in their module
    of Python, through ``nn.`` or ``super()``, by an attribute. Such a module's class is exchanged
    for one of the same name; no other module is touched.

    What cannot be seen is code of one's own that reaches other nodes by itself: degrees of sources
    or ``x[edge_index[0]]`` in a ``forward``, a mean over nodes. Such values go through
    ``propagate``, as ``degree_j``, say.

    Edges may be left out (dropout of edges) and self loops added. Edges that are not in the graph
    are refused when the model runs. Each rank draws for dropout from its own random numbers.

    Communication: in each ``propagate`` and ``edge_updater``, one exchange for each value of nodes
    that messages read at their source; none for what they read at their target. The adjoint
    exchange in backward. Against the direction of edges also 24 bytes to each rank, 16 for each
    edge that goes to another rank unless the edges are the same as before, and its values.

    In one process: `model` as it is, on the whole graph.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.eye(4), edge_index=edge_index)
    ...     torch.manual_seed(0)
    ...     model = SAGEConv(4, 2)
    ...     alone = model(ring.x, ring.edge_index)
    ...     graph = varcomm.graph.partition(ring)
    ...     model = varcomm.graph.distribute(model, graph)
    ...     parts = model(graph.x, graph.edge_index)
    ...     return torch.allclose(parts, alone[graph.owned_ids])
    >>> varcomm.launch(fn, 2)
    [True, True]
    """
    if not isinstance(graph, PartitionedGraph):
        raise ArgumentError(
            "graph.distribute: graph must be a PartitionedGraph, as graph.partition gives; got "
            f"{type(graph).__name__}. The order is distribute(model, graph)."
        )
    what = "graph.distribute"
    given = share(what, lambda: _checked(model, graph), graph.group)
    others, names = differing(given)
    if others:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise DisagreementError(
            f"{what}: ranks {others} have other parameters or buffers than rank 0, or layers with "
            f"other settings; they differ in {', '.join(names[:3])}{more}. Make the same model on "
            "all; seed the ranks alike before, or broadcast what one rank has."
        )
    place = _place(model, graph)
    if place.rebind is None or not place.rebind.is_current():
        place.rebind = Rebinding(functions_at(place))
    for module in model.modules():
        vars(module)[_AT] = place
        place.modules.add(module)
        place.rebind(module)
        listen(module, place)
        if isinstance(module, MessagePassing):
            attach(module, place)
            _forget(module)
        elif is_global_norm(module):
            vars(module)["forward"] = global_norm(module, graph)
    for readout in _readouts(model):
        vars(readout)["forward"] = global_readout(readout, graph)
    enclose(model, place)
    return model


def _place(model: torch.nn.Module, graph: PartitionedGraph) -> Place:
    """Return the place where this model is, and nothing else, moved to the graph; or a new one.

    At the same place, what torch.compile has made of the model stays valid.
    """
    modules = set(model.modules())
    known = {vars(module).get(_AT) for module in modules}
    place = known.pop()
    if not isinstance(place, Place) or known or place.is_shared or not modules >= {*place.modules}:
        return Place(graph)
    place.move(graph)
    return place


def _readouts(model: torch.nn.Module) -> list[Aggregation]:
    """Return the aggregations that a model calls itself: those over all nodes."""
    inner = {
        part
        for module in model.modules()
        if isinstance(module, MessagePassing | Aggregation)
        for part in list(module.modules())[1:]
    }
    return [m for m in model.modules() if isinstance(m, Aggregation) and m not in inner]


def _checked(model: torch.nn.Module, graph: PartitionedGraph) -> dict[str, object]:
    """Return, by its name, a digest of all that must be the same on all ranks, if it will do."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    # under all its names: what is fine inside of a layer may be used outside of it too
    rebind = Rebinding(FUNCTIONS)
    for name, module in model.named_modules(remove_duplicate=False):
        check_exact(name, module, model)
        if graph.hops > 1:
            check_deep(name, module)
        rebind.check(module, f"{name or 'the model'} ({type(module).__name__})")
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(name, recurse=False))
        own |= dict(module.named_buffers(name, recurse=False))
        # where some are not initialised yet, the others may be whatever was in memory
        lazy = any(torch.nn.parameter.is_lazy(value) for value in own.values())
        for key, value in own.items():
            state[key] = "uninitialised" if lazy else (value.requires_grad, digest(value))
    for name, module in model.named_modules():
        if settings := _settings(module):
            state[f"{name or 'the model'} ({type(module).__name__})"] = settings
    return state


def _settings(module: torch.nn.Module) -> str:
    """Return what torch or PyG was told of a layer of theirs: sizes, aggregations, options."""
    if not type(module).__module__.startswith(("torch.nn.modules.", "torch_geometric.nn.")):
        return ""  # one's own may hold what belongs to a rank
    return ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(vars(module).items())
        if name != "training" and not name.startswith("_")
        if value is None or isinstance(value, bool | int | float | str)
    )


def _forget(layer: MessagePassing) -> None:
    """Drop what a layer of PyG with ``cached=True`` has kept of another graph."""
    for name in ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h"):
        if name in vars(layer):
            setattr(layer, name, None)
