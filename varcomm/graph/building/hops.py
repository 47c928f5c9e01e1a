"""Halos of several hops: the rows that several layers need, filled by one exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch_geometric.data import HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.building.redistribute import Shuffle
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.packing import taken
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.agreement import share

__all__ = ["check_hops", "deepened"]


def check_hops(hops: int, data: Any) -> None:
    """Raise unless halos can have this many hops."""
    if exact_int(hops) is None or hops < 1:
        raise ArgumentError(f"hops must be a positive integer; got {hops!r}.")
    if hops > 1 and isinstance(data, HeteroData):
        raise ArgumentError(
            f"hops={hops} is for graphs with one type of nodes. Leave hops at 1 for HeteroData."
        )


def deepened(graph: PartitionedGraph, hops: int) -> PartitionedGraph:
    """Return the graph with a halo of `hops` hops, and the edges into all but the last hop.

    Collective. Per hop, each rank requests the edges into its outermost nodes from their owners.
    Halo nodes stand in the order of their global numbers, whatever their hop; edges into the halo
    stand behind the owned edges.
    """
    if hops == 1:
        return graph
    edges, sizes, group = graph.edges, graph.node_sizes, graph.group
    for name, value in edges.attributes.items():  # the types agree across ranks
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"hops={hops} needs attributes of edges that are tensors; {name} is of "
                f"{type(value).__name__}."
            )
    pg = group.process_group
    first, owned = sizes.offsets[group.rank], graph.num_owned
    own_numbers = torch.arange(first, first + owned, device=edges.local_ids.device)
    halo = edges.plan(own_numbers)
    number = torch.cat([own_numbers, halo])
    own = {
        "source": number[edges.local_ids[0]],
        "target": number[edges.local_ids[1]],
        # sorted, because ranks may have their attributes in different orders
        **{f"attribute {key}": edges.attributes[key] for key in sorted(edges.attributes)},
    }
    by_target = torch.sort(edges.local_ids[1], stable=True).indices
    stops = torch.bincount(edges.local_ids[1], minlength=owned).cumsum(0)

    found, frontier = [own], halo
    for _ in range(hops - 1):
        if not any(share("graph.partition", frontier.__len__, group)):
            break  # no rank needs more edges
        asked = ExchangePlan.from_needed(frontier, sizes, group=pg)
        index, destination = _edges_into(asked, by_target, stops)
        shuffle = Shuffle.to(destination, group)
        more = {key: shuffle.carry(taken(value, index)) for key, value in own.items()}
        found.append(more)
        source = more["source"].unique()
        is_new = (source < first) | (source >= first + owned)
        is_new &= ~torch.isin(source, halo)
        frontier = source[is_new]
        halo = torch.cat([halo, frontier]).sort().values

    whole = {key: torch.cat([part[key] for part in found]) for key in own}
    plan = ExchangePlan.from_needed(halo, sizes, group=pg)
    shard = replace(
        edges,
        attributes={key: whole[f"attribute {key}"] for key in edges.attributes},
        edge_index=torch.stack(
            [_local(whole[end], halo, sizes, group.rank) for end in ("source", "target")]
        ),
        halo_ids=plan(graph.owned_ids),
        plan=plan,
        hops=int(hops),
        counts=None,
    )
    return replace(graph, edge_shards={None: shard})


def _edges_into(
    asked: ExchangePlan, by_target: torch.Tensor, stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the edges into the requested nodes, and the requesting rank of each edge."""
    counts = stops.diff(prepend=stops.new_zeros(1))[asked.send_index]
    starts = stops[asked.send_index] - counts
    # position of each edge among the edges of its node, and so in `by_target`
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    nth = torch.arange(len(first), device=first.device) - first
    index = by_target[starts.repeat_interleave(counts) + nth]
    per_rank = torch.tensor(asked.send_counts, dtype=torch.int64, device=first.device)
    ranks = torch.arange(len(per_rank), device=first.device).repeat_interleave(per_rank)
    return index, ranks.repeat_interleave(counts)


def _local(numbers: torch.Tensor, halo: torch.Tensor, sizes: ShardSizes, rank: int) -> torch.Tensor:
    """Return the local numbers of owned and halo nodes."""
    first, owned = sizes.offsets[rank], sizes[rank]
    is_own = (numbers >= first) & (numbers < first + owned)
    return torch.where(is_own, numbers - first, owned + torch.searchsorted(halo, numbers))
