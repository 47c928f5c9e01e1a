"""Graphs that are split over ranks, and models of PyTorch Geometric that run on them unchanged."""

from varcomm.errors import MissingModuleError

try:
    import torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingModuleError(
        "varcomm.graph needs PyTorch Geometric: pip install torch_geometric"
    ) from error

from varcomm.graph.adapt.distribute import distribute
from varcomm.graph.adapt.exchange_before import exchange_before
from varcomm.graph.adapt.message_passing import edge_update, message_passing
from varcomm.graph.building.from_edges import from_edges
from varcomm.graph.building.partition import partition
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.files.mesh import Mesh, read_mesh
from varcomm.graph.files.mesh_writer import MeshWriter
from varcomm.graph.moving.rebalance import rebalance
from varcomm.graph.moving.transfer import Transfer, remap, transfer
from varcomm.graph.neighbours.knn import knn
from varcomm.graph.neighbours.radius import radius
from varcomm.graph.nn.norms import global_norm
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.partitioners.assign import assign, assign_sharded
from varcomm.graph.reductions import replicated
from varcomm.graph.report import Report
from varcomm.graph.rows.reading import Rows
from varcomm.graph.rows.writing import RowWriter
from varcomm.graph.shard import NodeShard

__all__ = [
    "EdgeShard",
    "Mesh",
    "MeshWriter",
    "NodeShard",
    "PartitionedGraph",
    "Report",
    "RowWriter",
    "Rows",
    "Transfer",
    "assign",
    "assign_sharded",
    "distribute",
    "edge_update",
    "exchange_before",
    "from_edges",
    "global_norm",
    "knn",
    "message_passing",
    "partition",
    "radius",
    "read_mesh",
    "rebalance",
    "remap",
    "replicated",
    "transfer",
]
