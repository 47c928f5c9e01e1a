"""Replaced functions of ``HANConv`` and ``HGTConv``, which look at all nodes or types at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.graph.edge_shard import LocalEdges
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.plan.exchange_plan import ExchangePlan

__all__ = ["han_group_in", "hgt_edges_in"]


def han_group_in(context: ShardContext) -> Callable[..., Any]:
    """Return the ``group`` of ``HANConv``, whose attention is a mean over all nodes of a type.

    Communication: an all-reduce of a row of features for each type of edges, and one for counts.
    """

    @kept_from_compilation
    def group(
        xs: list[torch.Tensor], q: torch.Tensor, k_lin: torch.nn.Module
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not xs:
            return None, None
        out = torch.stack(xs)
        parts = torch.tanh(k_lin(out)).sum(1)
        count = torch.full_like(parts[:1], out.shape[1])
        total = all_reduce(torch.cat([parts, count]), group=context.group.process_group)
        if out.shape[-1] == 0 or not bool((total[-1] > 0).any()):
            return out.view(0, out.shape[-1]), None
        score = (q * (total[:-1] / total[-1].detach())).sum(-1)
        attention = torch.softmax(score, dim=0)
        return (attention.view(len(xs), 1, -1) * out).sum(0), attention

    return group


def hgt_edges_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``construct_bipartite_edge_index``, with which ``HGTConv`` makes one graph of all.

    Its sources are the sources of all types of edges, one type after the other, and its targets the
    nodes of all types. Halos of all types come in one exchange, rank by rank.
    """

    @kept_from_compilation
    def construct_bipartite_edge_index(
        edge_index_dict: dict[Any, torch.Tensor],
        src_offset_dict: dict[Any, int],
        dst_offset_dict: dict[str, int],
        edge_attr_dict: Any = None,
        num_nodes: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with checking("HGTConv", context.group) as where:
            if not context.graph.node_shards.keys() >= dst_offset_dict.keys():
                raise ArgumentError(
                    f"{where}it has nodes of types {', '.join(dst_offset_dict)}, and the graph is "
                    f"of {context.graph.node_types}. Partition a HeteroData."
                )
            sets = [context.checked(edge_index_dict[kind], where) for kind in src_offset_dict]
        offsets = tuple(src_offset_dict.values())
        which = (offsets, *(edges.plan for edges in sets))
        if which not in context.joined:
            context.joined[which] = _all_in_one(sets, offsets)
        plan, numbers = context.joined[which]
        parts, attributes = [], []
        for edge_type, number in zip(src_offset_dict, numbers, strict=True):
            source, target = edge_index_dict[edge_type]
            parts.append(torch.stack([number[source], target + dst_offset_dict[edge_type[-1]]]))
            if edge_attr_dict is not None:
                name = "__".join(edge_type)
                value = edge_attr_dict[name if name in edge_attr_dict else edge_type]
                attributes.append(value.expand(len(source), -1))
        targets = sum(context.graph[node_type].num_owned for node_type in dst_offset_dict)
        edges = LocalEdges(torch.cat(parts, dim=1), plan, targets)
        context.claim(edges.edge_index, edges)
        return edges.edge_index, torch.cat(attributes) if attributes else None

    return construct_bipartite_edge_index


def _all_in_one(
    sets: list[LocalEdges], offsets: tuple[int, ...]
) -> tuple[ExchangePlan, list[torch.Tensor]]:
    """Return a plan for the sources of all edges, and for each set how its sources are numbered."""
    group = sets[0].plan.group
    device = sets[0].edge_index.device
    rows = sum(edges.num_sources for edges in sets)
    sent = [edges.plan.send_index.split(list(edges.plan.send_counts)) for edges in sets]
    send_index = [
        part[rank] + offset
        for rank in range(group.size)
        for part, offset in zip(sent, offsets, strict=True)
    ]
    send_counts, recv_counts = (
        tuple(map(sum, zip(*each, strict=True)))
        for each in (
            [edges.plan.send_counts for edges in sets],
            [edges.plan.recv_counts for edges in sets],
        )
    )
    identity = crc32(repr([edges.plan.identity for edges in sets]).encode())
    plan = ExchangePlan(group, torch.cat(send_index), send_counts, recv_counts, rows, identity)
    numbers = [
        [torch.arange(edges.num_sources, device=device) + offset]
        for edges, offset in zip(sets, offsets, strict=True)
    ]
    place = rows
    for rank in range(group.size):
        for edges, number in zip(sets, numbers, strict=True):
            count = edges.plan.recv_counts[rank]
            number.append(torch.arange(place, place + count, device=device))
            place += count
    return plan, [torch.cat(number) for number in numbers]
