"""Graphs that are split over ranks, and models of PyTorch Geometric that run on them unchanged."""

from varcomm.errors import MissingModuleError

try:
    import torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingModuleError(
        'varcomm.graph needs PyTorch Geometric: pip install "varcomm[graph]"'
    ) from error

from varcomm.graph.assign import assign
from varcomm.graph.assign_sharded import assign_sharded
from varcomm.graph.distribute import distribute
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.from_edges import from_edges
from varcomm.graph.mesh import Mesh, read_mesh
from varcomm.graph.overlap import edge_update, message_passing
from varcomm.graph.partition import partition
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.pooling import (
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    global_min_pool,
    global_softmax,
)
from varcomm.graph.reductions import replicated
from varcomm.graph.report import Report
from varcomm.graph.shard import NodeShard

__all__ = [
    "EdgeShard",
    "Mesh",
    "NodeShard",
    "PartitionedGraph",
    "Report",
    "assign",
    "assign_sharded",
    "distribute",
    "edge_update",
    "from_edges",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "global_min_pool",
    "global_softmax",
    "message_passing",
    "partition",
    "read_mesh",
    "replicated",
]
