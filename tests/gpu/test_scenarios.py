"""Each public function with tensors on a pretended GPU: right values, NCCL's rules, few looks."""

import importlib
import inspect

import pytest
import torch

import varcomm
from tests.gpu.check import second_step
from tests.gpu.pretended import MixedDevicesError, Pretended, looks, plain, pretended
from tests.gpu.scenarios import EXCEPTIONS, SCENARIOS
from tests.ops.comparing import assert_none
from tests.transport import test_nccl
from tests.transport.strict_nccl import strict_nccl
from varcomm import api

# Scenarios of the first tier: each way in which a look, a wrong device or an unread result appears.
FIRST = (
    *("all_gather_v", "reduce", "broadcast_with_like", "handles", "indexed_all_to_all_v", "plan"),
    *("sum_gradients", "sharded_gradients_clipped", "linears", "vocab_parallel_embedding", "gpt"),
    *("vocab_parallel_cross_entropy", "gcn_with_self_loops", "mesh_graph_net", "batch_norm"),
    *("global_max_pool", "sums_over_nodes_with_a_mask", "radius_while_nothing_is_searched"),
)


def tiers(names):
    slow = pytest.mark.slow
    return [name if name in FIRST else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize("name", tiers(SCENARIOS))
def test_looks_and_values(worlds, name):
    allowed = SCENARIOS[name].looks
    for rank, found in enumerate(worlds.run(2, second_step, 2, name, timeout=40)):
        lines = "\n".join(found)
        assert allowed is None or len(found) <= allowed, f"rank {rank} looks at values:\n{lines}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "reduce", "gpt", "gat_with_self_loops", "batch_norm"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_worlds(worlds, ranks, name):
    for found in worlds.run(ranks, second_step, ranks, name, timeout=40):
        assert len(found) <= SCENARIOS[name].looks


def on_pretended(rank, check):
    with strict_nccl(["cuda"]), pretended() as device:
        return check(rank, device)


@pytest.mark.slow
@pytest.mark.parametrize("check", test_nccl.CHECKS)
def test_primitives_and_plans(worlds, check):
    assert_none(worlds.run(3, on_pretended, check))


@pytest.mark.parametrize("module", EXCEPTIONS)
def test_every_public_name_is_in_the_table(module):
    """Fail for a new public name without a scenario, and for a name that is gone."""
    public = set(api.__all__ if module == "varcomm" else importlib.import_module(module).__all__)
    prefix = module.removeprefix("varcomm").lstrip(".")
    covered = {name for scenario in SCENARIOS.values() for name in scenario.covers}
    named = {c.rpartition(".")[2] for c in covered if c.rpartition(".")[0] == prefix}
    assert named | EXCEPTIONS[module].keys() == public
    assert not named & EXCEPTIONS[module].keys()


def test_rooms_of_the_table():
    # one process; ASE's arrays on the CPU; fields are a subclass that pretended tensors do not keep
    untried = {"varcomm.simulate", "varcomm.ase", "varcomm.grid"}
    assert {f"varcomm.{room}" for room in api.ROOMS} - untried == EXCEPTIONS.keys() - {"varcomm"}
    assert len(SCENARIOS) >= 45
    for name, scenario in SCENARIOS.items():
        calls = inspect.getsource(inspect.getmodule(scenario.make))
        for covered in scenario.covers:
            assert covered.rpartition(".")[2] in calls, (name, covered)


# --- The pretended tensors themselves

LOOKS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 1),
    "a mask": lambda x: x[x > 1],
    "a mask to write": lambda x: x.__setitem__(x > 1, 0),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "cpu": lambda x: x.cpu(),
    "to the CPU": lambda x: x.to("cpu", torch.float64),
    "to the device": lambda x: torch.ones(3).to(x.device),
    "to the device of another": lambda x: torch.ones(3).to(x),
    "tensor of a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "copy_ of a CPU tensor": lambda x: x.copy_(torch.ones(3)),
    "an index on the CPU": lambda x: x[torch.tensor([0, 1])],
}
NO_LOOKS = {
    "factories": lambda x: (x.new_zeros(2), torch.empty(2, device=x.device), torch.ones_like(x)),
    "arange": lambda x: torch.arange(3, device=x.device),
    "an index": lambda x: x[torch.arange(2, device=x.device)],
    "where": lambda x: torch.where(x > 1, x, 0),
    "dtype": lambda x: x.to(torch.float64).float(),
    "its own device": lambda x: x.to(x.device).cuda(),
    "repeat_interleave with its size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "a CPU scalar": lambda x: x * torch.tensor(2.0),
    "shapes": lambda x: (len(x), x.numel(), x.shape, x.dtype, x.is_contiguous(), x.data_ptr()),
}


@pytest.mark.parametrize(("calls", "expected"), [(LOOKS, 1), (NO_LOOKS, 0)])
def test_what_counts_as_a_look(calls, expected):
    with pretended() as device:
        for name, call in calls.items():
            x = torch.arange(3.0, device=device)
            with looks() as found:
                call(x)
            assert min(len(found), 1) == expected, (name, found)


def test_pretended_tensors_are_on_the_gpu():
    with pretended() as device:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model.to(device)
        assert model[1].weight is model[0].weight
        x = torch.ones(3, 2, requires_grad=True)
        model(x.to(device)).sum().backward()
        assert model[0].weight.grad.device == device
        assert x.grad.device.type == "cpu"
        assert type(x.grad) is torch.Tensor
        y = torch.ones(2, device=device)
        assert isinstance(y.view(1, 2)[0], Pretended)
        with pytest.raises(MixedDevicesError, match="cuda:0 and cpu"):
            y + torch.ones(2)
        with pytest.raises(TypeError, match="cuda:0"):
            y.numpy()
        assert plain(y).tolist() == [1, 1]


def mixed(rank):
    """Call with a part of the arguments on the CPU: each is an error on this rank."""
    sizes = [2, 2]
    needed = torch.tensor([0, 3])
    with strict_nccl(["cuda"]), pretended() as device:
        x = torch.ones(2, 3, device=device)
        on_cpu = varcomm.ExchangePlan.from_needed(needed, sizes)
        on_gpu = on_cpu.to(device)
        counts, indices = [[1, 1], [1, 1]], [torch.zeros(1, dtype=torch.long)] * 2
        errors = varcomm.ArgumentError, MixedDevicesError
        with pytest.raises(errors):
            on_cpu(x)
        with pytest.raises(errors):
            on_gpu(torch.ones(2, 3))
        with pytest.raises(errors):
            varcomm.indexed_all_to_all_v(x, indices, counts)


def test_mixed_devices_are_an_error(worlds):
    worlds.run(2, mixed)
