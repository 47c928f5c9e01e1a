"""``full_state_dict``: equal to the state dict of one process, from any sharding."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import varcomm as vc
from tests.checkpoint.tied import Odd, assert_states, made, sharded
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import full_state_dict
from varcomm.data_parallel import ShardedGradients
from varcomm.tensor_parallel import ColumnParallelLinear, parallelize


@on_ranks(*WORLDS)
def test_tensor_parallel(rank, ranks):
    expected = made(Odd).state_dict()
    model = sharded(made(Odd))
    for dst in (0, ranks - 1, None):
        found = full_state_dict(model, dst)
        if dst in (rank, None):
            assert_states(found, expected)
            assert found["head.weight"] is found["embedding.weight"]
            made(Odd).load_state_dict(found)
        else:
            assert found == {}


@on_ranks(3)
def test_only_shards_travel(rank):
    """Bytes from this rank: its shards only, to one rank and to all others."""
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)), {"0": "column"})
    own = sum(p.numel() for p in model[0].parameters()) * 4
    for dst, peers in ((1, rank != 1), (None, 2)):
        with vc.trace() as calls:
            full_state_dict(model, dst)
        assert calls.total.sent == own * peers


@on_ranks(3)
def test_data_parallel(rank):
    model, alone = made(Odd), made(Odd)
    optimizer = ShardedGradients(model, torch.optim.SGD)
    model.up(torch.ones(2, 4)).sum().backward()
    alone.up(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.optim.SGD(alone.parameters()).step()
    assert_states(full_state_dict(model, None), alone.state_dict())


@on_ranks(3)
def test_dtensors(rank):
    """Under fully_shard on two dimensions of ranks, with rows of torch's own."""
    mesh, expected = init_device_mesh("cpu", (3,)), made(Odd).state_dict()
    model = made(Odd)
    model.few = nn.Parameter(distribute_tensor(model.few.detach(), mesh, [Shard(1)]))
    fully_shard(model.up, mesh=mesh)
    found = full_state_dict(model, 2)
    assert bool(found) == (rank == 2)
    assert_states(found or expected, expected)


@on_ranks(3)
def test_stages(rank):
    """Each rank has a layer of its own, as pipeline stages have; a subgroup; one process."""
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(rank, 2)})
    found = full_state_dict(stage, 1)
    assert len(found) == (6 if rank == 1 else 0)
    if rank == 1:
        assert found["layer2.weight"].shape == (2, 2)


@pytest.mark.slow
@on_ranks(2)
def test_state_dicts_in_other_order(rank):
    """Ranks registered the same layers in other orders; each keeps its own."""
    names = ["a", "b", "c"][:: 1 - 2 * (rank % 2)]
    layers = {name: nn.Linear(2, ord(name) - 96) for name in "abc"}
    for layer in layers.values():
        nn.init.constant_(layer.weight, layer.out_features)
        nn.init.zeros_(layer.bias)
    expected = nn.ModuleDict({name: layers[name] for name in names}).state_dict()
    sharded = {name: ColumnParallelLinear.from_linear(layers[name]) for name in "abc"}
    assert_states(full_state_dict(nn.ModuleDict([(n, sharded[n]) for n in names]), None), expected)


@on_ranks(3)
def test_refused(rank):
    for call, kind, words in (
        (lambda: full_state_dict(nn.Linear(2, 1), 3), ArgumentError, "dst"),
        (lambda: full_state_dict({}), ArgumentError, "model must be a Module; got dict"),
        (lambda: full_state_dict(nn.Linear(2, 1), rank), DisagreementError, "disagree on dst"),
        (
            lambda: full_state_dict(nn.Linear(2, 1, device="meta" if rank == 1 else "cpu")),
            ArgumentError,
            "refused on rank 1 of 3: 'weight' must be a plain dense tensor",
        ),
        (lambda: full_state_dict(nn.Linear(2, rank)), DisagreementError, "'weight'"),
        (lambda: full_state_dict(nn.Linear(2, 1)), DisagreementError, "2 tensors differ"),
    ):
        torch.manual_seed(rank)
        with pytest.raises(kind, match=words):
            call()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank:
        model[1].weight = model[0].weight
    with pytest.raises(DisagreementError, match=r"'1\.weight'.*shared with '0\.weight'"):
        full_state_dict(model)


@pytest.mark.slow
@on_ranks(4)
def test_a_mesh_of_two_dimensions(rank):
    """Two groups of tensor parallelism: a copy of each shard in either."""
    mesh, expected = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")), made(Odd)
    model = parallelize(made(Odd), {"up": "column"}, group=mesh["model"])
    for dst in (3, None):
        found = full_state_dict(model, dst)
        if found:
            assert_states(found, expected.state_dict())
    model = made(Odd)
    fully_shard(model.up, mesh=mesh)
    found = full_state_dict(model, 2)
    assert_states(found or expected.state_dict(), expected.state_dict())


def test_one_process():
    model = made(Odd)
    found = full_state_dict(model)
    assert_states(found, model.state_dict())
    assert found["up.weight"].data_ptr() == model.up.weight.data_ptr()
