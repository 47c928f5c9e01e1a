"""Aggregations of PyG that are not exact on a part of a graph, or fail where there are no edges."""

import pytest
import torch
import torch_geometric.nn as pyg

from tests.graph.graphs import wild
from varcomm import ArgumentError
from varcomm.graph import distribute, partition

UNKNOWN = {
    "LSTM": lambda: pyg.aggr.LSTMAggregation(4, 4),
    "GRU": lambda: pyg.aggr.GRUAggregation(4, 4),
    "LCM": lambda: pyg.aggr.LCMAggregation(4, 4),
    "Equilibrium": lambda: pyg.aggr.EquilibriumAggregation(4, 4, [8], 4),
    "SetTransformer": lambda: pyg.aggr.SetTransformerAggregation(4, heads=2),
    "Sort": lambda: pyg.aggr.SortAggregation(2),
    "GraphMultisetTransformer": lambda: pyg.aggr.GraphMultisetTransformer(4, 2, 1),
    "PatchTransformer": lambda: pyg.aggr.PatchTransformerAggregation(4, 4, 2, 8, 1, 2),
    "Quantile": lambda: pyg.aggr.QuantileAggregation(0.3),
    "one of several": lambda: pyg.aggr.MultiAggregation(["mean", pyg.aggr.SortAggregation(2)]),
    "one in another": lambda: pyg.aggr.DegreeScalerAggregation(
        pyg.aggr.MedianAggregation(), "identity", torch.ones(3, dtype=torch.int64)
    ),
}


def refused_aggregation(rank, name):
    torch.manual_seed(0)
    with pytest.raises(ArgumentError, match="is not known to be exact on a part"):
        distribute(pyg.SAGEConv(4, 4, aggr=UNKNOWN[name]()), partition(wild(), method="block"))


@pytest.mark.parametrize("name", UNKNOWN)
def test_aggregations_that_are_not_known(worlds, name):
    assert worlds.run(2, refused_aggregation, name) == [None] * 2
