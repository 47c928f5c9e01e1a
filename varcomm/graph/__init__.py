"""Graphs that are split over ranks, and models of PyTorch Geometric that run on them unchanged."""

from varcomm.errors import MissingModuleError

try:
    import torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingModuleError(
        "varcomm.graph needs PyTorch Geometric: pip install torch_geometric"
    ) from error

from varcomm.graph import plot, saved_partition
from varcomm.graph.build.from_edges import from_edges
from varcomm.graph.build.partition import partition
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.layers.distribute import distribute
from varcomm.graph.layers.exchange_before import exchange_before
from varcomm.graph.layers.message_passing import edge_update, message_passing
from varcomm.graph.layers.norms import global_norm
from varcomm.graph.loader.link_neighbor_loader import LinkNeighborLoader
from varcomm.graph.loader.loader import LoaderReport
from varcomm.graph.loader.neighbor_loader import NeighborLoader
from varcomm.graph.mesh.mesh import Mesh, read_mesh
from varcomm.graph.mesh.mesh_writer import MeshWriter
from varcomm.graph.neighbours.knn import knn
from varcomm.graph.neighbours.radius import radius
from varcomm.graph.node_shard import NodeShard
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.partitioners.assign import assign, assign_sharded
from varcomm.graph.repartition import migrate
from varcomm.graph.repartition.rebalance import rebalance
from varcomm.graph.repartition.transfer import Transfer, remap, transfer
from varcomm.graph.replicated_values import replicated
from varcomm.graph.report import Report
from varcomm.graph.samples.row_writer import RowWriter
from varcomm.graph.samples.rows import Rows

# Methods that need modules above partitioned_graph.py; it declares their types.
PartitionedGraph.plot = plot.plot  # type: ignore[method-assign]
PartitionedGraph.migrate = migrate.migrate  # type: ignore[method-assign]
PartitionedGraph.save = saved_partition.save  # type: ignore[method-assign]
PartitionedGraph.load = staticmethod(saved_partition.load)  # type: ignore[method-assign]

__all__ = [
    "EdgeShard",
    "LinkNeighborLoader",
    "LoaderReport",
    "Mesh",
    "MeshWriter",
    "NeighborLoader",
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
