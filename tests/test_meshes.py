"""A mesh that is no group is refused in each layer."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_geometric.data import Data

import varcomm as vc
import varcomm.tensor_parallel as tp
from tests.worlds import on_ranks
from varcomm import ExchangePlan, GroupError, ShardSizes
from varcomm.sharding import to_dtensor


@on_ranks(3)
def test_a_mesh_that_is_no_group_is_refused_in_each_layer(rank):
    """A mesh of two dimensions, and one without this rank: an error before any message."""
    x = torch.zeros(2, 2)
    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("a", "b"))
    elsewhere = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("a", "b"))["b"]
    refusals = [(grid, r"one dimension of a DeviceMesh; .* Pick one: mesh\['a'\]")]
    if rank == 0:
        refusals += [(elsewhere, "rank 0 of the world is not in the mesh")]
    for mesh, message in refusals:
        for call in (
            lambda group: vc.all_reduce(x, group=group),
            lambda group: ShardSizes.from_local(2, group),
            lambda group: ExchangePlan.from_needed(torch.tensor([0]), [2, 2], group),
            lambda group: vc.graph.partition(Data(x=x, edge_index=x.long()), group=group),
            lambda group: vc.data_parallel.sum_gradients(nn.Linear(2, 2), group),
            lambda group: vc.data_parallel.ShardedGradients(
                nn.Linear(2, 2), torch.optim.SGD, group=group
            ),
            lambda group: tp.ColumnParallelLinear(2, 2, group=group),
            lambda group: vc.checkpoint.save({"x": x}, "nowhere", group=group),
            lambda group: vc.testing.dot_test(lambda x: x, x, group=group),
            lambda group: to_dtensor(x, [2, 2], 0, group),
        ):
            with pytest.raises(GroupError, match=message):
                call(mesh)
    assert vc.all_reduce(torch.tensor(1)).item() == 3
