"""A model of which each kind of layer can be sharded, and how its full states are compared."""

import torch
from torch import nn

from varcomm import ShardSizes
from varcomm.sharding import ShardSpec, mark
from varcomm.tensor_parallel import parallelize

PLAN = {"embedding": "embedding", "head": "column", "up": "column", "down": "row"}


class Tied(nn.Module):
    """A tied vocabulary, a fused weight, buffers, and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.fused = nn.Parameter(torch.randn(9, 2), requires_grad=False)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


class Odd(Tied):
    """The same with odd dtypes, extra state, and a parameter of fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.down.bfloat16()
        self.fused = nn.Parameter(torch.randn(9, 2, dtype=torch.complex64).conj())
        self.few = nn.Parameter(torch.randn(1, 3))

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        assert state == {"steps": 3}


def made(cls=Tied, seed=2):
    torch.manual_seed(seed)
    return cls()


def sharded(model):
    """Shard a model in place, by a plan, and a parameter of two fused blocks."""
    model = parallelize(model, PLAN)
    ranks = model.up.group.size
    spec = ShardSpec.of([ShardSizes.balanced(n, ranks) for n in (4, 5)])
    fused = nn.Parameter(spec.shard(model.fused.detach()), model.fused.requires_grad)
    model.fused = mark(fused, spec)
    return model


def assert_states(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value
