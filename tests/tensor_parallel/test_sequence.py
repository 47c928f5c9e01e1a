"""Modules between parallel layers that see a part of the sequence."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.twins import (
    REPLICATED,
    SPLITS,
    Sharded,
    compare,
    drawn,
    split,
)
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.parallelize import sequence_parallel

WIDTH = 5
KINDS = {
    "layer norm": lambda: nn.LayerNorm(WIDTH, dtype=torch.float64),
    "layer norm, no bias": lambda: nn.LayerNorm(WIDTH, bias=False, dtype=torch.float64),
    "rms norm": lambda: nn.RMSNorm(WIDTH, dtype=torch.float64),
    "linear": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
}


def checked(pattern, group=None):
    ranks = dist.get_world_size() if group is None else 2
    failures, parts = [], Sharded(0, split(pattern, ranks))
    x = (drawn(1, sum(parts.sizes), 2, WIDTH), parts)
    for kind, make in KINDS.items():
        torch.manual_seed(4)
        twin, module = make(), make()
        module.load_state_dict(twin.state_dict())
        sequence_parallel(module, group)
        names = [name for name, _ in module.named_parameters()]
        given = [
            (drawn(3 + i, *value.shape), REPLICATED)
            for i, value in enumerate(dict(twin.named_parameters()).values())
        ]

        def bound(layer, names=names):
            return lambda x, *values: functional_call(
                layer, dict(zip(names, values, strict=True)), (x,)
            )

        found = compare(bound(module), bound(twin), [x, *given], parts, group)
        failures += [f"{kind}: {text}" for text in found]
    return failures


def run(rank, pattern):
    return checked(pattern)


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
def test_values_and_derivatives(worlds, pattern, ranks):
    assert_none(worlds.run(ranks, run, pattern))


def in_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return checked("uneven", mesh["tensor"])


@pytest.mark.slow
def test_one_dimension_of_a_mesh(worlds):
    assert_none(worlds.run(4, in_groups))


def accumulated(rank):
    """Two micro-batches, and steps of an optimizer between them and two more."""
    failures, rows = Failures(), [[2, 0, 1], [1, 3, 2]]
    for kind, make in KINDS.items():
        torch.manual_seed(2)
        twin = make()
        torch.manual_seed(2)
        module = sequence_parallel(make())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, module)]
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for batch, sizes in enumerate(rows):
                x = drawn(10 * step + batch, sum(sizes), WIDTH)
                (twin(x) ** 2).sum().backward()
                (module(x.split(sizes)[rank]) ** 2).sum().backward()
            for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
                with failures.named(kind, step, name):
                    torch.testing.assert_close(a.grad, b.grad)
            for optimizer in optimizers:
                optimizer.step()
    return failures


def test_gradients_accumulate(worlds):
    assert_none(worlds.run(3, accumulated))


def kept(rank):
    """It stays what it is to optimizers, state dicts, isinstance and copies."""
    module = nn.LayerNorm(WIDTH)
    before, kind = dict(module.named_parameters()), type(module)
    same = sequence_parallel(module) is module
    module.weight.data.fill_(2)  # the parameter itself, not what forward reads
    copied = copy.deepcopy(nn.Sequential(module))[0]
    with torch.no_grad():
        copied.weight += rank  # a copy of its own
    other = nn.LayerNorm(WIDTH)
    other.load_state_dict(module.state_dict())
    copied.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="normalized_shape"):
        copied(torch.ones(2, WIDTH + 1))
    wide = copy.deepcopy(module).double()
    wide(torch.ones(rank + 1, WIDTH, dtype=torch.float64)).sum().backward()
    copied(torch.ones(rank + 1, WIDTH)).sum().backward()
    assert dict(module.named_parameters()).keys() == before.keys()
    return {
        "itself": same and isinstance(module, kind),
        "parameters": all(getattr(module, name) is p for name, p in before.items()),
        "in place": module(torch.eye(WIDTH)).std(correction=0).item(),
        "state": list(module.state_dict()) == list(before) == list(copied.state_dict()),
        "gradients": copied.bias.grad.tolist(),
        "of another dtype": wide.bias.grad.tolist(),
        "untouched": module.bias.grad is None,
        "unmarked": shard_spec(module.weight) is None,
        "name": type(module).__name__,
        "repr": repr(module),
    }


def test_it_stays_what_it_is(worlds):
    for found in worlds.run(2, kept):
        assert found == {
            "itself": True,
            "parameters": True,
            "in place": pytest.approx(2, rel=1e-3),
            "state": True,
            "gradients": [3.0] * WIDTH,
            "of another dtype": [3.0] * WIDTH,
            "untouched": True,
            "unmarked": True,
            "name": "SequenceParallelLayerNorm",
            "repr": f"SequenceParallel{nn.LayerNorm(WIDTH)}",
        }


def without_graph(rank):
    """Where nothing is differentiated, parameters are read as they are, and nothing travels."""
    norm = sequence_parallel(nn.RMSNorm(WIDTH))
    x = torch.ones(rank + 1, WIDTH)
    with varcomm.trace() as quiet:
        with torch.no_grad():
            read = norm.weight is norm._parameters["weight"]
            norm(x)
        with torch.inference_mode():
            norm(x)
        y = norm(x)
    with varcomm.trace() as calls:
        y.sum().backward()
    plain = sequence_parallel(nn.RMSNorm(WIDTH, elementwise_affine=False))
    return read, [c.sent + c.received for c in quiet], [(c.name, c.sent) for c in calls], plain(x)


def test_what_travels(worlds):
    for rank, (read, quiet, calls, y) in enumerate(worlds.run(2, without_graph)):
        assert read
        assert sum(quiet) == 0
        assert calls == [("replicated_sum", 4 * WIDTH)]
        assert y.shape == (rank + 1, WIDTH)
