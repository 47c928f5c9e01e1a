"""Partitioned graphs with torch's fully_shard, on a mesh of data x graph.

Parameters that no rank may have whole are fully_shard's. Halos are exchanged over one axis of the
mesh; parameters are sharded, and gradients summed, over both.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GraphConv

import varcomm as vc
from tests.worlds import on_ranks


class Net(torch.nn.Module):
    """Leading dimensions of 9, 7 and 2, over 4 ranks."""

    def __init__(self):
        super().__init__()
        self.inner = GraphConv(3, 9)
        self.attention = GATConv(9, 7)
        self.out = torch.nn.Linear(7, 2)

    def forward(self, x, edge_index):
        x = torch.tanh(self.inner(x, edge_index))
        return self.out(torch.tanh(self.attention(x, edge_index)))


def graphs(sizes):
    """One graph for each place along the data axis."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in sizes:
        x, y = (torch.randn(n, k, generator=generator).double() for k in (3, 2))
        edge_index = torch.randint(n, (2, 4 * n), generator=generator)
        made.append(Data(x=x, edge_index=edge_index, y=y))
    return made


def net():
    torch.manual_seed(1)
    return Net().double()


def train(model, parts):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        losses = [(model(part.x, part.edge_index) - part.y).square().sum() for part in parts]
        sum(losses).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(7, 11), (5, 1)], ids=["uneven", "one rank without a node"])
@on_ranks(4)
def test_a_mesh_of_data_and_graph(rank, sizes):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "graph"))
    data = graphs(sizes)[mesh["data"].get_local_rank()]
    graph = vc.graph.partition(data, group=mesh["graph"])
    model = vc.graph.distribute(net(), graph)
    whole = mesh._flatten("data_graph")
    for part in (model.inner, model.attention, model.out, model):
        fully_shard(part, mesh=whole)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    train(model, [graph])
    kept = sum(value.to_local().numel() for value in model.parameters())
    alone = net()
    train(alone, graphs(sizes))
    for value, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value.full_tensor(), expected.detach(), rtol=0, atol=1e-12)
    total = sum(value.numel() for value in alone.parameters())
    assert vc.all_reduce(torch.tensor(kept)) == total  # each element is on one rank
    assert kept < total / 2
