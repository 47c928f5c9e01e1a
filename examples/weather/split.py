"""Partitions of grid and mesh together, and the rows that other partitions would fetch."""

from collections.abc import Mapping

import torch
from torch_geometric.data import Data, HeteroData

import varcomm as vc
from varcomm.models.multi_mesh import DECODER, ENCODER, PROCESSOR

Owner = Mapping[str, torch.Tensor]  # the rank of each node, by type


def passes(blocks: int) -> dict[tuple[str, str, str], int]:
    """Return the number of messages per step along the edges of each type."""
    return {ENCODER: 1, PROCESSOR: blocks, DECODER: 1}


def together(data: HeteroData, ranks: int, blocks: int) -> Owner:
    """Partition grid and mesh at once with METIS: parts of equal work, few messages.

    The weight of a node is one plus the messages that it receives per step. The weight of an edge
    is the number of its uses per step.
    """
    times = passes(blocks)
    work = {kind: torch.ones(data[kind].num_nodes, dtype=torch.int64) for kind in data.node_types}
    for kind, count in times.items():
        received = torch.bincount(data[kind].edge_index[1], minlength=data[kind[2]].num_nodes)
        work[kind[2]] += count * received
    cost = {kind: torch.full((data[kind].num_edges,), count) for kind, count in times.items()}
    return vc.graph.assign(data, ranks, "metis", node_weight=work, edge_weight=cost)


def each_by_itself(data: HeteroData, ranks: int) -> Owner:
    """Partition the mesh with METIS, and the grid by bisection."""
    mesh = Data(edge_index=data[PROCESSOR].edge_index, num_nodes=data["mesh"].num_nodes)
    grid = Data(pos=data["grid"].pos)
    return {
        "grid": vc.graph.assign(grid, ranks, "rcb"),
        "mesh": vc.graph.assign(mesh, ranks, "metis"),
    }


def fetched(data: HeteroData, owner: Owner, ranks: int) -> list[int]:
    """Return the rows that all ranks fetch for encoder, a processor block and decoder."""
    found = []
    for kind in (ENCODER, PROCESSOR, DECODER):
        source, target = data[kind].edge_index
        at, home = owner[kind[2]][target], owner[kind[0]][source]
        found.append(len((source * ranks + at)[at != home].unique()))
    return found


def table(data: HeteroData, owner: Owner, ranks: int, blocks: int, hidden: int) -> str:
    """Return a table of the rows that a forecast fetches with three partitions."""
    ways = {
        "together": owner,
        "each by itself": each_by_itself(data, ranks),
        "in blocks of numbers": vc.graph.assign(data, ranks, "block"),
    }
    lines = [f"{'rows fetched by all ranks':25} encoder  processor  decoder  MB per forecast"]
    for name, way in ways.items():
        into, along, out = fetched(data, way, ranks)
        size = (into + blocks * along + out) * hidden * 4 / 1e6
        lines.append(f"  {name:23} {into:7,}  {f'{blocks} x {along:,}':>9}  {out:7,}  {size:13.2f}")
    return "\n".join(lines)
