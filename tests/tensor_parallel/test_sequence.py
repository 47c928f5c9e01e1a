"""Modules between parallel layers that see a part of the sequence."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from tests.tensor_parallel.twins import REPLICATED, SPLITS, Sharded, compare, drawn, split
from tests.worlds import on_ranks
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


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@on_ranks()
def test_values_and_derivatives(rank, pattern):
    return checked(pattern)


@on_ranks(3)
def test_it_stays_what_it_is(rank):
    """It stays the same module to optimizers, state dicts, isinstance and copies."""
    module = nn.LayerNorm(WIDTH)
    before, kind = dict(module.named_parameters()), type(module)
    assert sequence_parallel(module) is module
    assert type(module) is kind
    assert all(getattr(module, name) is p for name, p in before.items())
    copied = copy.deepcopy(nn.Sequential(module))[0].double()
    copied.load_state_dict(module.state_dict())
    copied(torch.ones(rank + 1, WIDTH, dtype=torch.float64)).sum().backward()
    assert shard_spec(module.weight) is None
    assert copied.bias.grad.tolist() == [6.0] * WIDTH
    assert module.bias.grad is None
    module.forward(torch.ones(rank + 1, WIDTH)).sum().backward()
    assert module.bias.grad.tolist() == [6.0] * WIDTH
