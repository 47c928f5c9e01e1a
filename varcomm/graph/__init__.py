"""Graphs that are split over ranks, and models of PyTorch Geometric that run on them unchanged."""

from varcomm.errors import MissingModuleError

try:
    import torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingModuleError(
        'varcomm.graph needs PyTorch Geometric: pip install "varcomm[graph]"'
    ) from error

from varcomm.graph.assign import assign
from varcomm.graph.distribute import distribute
from varcomm.graph.partition import partition
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.report import Report

__all__ = ["PartitionedGraph", "Report", "assign", "distribute", "partition"]
