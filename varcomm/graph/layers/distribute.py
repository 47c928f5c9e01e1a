"""``distribute``: check a model of PyTorch Geometric and let it run on a partitioned graph."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from varcomm._torch_private import version_of
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.index.partitioned_index import PartitionedIndex
from varcomm.graph.layers.deep_halos import check_deep, exchange_once
from varcomm.graph.layers.norms import global_norm, is_global_norm
from varcomm.graph.layers.propagate import Digests, Running, attach, is_attached
from varcomm.graph.layers.refused import OVER_ALL_NODES, check_exact, is_readout
from varcomm.graph.layers.special_layers import replace_methods
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import differing, digest, require_equal
from varcomm.transport.agreement import debugging, share

Model = TypeVar("Model", bound=torch.nn.Module)

# The attribute of a module that holds what the modules of a distributed model share.
_RUNNING = "_varcomm_running"

_PARTS = "_varcomm_parts"

_OPTION = "the option overlap"  # among names of parameters and layers

# Attributes of every module, among them its registered parts.
_OWN = frozenset(vars(torch.nn.Module()))

# Names and types that this module adapts or refuses.
_ADAPTED = (MessagePassing, Aggregation, torch.nn.MultiheadAttention, *OVER_ALL_NODES)


def distribute(model: Model, graph: PartitionedGraph, *, overlap: bool = False) -> Model:
    """Prepare a model, so that every message-passing layer exchanges halos before it propagates.

    Collective: every rank calls it with the same model, and either all ranks raise or none.

    The model then runs on the local part, ``model(graph.x, graph.edge_index, ...)``, and returns
    the owned rows of its result in one process, with derivatives of any order. The ``state_dict``
    of the model does not change. A second call moves the model to another graph, such as one for
    validation.

    Parameters
    ----------
    model : torch.nn.Module
        A model of PyTorch Geometric's layers or your subclasses of its ``MessagePassing``.
        Parameters and buffers are the same on every rank. Lazy parameters need the same seed on
        every rank.
    graph : PartitionedGraph
        The graph that the model will run on.
    overlap : bool
        Let a layer compute the messages of edges between owned nodes while the halo travels, and
        then the others; backward overlaps, too. A layer calls `message` twice, so each message must
        depend on its own edge alone and store nothing, and its values must belong to nodes or
        edges: a tensor with as many rows as this rank has edges is one of edges. The same on every
        rank.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        On every rank, with the reason, if a module of PyTorch or PyG cannot be exact. On this rank,
        before any communication, if `graph` is not a PartitionedGraph.
    DisagreementError
        On every rank, if names, shapes, dtypes or values of parameters or buffers differ, or the
        settings of layers of torch and PyG: aggregations, sizes, options.

    See Also
    --------
    partition, message_passing, varcomm.data_parallel.sum_gradients

    Notes
    -----
    ``graph.edge_index``, ``graph.batch`` and other ids of groups fetch and reduce rows of other
    ranks by themselves, inside a layer or outside. Code that reduces over all nodes without such a
    vector, such as ``x.mean(0)``, is not detected: use ``graph.mean``. A norm or layer that is
    added afterwards, and a model inside an explainer, are refused when the model runs. Each rank
    draws its own dropout.

    Overlap is for layers whose ``message`` computes much, such as an MLP. Other layers run as
    without: ``message`` only selects rows, or it or another function reads ids or sizes; the layer
    adds self loops, has norms over all nodes, its own ``propagate`` or PyG's hooks; `size` or rows
    with the halo are given. So do ``edge_updater``, compiled code and ``torch.func``.

    Communication: in each ``propagate`` and ``edge_updater``, one exchange for each value of nodes
    that messages read at their source; the adjoint exchange in backward.

    In one process: `model` as it is, on the full graph.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.eye(4), edge_index=edge_index)
    ...     torch.manual_seed(0)
    ...     model, graph = SAGEConv(4, 2), varcomm.graph.partition(ring)
    ...     alone = model(ring.x, ring.edge_index)
    ...     parts = varcomm.graph.distribute(model, graph)(graph.x, graph.edge_index)
    ...     return torch.allclose(parts, alone[graph.owned_ids])
    >>> varcomm.launch(fn, 2)
    [True, True]
    """
    if not isinstance(graph, PartitionedGraph):
        raise ArgumentError(
            "graph.distribute: graph must be a PartitionedGraph, as from graph.partition; got "
            f"{type(graph).__name__}. The order is distribute(model, graph)."
        )
    what = "graph.distribute"
    digests = getattr(getattr(model, _RUNNING, None), "digests", WeakTensorKeyDictionary())
    given = share(what, lambda: _checked(model, graph, digests, overlap), graph.group)
    require_equal(what, [{"overlap": each[_OPTION]} for each in given])
    others, names = differing(given)
    if others:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise DisagreementError(
            f"{what}: ranks {others} have other parameters or buffers than rank 0, or layers with "
            f"other settings; they differ in {', '.join(names[:3])}{more}. Make the same model on "
            "all ranks: set the same seed before, or call varcomm.broadcast_module(model). A seed "
            "is not enough if a layer has uninitialised values, such as l2 of RGATConv."
        )
    running = _running_of(model, graph)
    running.digests, running.overlap = digests, overlap
    layers = [module for module in model.modules() if isinstance(module, MessagePassing)]
    in_layers = {part for layer in layers for part in layer.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_readout(model, name) and _RUNNING not in vars(module):
            module.register_forward_pre_hook(_check_readout, with_kwargs=True)
    for name, module in model.named_modules():
        vars(module)[_RUNNING] = running
        replace_methods(module, running)
        if isinstance(module, MessagePassing):
            attach(module, running, name)
            _drop_cache(module)
        elif is_global_norm(module):
            vars(module)["forward"] = global_norm(module, graph, module in in_layers)
    exchange_once(model, running)
    if not isinstance(vars(model).get(_PARTS), _Parts):
        vars(model)[_PARTS] = _Parts()
        model.register_forward_pre_hook(vars(model)[_PARTS].check)
    vars(model)[_PARTS].keep(model)
    return model


class _Parts:
    """The parts of a distributed model, checked again before a forward if one was put in.

    A part in a list, tuple or dict of Python is found by `distribute`, and inside debug().
    """

    def keep(self, model: torch.nn.Module) -> None:
        """Check all parts, and note them."""
        _check_parts(model)
        self.modules = [*model.modules()]
        self.layers = [module for module in self.modules if isinstance(module, MessagePassing)]
        self.methods = [*map(_PROPAGATE, self.layers)]  # PyG replaces them to explain a model

    def check(self, model: torch.nn.Module, args: object) -> None:
        """Raise ArgumentError if a part was put in after `distribute`, or is being explained."""
        if torch.compiler.is_compiling():
            return
        # torch's hook of registrations does not see insert() of a Sequential or ModuleList
        same = [*model.modules()] == self.modules and [
            *map(_PROPAGATE, self.layers)
        ] == self.methods
        if not same or debugging():
            self.keep(model)


_PROPAGATE = attrgetter("propagate")


def _check_parts(model: torch.nn.Module) -> None:
    """Raise ArgumentError if a part was put in after `distribute`, or is being explained."""
    for name, module in model.named_modules():
        for held in _hidden(module):
            for inner, part in held.named_modules():
                if isinstance(part, OVER_ALL_NODES) or is_global_norm(part):
                    raise ArgumentError(
                        f"{name or 'the model'} has norms in a list, tuple or dict, where torch "
                        "does not find them. Use torch.nn.ModuleList or ModuleDict, and call "
                        "distribute(model, graph) again."
                    )
                if is_readout(held, inner) and _RUNNING not in vars(part):
                    vars(part)[_RUNNING] = None
                    part.register_forward_pre_hook(_check_readout, with_kwargs=True)
        running = vars(module).get(_RUNNING)
        if running is None and isinstance(module, _ADAPTED):
            raise ArgumentError(
                f"{name} ({type(module).__name__}) was put into the model after distribute. Call "
                "distribute(model, graph) again."
            )
        if isinstance(module, MessagePassing) and not is_attached(module):
            if module.explain:
                raise ArgumentError(
                    f"{name or 'the model'} is being explained, and this rank has a part of the "
                    "edges. Explain the model on the full graph, in one process."
                )
            attach(module, running, name)


def _hidden(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in lists, tuples and dicts of a module, which torch does not find."""
    left = [value for name, value in vars(module).items() if name not in _OWN]
    seen = set()
    while left:
        value = left.pop()
        if isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            parts = value.values() if isinstance(value, dict) else value
            left += [each for each in parts if isinstance(each, list | tuple | dict)]
            yield from (each for each in parts if isinstance(each, torch.nn.Module))


def _check_readout(module: Aggregation, args: object, given: dict[str, Any]) -> None:
    """Raise ArgumentError unless an aggregation of nodes or edges has a vector of the graph."""
    if not isinstance(given["index"], PartitionedIndex):
        raise ArgumentError(
            f"{type(module).__name__} would read out this rank's rows alone. Give it graph.batch, "
            'or graph["paper"].batch, as its index, or ids of groups that are named in '
            'graph.partition(data, groups=["cell"]).'
        )


def _running_of(model: torch.nn.Module, graph: PartitionedGraph) -> Running:
    """Return the state that all modules of this model share, moved to the graph; or a new one.

    Compiled code of the model stays valid.
    """
    known = {vars(module).get(_RUNNING) for module in model.modules()}
    running = known.pop()
    if known or not isinstance(running, Running) or running.root is not model:
        return Running(graph, model)
    running.move(graph)
    return running


def _checked(
    model: torch.nn.Module, graph: PartitionedGraph, digests: Digests, overlap: bool
) -> dict[str, object]:
    """Check the model; return digests, by name, of everything that must be equal on all ranks."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    checked_flag(overlap, "overlap", "")
    # under all names: a module that is exact inside a layer may be used outside too
    for name, module in model.named_modules(remove_duplicate=False):
        check_exact(name, module, model)
        check_deep(name, module, graph)
    state: dict[str, object] = {_OPTION: overlap}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(name, recurse=False))
        own |= dict(module.named_buffers(name, recurse=False))
        # beside uninitialised ones, the others may be uninitialised memory
        lazy = any(torch.nn.parameter.is_lazy(value) for value in own.values())
        for key, value in own.items():
            state[key] = "uninitialised" if lazy else (value.requires_grad, _digest(value, digests))
    for name, module in model.named_modules():
        if settings := _settings(module):
            state[f"{name or 'the model'} ({type(module).__name__})"] = settings
    return state


def _digest(value: torch.Tensor, digests: Digests) -> object:
    """Return the digest of a parameter; of one on a GPU, kept until an operation changes it."""
    if value.device.type == "cpu" or value.is_inference() or debugging():
        return digest(value)
    version, kept = digests.get(value, (None, None))
    if version != version_of(value):
        kept = digest(value)
        digests[value] = version_of(value), kept
    return kept


def _settings(module: torch.nn.Module) -> str:
    """Return the settings of a layer of torch or PyG: sizes, aggregations, options."""
    if not type(module).__module__.startswith(("torch.nn.modules.", "torch_geometric.nn.")):
        return ""  # own classes may hold values of this rank
    return ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(vars(module).items())
        if name != "training" and not name.startswith("_")
        if value is None or isinstance(value, bool | int | float | str)
    )


def _drop_cache(layer: MessagePassing) -> None:
    """Drop the values of another graph that a layer with ``cached=True`` keeps."""
    for name in ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h"):
        if name in vars(layer):
            setattr(layer, name, None)
