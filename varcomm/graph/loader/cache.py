"""Choice of the rows of other ranks that a loader keeps."""

from __future__ import annotations

import numpy as np
import torch

from varcomm.graph.build.pyg_data import ends
from varcomm.graph.draws import Array
from varcomm.graph.partitioned_graph import NodeType, PartitionedGraph
from varcomm.ops.all_gather_v import all_gather_v


def often_fetched(graph: PartitionedGraph, kind: NodeType, rows: int) -> Array:
    """Return the global numbers of up to `rows` nodes of other ranks to cache; collective.

    Halo nodes by the number of their edges into this rank's nodes, then nodes of the full graph by
    out-degree.
    """
    nodes, group = graph.node_shards[kind], graph.group
    first, own = nodes.sizes.offsets[group.rank], nodes.num_owned
    degree = torch.zeros(own, dtype=torch.int64, device="cpu")
    halo = [np.zeros((0, 2), np.int64)]
    for edge_type, edges in graph.edge_shards.items():
        if ends(edge_type)[0] != kind:
            continue
        count = torch.bincount(edges.local_ids[0].cpu(), minlength=own + edges.num_halo)
        degree += count[:own] + edges.plan.adjoint(count[own:].to(edges.ids.device)).cpu()
        number = nodes.directory.look_up(edges.halo_ids).cpu()
        halo.append(torch.stack([number, count[own:]], dim=1).numpy())
    top = degree.topk(min(rows, own)).indices
    pairs = torch.stack([top + first, degree[top]], dim=1)
    counts = [min(rows, size) for size in nodes.sizes]
    frequent = all_gather_v(pairs.to(nodes.ids.device), counts, group=group.process_group).cpu()
    order: list[Array] = []
    for table in (np.concatenate(halo), frequent.numpy()):
        order.append(table[np.argsort(-table[:, 1], kind="stable"), 0])
    numbers = np.concatenate(order)
    numbers = numbers[(numbers < first) | (numbers >= first + own)]
    _, place = np.unique(numbers, return_index=True)
    return np.sort(numbers[np.sort(place)[:rows]])
