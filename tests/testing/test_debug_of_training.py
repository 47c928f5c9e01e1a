"""`vc.debug()` finds a forgotten `sum_gradients` and a forgotten `replicated`."""

import warnings
from itertools import product

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, global_max_pool, global_mean_pool

import varcomm as vc
from tests.worlds import WORLDS, on_ranks


def parts():
    torch.manual_seed(0)
    data = Data(x=torch.randn(30, 4), edge_index=torch.randint(30, (2, 120)))
    data.batch = torch.arange(30) // 10
    return vc.graph.partition(data, method="random")


def trained(graph, sums, table=0):
    """Train for 12 steps inside debug()."""
    torch.manual_seed(0)
    model = vc.graph.distribute(GCN(4, 8, num_layers=2, out_channels=2), graph)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vc.debug():
        for _ in range(12):
            optimizer.zero_grad()
            graph.mean(model(graph.x, graph.edge_index) ** 2 + table).backward()
            if sums:
                vc.data_parallel.sum_gradients(model)
            optimizer.step()


@on_ranks(3)
def test_parameters_that_drift(rank):
    graph = parts()
    trained(graph, sums=True)
    # values of one rank, which differ from the first
    trained(graph, sums=True, table=torch.nn.Parameter(torch.full((2,), rank + 1.0)))
    with pytest.raises(vc.DisagreementError, match="sum_gradients") as error:
        trained(graph, sums=False)
    assert "4 of 4 parameters" in str(error.value)


def warned_of(graph, pool, counted_once):
    torch.manual_seed(0)
    layer = vc.graph.distribute(GCNConv(4, 2), graph)
    with warnings.catch_warnings(record=True) as found, vc.debug():
        warnings.simplefilter("always")
        pooled = pool(layer(graph.x, graph.edge_index), graph.batch)
        loss = (pooled**2).sum()
        (vc.graph.replicated(loss, graph) if counted_once else loss).backward()
    return [str(each.message) for each in found]


@on_ranks(*WORLDS[:2])
def test_losses_that_count_once_per_rank(rank, ranks):
    graph = parts()
    for pool, once in product((global_mean_pool, global_max_pool), (True, False)):
        found = warned_of(graph, pool, once)
        assert len(found) == (ranks > 1 and not once)
        assert all("replicated(loss, graph)" in text for text in found)
    # back to nodes: each rank has other gradients of the pooled values
    with vc.debug(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        x = graph.x.clone().requires_grad_()
        graph.mean((x - global_mean_pool(x, graph.batch)[graph.batch]) ** 2).backward()
