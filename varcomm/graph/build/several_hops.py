"""Halos of several hops: the edges into the halo, and the nodes beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch_geometric.data import HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.packing import counted_from
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import at_least
from varcomm.transport.agreement import share


def check_hops(hops: int, data: Any) -> None:
    """Raise unless halos can have this many hops."""
    if at_least(1, hops, "hops") > 1 and isinstance(data, HeteroData):
        raise ArgumentError(
            f"hops={hops} is for graphs with one type of nodes. Leave hops at 1 for HeteroData."
        )


def deepened(graph: PartitionedGraph, hops: int) -> PartitionedGraph:
    """Return the graph with a halo of `hops` hops, and the edges into all but the last hop.

    Collective. Per hop, each rank requests the edges into its outermost nodes from their owners.
    Halo nodes of all hops stand in the order of their global numbers; edges into the halo
    stand behind the owned edges.
    """
    if hops == 1:
        return graph
    edges, sizes, group = graph.edges, graph.node_sizes, graph.group
    pg, rank = group.process_group, group.rank
    first, owned = sizes.offsets[rank], graph.num_owned
    own_numbers = torch.arange(first, first + owned, device=edges.local_ids.device)
    halo = edges.plan(own_numbers)
    number = torch.cat([own_numbers, halo])
    source, target = edges.local_ids
    # sorted, because ranks may have their attributes in different orders
    own = {f"attribute {key}": edges.attributes[key] for key in sorted(edges.attributes)}
    own |= {"source": number[source], "target": number[target]}
    by_target = torch.sort(target, stable=True).indices
    counts = torch.bincount(target, minlength=owned)

    found, frontier = [own], halo
    for _ in range(hops - 1):
        if not any(share("graph.partition", frontier.__len__, group)):
            break  # no rank needs more edges
        asked = ExchangePlan.from_needed(frontier, sizes, group=pg)
        index = _edges_into(asked, by_target, counts)
        edges_to_ranks = ExchangePlan.from_indices(index, len(source), group=pg)
        found.append({key: edges_to_ranks(value) for key, value in own.items()})
        sources = found[-1]["source"].unique()
        frontier = sources[~torch.isin(sources, halo) & ~_is_own(sources, first, owned)]
        halo = torch.cat([halo, frontier]).sort().values

    whole = {key: torch.cat([part[key] for part in found]) for key in own}
    plan = ExchangePlan.from_needed(halo, sizes, group=pg)
    numbers = torch.stack([whole["source"], whole["target"]])
    beyond = owned + torch.searchsorted(halo, numbers)
    shard = replace(
        edges,
        attributes={key: whole[f"attribute {key}"] for key in edges.attributes},
        local_ids=torch.where(_is_own(numbers, first, owned), numbers - first, beyond),
        halo_ids=plan(graph.owned_ids),
        plan=plan,
        hops=int(hops),
        known_counts=None,
    )
    return replace(graph, edge_shards={None: shard})


def _is_own(numbers: torch.Tensor, first: int, owned: int) -> torch.Tensor:
    return (numbers >= first) & (numbers < first + owned)


def _edges_into(
    asked: ExchangePlan, by_target: torch.Tensor, counts: torch.Tensor
) -> list[torch.Tensor]:
    """Return the edges into the nodes that each rank requests."""
    starts, counts = (counts.cumsum(0) - counts)[asked.send_index], counts[asked.send_index]
    index = by_target[counted_from(starts, counts)]
    edges_per_rank = torch.stack([part.sum() for part in counts.split(asked.send_counts)])
    return list(index.split(edges_per_rank.tolist()))
