"""What a state may hold: modules, optimizers, generators, objects, values, each rank's own."""

import pytest
import torch
from torch import nn

from tests.worlds import on_ranks
from varcomm.checkpoint import PerRank, load, read, save
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel import ColumnParallelLinear, RandomStreams, RowParallelLinear


class Twin(nn.Module):
    """Two layers that can be sharded, a buffer, a tied weight and state beyond tensors."""

    def __init__(self, column, row):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = column(6, 7), row(7, 2)
        self.norm = nn.BatchNorm1d(6)
        self.tied = self.norm
        self.calls = 0
        self.double()

    def forward(self, x):
        self.calls += 1
        return self.down(torch.tanh(self.up(self.norm(x))))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.02,
        amsgrad=True,
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "lr in a tensor": lambda model: torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.02), foreach=False, capturable=False
    ),
}


def made(kind, sharded=True):
    layers = (ColumnParallelLinear, RowParallelLinear) if sharded else (nn.Linear, nn.Linear)
    model = Twin(*layers)
    optimizer = OPTIMIZERS[kind](model)
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5)
    return {"model": model, "training": {"o": optimizer, "s": milestones}, "step": 0}


def train(state, first, last):
    losses = []
    for step in range(first, last):
        data = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, n, generator=data, dtype=torch.float64) for n in (6, 2))
        state["training"]["o"].zero_grad()
        loss = (state["model"](x) - y).square().mean()
        loss.backward()
        for part in state["training"].values():
            part.step()
        losses.append(loss.item())
    state["step"] = last
    return losses


def begun(rank, folder, kind):
    state = made(kind)
    train(state, 0, 5)
    save(state, folder)
    return train(state, 5, 10)


def resumed(rank, folder, kind):
    state = made(kind)
    with torch.no_grad():
        for p in state["model"].parameters():
            p.fill_(float("nan"))
    load(state, folder)
    assert state["step"] == state["model"].calls == 5
    assert all(own["step"] == 5 for own in state["training"]["o"].state.values() if "step" in own)
    return train(state, 5, 10)


def loaded_step(rank, folder, kind):
    state = made(kind)
    load(state, folder)
    return state["step"]


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(k, marks=pytest.mark.slow) for k in list(OPTIMIZERS)[1:])]
)
def test_training_goes_on_with_other_shards(worlds, tmp_path, kind):
    expected = worlds.run(3, begun, tmp_path, kind)[0]
    for losses in worlds.run(1, resumed, tmp_path, kind):
        assert losses == pytest.approx(expected, rel=1e-11)
    # and without shards in one process without torch.distributed
    state = made(kind, sharded=False)
    load(state, tmp_path)
    assert train(state, 5, 10) == pytest.approx(expected, rel=1e-11)
    save(state, tmp_path)
    assert read(tmp_path)["step"] == 10
    assert worlds.run(3, loaded_step, tmp_path, kind) == [10] * 3


def test_optimizers_of_several_modules_of_one_twice_and_of_steps_not_made(tmp_path):
    nets = [nn.Linear(2, 3), nn.Linear(3, 1)]
    optimizer = torch.optim.Adam([p for net in nets for p in net.parameters()])
    state = {"nets": nets, "optimizer": optimizer}
    nets[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(state, tmp_path)
    assert list(read(tmp_path)["optimizer"]["state"]) == ["nets.0.weight", "nets.0.bias"]
    nets[1](nets[0](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    load(state, tmp_path)
    assert optimizer.state[nets[0].weight]["step"] == 1
    assert nets[1].weight not in optimizer.state
    save({"net": nets[0], "best": [nets[0]], "o": torch.optim.SGD(nets[0].parameters())}, tmp_path)
    assert read(tmp_path)["o"]["param_groups"][0]["params"] == ["weight", "bias"]


VALUES = {
    "int": 5,
    "float": 0.1,
    "nan": float("nan"),
    "text": "x.y",
    "none": None,
    "bool": True,
    "list": [1, 2.5, "c", [None]],
    "tuple": (1, (2, 3)),
    "numbers as keys": {1: "one", 2: {3: 4}},
    "history": [{"loss": 1.0}, {"loss": 0.5, "lr": [1, 2]}],
    "nested": {"a": {"b": {"c": 1}}, "empty": {}, "empty list": []},
    "dtype": torch.float16,
    "set": {"a"},
    "bytes": b"\0x",
    "complex": 1 + 2j,
    "tagged": {"!tuple": [1]},
    "device": torch.device("cpu"),
}


@on_ranks(3)
def test_keep_values(rank, tmp_path):
    save({"values": VALUES}, tmp_path)
    state = {"values": dict.fromkeys(VALUES)}
    state["values"]["nested"] = inner = {"a": {"b": {"c": 0}}, "empty": {}, "empty list": [7]}
    state["values"]["history"] = []
    load(state, tmp_path)
    assert state["values"]["nested"] is inner
    assert repr(state["values"]) == repr(VALUES)
    assert repr(read(tmp_path)) == repr({"values": VALUES})


@on_ranks(3)
def test_marked(rank, tmp_path):
    """A marked parameter in a dict is one rank's part."""
    layer = ColumnParallelLinear(1, 3, bias=False)
    whole = torch.tensor([[1.0], [2.0], [3.0]])
    with torch.no_grad():
        layer.weight.copy_(shard_spec(layer.weight).shard(whole))
    save({"w": layer.weight, "own": PerRank(5)}, tmp_path)
    state = {"w": layer.weight, "own": PerRank(None)}
    with torch.no_grad():
        layer.weight.zero_()
    load(state, tmp_path)
    assert torch.equal(read(tmp_path)["w"], whole)
    assert (layer.weight.item(), state["own"].value) == (rank + 1.0, 5)


def drawn(streams, generator):
    with streams.fork("sharded"):
        return [*torch.rand(2).tolist(), *torch.rand(2, generator=generator).tolist()]


def state_of(streams, generator, note, numbers):
    value = PerRank({"note": note, "numbers": [numbers]})
    return {"streams": PerRank(streams), "drops": [PerRank(generator)], "value": value}


def keep_streams(rank, folder):
    streams, generator = RandomStreams(3), torch.Generator().manual_seed(10 + rank)
    if rank:
        with streams.fork("sharded"):
            torch.rand(rank)
    save(state_of(streams, generator, f"rank {rank}", torch.full((rank,), rank)), folder)
    return drawn(streams, generator)


def take_streams(rank, folder):
    streams, generator = RandomStreams(3), torch.Generator().manual_seed(99)
    untouched = drawn(RandomStreams(3), torch.Generator().manual_seed(99))
    state = state_of(streams, generator, "none", torch.full((min(rank, 2),), 7))
    load(state, folder)
    told = state["value"].value
    return drawn(streams, generator), untouched, told["note"], told["numbers"][0].tolist()


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_what_each_rank_has_of_its_own(worlds, tmp_path, ranks):
    expected = worlds.run(3, keep_streams, tmp_path)
    for rank, (found, untouched, *told) in enumerate(worlds.run(ranks, take_streams, tmp_path)):
        assert found == (expected[rank] if rank < 3 else untouched)
        assert told == ([f"rank {rank}", [rank] * rank] if rank < 3 else ["none", [7, 7]])
    assert list(read(tmp_path)["streams"]) == ["0", "1", "2"]
