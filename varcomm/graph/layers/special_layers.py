"""Layers of PyG that look at all nodes past the edges, and what they do on a partitioned graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import dropout
from torch.nn.parameter import is_lazy
from torch_geometric import nn as pyg
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    get_laplacian,
    one_hot,
    remove_self_loops,
    scatter,
)

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.index.edges import EdgeRules
from varcomm.graph.index.node_groups import extreme, number_of
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.layers.propagate import Running
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.checks import checking
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.digest import differing
from varcomm.transport.agreement import share


def replace_methods(module: torch.nn.Module, running: Running) -> None:
    """Replace the methods of an instance that look at all nodes."""
    for kind, methods in _METHODS.items():
        if isinstance(module, kind):
            for name, function in methods.items():
                if getattr(type(module), name) is getattr(kind, name):
                    method = _Method(function, module, running)
                    if vars(module).get(name) != method:  # compiled code holds the former one
                        vars(module)[name] = method

    # to read the weight would be a step of a parametrization, such as spectral_norm
    if isinstance(module, pyg.Linear) and module.in_channels == -1 and module.bias is not None:
        module.bias.data.zero_()  # uninitialised memory, which stays in a layer without a call
    if isinstance(module, pyg.HeteroDictLinear | pyg.GMMConv) and hasattr(module, "_hook"):
        module.register_forward_pre_hook(_Method(_initialize, module, running), prepend=True)


def _initialize(
    self: Any, running: Running, module: Any, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Make lazy parameters from the width of x; PyG looks at its first row, which may be absent."""
    if isinstance(module, pyg.GMMConv):
        pair = (args[0], args[0]) if isinstance(args[0], torch.Tensor) else args[0]
        module.rel_in_channels = pair[0].shape[-1]  # which PyG leaves at -1
        return pair, *args[1:]
    _check_types(module, running, args[0])
    for key, x in args[0].items():
        linear = module.lins[key]
        if is_lazy(linear.weight):
            linear.initialize_parameters(None, x.new_empty(1, x.shape[1]))
            linear.reset_parameters()
    return None


_HAS_TYPES = "_varcomm_has_types"


def _check_types(module: torch.nn.Module, running: Running, x_dict: Any) -> None:
    """Compare the types of nodes in the first call of a lazy layer; collective."""
    if _HAS_TYPES in vars(module) or torch.compiler.is_compiling():
        return
    widths = {key: x.shape[-1] for key, x in x_dict.items()}
    others, names = differing(share("x_dict", lambda: widths, running.graph.group))
    if others:
        raise DisagreementError(
            f"x_dict: in the first call of a lazy layer, ranks {others} pass other types or widths "
            f"than rank 0: {', '.join(names)}. Pass graph.x_dict, which also has types of which "
            "this rank owns no nodes."
        )
    vars(module)[_HAS_TYPES] = True


@dataclass(frozen=True)
class _Method:
    """A method of an instance, copied with it."""

    function: Callable[..., Any]
    module: torch.nn.Module
    running: Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, self.running, *args, **kwargs)


def _attend(self: Any, running: Running, x: Any, edge_index: Any, *args: Any, **more: Any) -> Any:
    """Score edges and propagate after one exchange, in a forward that only passes scores on."""
    scores: Any = None
    scored: dict[str, Any] = {}
    methods: dict[str, Any] = {}
    others = (*args, *[value for name, value in more.items() if name != _RETURN])
    if (
        getattr(self, "add_self_loops", False)
        and isinstance(x, torch.Tensor)
        and isinstance(edge_index, PartitionedIndex)
        and isinstance(edge_index.of, EdgeRules)
        and all(value is None for value in others)
    ):
        edge_index, methods["add_self_loops"] = _with_loops(edge_index, len(x)), False

    def edge_updater(edge_index: Any, size: Any = None, **values: Any) -> None:
        if isinstance(values.get("alpha"), tuple):  # the terms of a score at both ends
            values["alpha"] = tuple(map(_computed_once, values["alpha"]))
        scored.update(values)

    def propagate(edge_index: Any, size: Any = None, alpha: None = None, **values: Any) -> Any:
        nonlocal scores
        running.check(edge_index, "propagate")
        read = self.edge_updater.at_sources(edge_index, scored)
        read += self.propagate.at_sources(edge_index, values)
        edge_index = edge_index.of.fetched(edge_index, read, self.node_dim)
        scores = self.edge_updater(edge_index, size=size, **scored)
        return self.propagate(edge_index, size=size, alpha=scores, **values)

    layer = _WithMethods(self, propagate=propagate, edge_updater=edge_updater, **methods)
    out = type(self).forward(layer, x, edge_index, *args, **more)
    return (out[0], (out[1][0], scores)) if isinstance(out, tuple) else out


_RETURN = "return_attention_weights"


def _computed_once(x: Any) -> Any:
    """Return few values per node, which a compiler would compute again at each edge."""
    is_recorded = isinstance(x, torch.Tensor) and torch.compiler.is_compiling()
    return torch.ops.varcomm.computed_once(x) if is_recorded else x


@torch.library.custom_op("varcomm::computed_once", mutates_args=())
def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_copied.register_fake(torch.empty_like)
_copied.register_autograd(lambda ctx, gradient: _computed_once(gradient))


def _with_loops(edge_index: Any, nodes: int) -> Any:
    """Return edges with one self loop at each node."""

    def make() -> Any:
        if edge_index.whole and edge_index.kind == "edges":
            return edge_index.of.with_loops(edge_index, nodes)
        return add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)[0]

    return edge_index.of.kept(edge_index, ("a self loop at each node", nodes), make)


class _WithMethods:
    """A layer with other attributes, for one call of PyG's forward."""

    def __init__(self, layer: Any, **methods: Any) -> None:
        vars(self).update(methods, layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _gcn_forward(
    self: Any,
    running: Running,
    x: torch.Tensor,
    edge_index: Any,
    edge_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale rows before they travel, and sums behind them: degrees need no exchange of their own.

    Each edge counts by the inverse roots of the degrees of both ends: Kipf and Welling, 2017.
    """
    is_plain = type(self) is pyg.GCNConv and self.normalize and not self.cached
    summed = is_plain and self.aggr == "add" and self.flow == "source_to_target"
    edges = edge_index.of if isinstance(edge_index, PartitionedIndex) else None
    exchanges = isinstance(edges, EdgeRules) and edges.exchanges and edge_index.kind == "edges"
    if not (summed and exchanges):
        return pyg.GCNConv.forward(self, x, edge_index, edge_weight)  # type: ignore[no-any-return]
    assert isinstance(edges, EdgeRules)
    nodes = x.size(self.node_dim)
    weight_of_loops = (2.0 if self.improved else 1.0) if self.add_self_loops else None
    make = partial(_gcn_scale, edge_index, edge_weight, weight_of_loops, nodes, x.dtype)
    if edge_weight is None:
        key = "inverse roots of degrees", weight_of_loops, nodes, x.dtype
        edge_index, edge_weight, scale = edges.kept(edge_index, key, make)
    else:
        edge_index, edge_weight, scale = make()
    rows = self.lin(x) * scale
    out = self.propagate(edge_index, x=rows, edge_weight=edge_weight) * scale
    return out if self.bias is None else out + self.bias  # type: ignore[no-any-return]


def _gcn_scale(
    edge_index: Any,
    edge_weight: torch.Tensor | None,
    weight_of_loops: float | None,
    nodes: int,
    dtype: torch.dtype,
) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """Return the edges of a GCN, their weights, and the inverse root of each node's degree."""
    if weight_of_loops is not None and edge_weight is None and edge_index.whole:
        edge_index = edge_index.of.with_loops(edge_index, nodes)
    elif weight_of_loops is not None:
        edge_index, edge_weight = add_remaining_self_loops(
            edge_index, edge_weight, weight_of_loops, nodes
        )
    count, device = edge_index.shape[1], edge_index.device
    weights = torch.ones(count, dtype=dtype, device=device) if edge_weight is None else edge_weight
    degrees = scatter(weights, edge_index[1], dim=0, dim_size=nodes, reduce="sum")
    scale = degrees.pow(-0.5)
    scale = _computed_once(scale.masked_fill(scale == float("inf"), 0))
    return edge_index, edge_weight, scale.unsqueeze(1)


def _gps_forward(
    self: Any,
    running: Running,
    x: torch.Tensor,
    edge_index: torch.Tensor,
    batch: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend from this rank's nodes to all nodes: every rank receives the features of all nodes."""

    def normalised(norm: Any, h: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if self.norm_with_batch else norm(h)  # type: ignore[no-any-return]

    parts = []
    if self.conv is not None:
        h = dropout(self.conv(x, edge_index, **kwargs), self.dropout, self.training)
        parts.append(normalised(self.norm1, h + x))
    group = running.graph.group
    sizes, pg = tuple(running.graph.node_sizes), group.process_group
    with checking("GPSConv", group) as where:
        if len(x) != sizes[group.rank]:
            raise ArgumentError(
                f"{where}x has {len(x)} rows, but this rank owns {sizes[group.rank]} nodes."
            )
    everyone, others = all_gather_v(x, sizes, group=pg), None
    if batch is not None:
        graphs = plain(batch)
        others = graphs.view(-1, 1) != all_gather_v(graphs, sizes, group=pg)
    rows = (x[None], everyone[None], everyone[None])
    h = self.attn(*rows, attn_mask=others, need_weights=False)[0][0]
    h = dropout(h, self.dropout, self.training)
    parts.append(normalised(self.norm2, h + x))
    out = torch.stack(parts).sum(0)
    return normalised(self.norm3, out + self.mlp(out))


def _han_forward(
    self: Any,
    running: Running,
    x_dict: dict[str, torch.Tensor],
    edge_index_dict: dict[Any, torch.Tensor],
    return_semantic_attention_weights: bool = False,
) -> Any:
    """Weigh types of edges by a mean over the nodes of all ranks: Wang et al., 2019."""
    heads = self.heads
    if any(is_lazy(linear.weight) for linear in self.proj.values()):
        _check_types(self, running, x_dict)
    nodes = {kind: self.proj[kind](x).unflatten(-1, (heads, -1)) for kind, x in x_dict.items()}
    found: dict[str, list[torch.Tensor]] = {kind: [] for kind in nodes}
    for (source, relation, target), edges in edge_index_dict.items():
        name = "__".join((source, relation, target))
        x = nodes[source], nodes[target]
        alpha = (x[0] * self.lin_src[name]).sum(-1), (x[1] * self.lin_dst[name]).sum(-1)
        found[target].append(self.propagate(edges, x=x, alpha=alpha).relu())
    pairs = {kind: _semantic(self, running, kind, outs) for kind, outs in found.items()}
    out = {kind: values for kind, (values, _) in pairs.items()}
    if not return_semantic_attention_weights:
        return out
    return out, {kind: weights for kind, (_, weights) in pairs.items()}


def _semantic(
    layer: Any, running: Running, kind: str, outs: list[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not outs:
        return None, None
    out = torch.stack(outs)
    parts = torch.tanh(layer.k_lin(out)).sum(1)
    count = torch.full_like(parts[:1], out.shape[1])
    total = all_reduce(torch.cat([parts, count]), group=running.graph.group.process_group)
    if out.shape[-1] == 0 or running.graph.node_shards[kind].sizes.total == 0:
        return out.view(0, out.shape[-1]), None
    score = (layer.q * (total[:-1] / total[-1].detach())).sum(-1)
    weights = torch.softmax(score, dim=0)
    return (weights.view(len(outs), 1, -1) * out).sum(0), weights


def _hgt_forward(
    self: Any, running: Running, x_dict: dict[str, torch.Tensor], edge_index_dict: dict[Any, Any]
) -> Any:
    """Attend over edges of all types into a node: Hu et al., 2020.

    PyG joins the types by offsets of local ids. Targets are owned and stay so; rows of sources are
    fetched type by type.
    """
    for edges in edge_index_dict.values():
        running.check(edges, "HGTConv")
    if running.step is not None:
        running.step("HGTConv")

    def propagate(
        joined: torch.Tensor, k: torch.Tensor, q: torch.Tensor, v: torch.Tensor, **values: Any
    ) -> torch.Tensor:
        of_types = torch.stack([k, v], 1).split([len(x_dict[key[0]]) for key in edge_index_dict])
        pairs = zip(of_types, edge_index_dict.values(), strict=True)
        at_edges, index = torch.cat([rows[edges[0]] for rows, edges in pairs]), joined[1]
        messages: torch.Tensor = self.message(
            at_edges[:, 0], q[index], at_edges[:, 1], index=index, ptr=None, size_i=len(q), **values
        )
        return messages.new_zeros(len(q), self.out_channels).index_add(0, index, messages)

    local = {key: plain(edges) for key, edges in edge_index_dict.items()}
    return pyg.HGTConv.forward(_WithMethods(self, propagate=propagate), x_dict, local)


@kept_from_compilation
def _cheb_norm(
    self: Any,
    running: Running,
    edge_index: torch.Tensor,
    num_nodes: int | None,
    edge_weight: torch.Tensor | None,
    normalization: str | None,
    lambda_max: Any = None,
    dtype: torch.dtype | None = None,
    batch: torch.Tensor | None = None,
) -> Any:
    """Scale the Laplacian by its largest weight on any rank, unless `lambda_max` is given."""
    if lambda_max is None:
        weights = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)[1]
        all_of_one = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        greatest = extreme("amax", weights, all_of_one, 1, running.graph.group, from_zero=False)
        lambda_max = 2.0 * greatest[0]
    own: Any = pyg.ChebConv.__norm__
    return own(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)


def _label_propagation(
    self: Any, running: Running, y: torch.Tensor, edge_index: torch.Tensor, *args: Any, **more: Any
) -> torch.Tensor:
    """Propagate the classes of all ranks' labels, of which this rank may lack the last ones."""
    if y.dtype == torch.int64 and len(y) == y.numel():
        y = one_hot(y.view(-1), num_classes=number_of(y, running.graph.group))
    return pyg.LabelPropagation.forward(self, y, edge_index, *args, **more)  # type: ignore[no-any-return]


def _no_edges(self: Any, running: Running, edge_index: torch.Tensor, *_: Any) -> torch.Tensor:
    return edge_index[:, :0]  # for the loss of attention


def _of_this_rank(self: Any, running: Running, *_: Any, why: str = "", **__: Any) -> Any:
    why = why or (
        "this method is a mean over the nodes or edges that it is given, which are this rank's, or "
        "samples among them. Compute the values of nodes or edges, and take graph.mean or "
        "graph.edges.mean of them."
    )
    with checking(type(self).__name__, running.graph.group) as where:
        raise ArgumentError(f"{where}{why}")


_all_pairs = partial(
    _of_this_rank,
    why="this method scores all pairs of the nodes that it is given, which are this rank's. Score "
    "the edges by forward(z, graph.edge_index), or the pairs of this rank's nodes with all nodes "
    "by z @ graph.gather(z).t().",
)


def _attention_loss(self: Any, running: Running) -> torch.Tensor:
    if self.training:
        return _of_this_rank(self, running)  # type: ignore[no-any-return]
    return pyg.SuperGATConv.get_attention_loss(self)  # type: ignore[no-any-return]


def _these(names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), _of_this_rank)


_METHODS: dict[type[torch.nn.Module], dict[str, Callable[..., Any]]] = {
    **{kind: {"forward": _attend} for kind in (pyg.GATConv, pyg.GATv2Conv, GATEConv)},
    pyg.GCNConv: {"forward": _gcn_forward},
    pyg.GPSConv: {"forward": _gps_forward},
    pyg.HANConv: {"forward": _han_forward},
    pyg.HGTConv: {"forward": _hgt_forward},
    pyg.ChebConv: {"__norm__": _cheb_norm},
    pyg.SuperGATConv: {
        "get_attention_loss": _attention_loss,
        "negative_sampling": _no_edges,
        "positive_sampling": _no_edges,
    },
    pyg.LabelPropagation: {"forward": _label_propagation},
    pyg.GAE: _these("recon_loss test"),
    pyg.VGAE: _these("kl_loss"),
    pyg.ARGA: _these("reg_loss discriminator_loss"),
    pyg.InnerProductDecoder: {"forward_all": _all_pairs},
    pyg.SignedGCN: _these("nll_loss pos_embedding_loss neg_embedding_loss loss test"),
    pyg.LightGCN: _these("link_pred_loss recommendation_loss recommend"),
    pyg.RECT_L: _these("get_semantic_labels"),
}
