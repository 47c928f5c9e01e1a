"""What a state may hold: modules, optimizers, generators, objects, values, each rank's own."""

import copy

import pytest
import torch
from torch import nn

from varcomm.checkpoint import PerRank, load, read, save
from varcomm.sharding import Sharded, ShardSpec, shard_spec
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel import ColumnParallelLinear, RandomStreams, RowParallelLinear


class Twin(nn.Module):
    """Two layers that can be sharded, a buffer, a tied weight and state beyond tensors."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down
        self.norm = nn.BatchNorm1d(6)
        self.tied = self.norm
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.down(torch.tanh(self.up(self.norm(x))))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def sharded_model():
    torch.manual_seed(0)
    return Twin(ColumnParallelLinear(6, 7), RowParallelLinear(7, 2)).double()


def whole_model():
    torch.manual_seed(0)
    return Twin(nn.Linear(6, 7), nn.Linear(7, 2)).double()


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


def trained(model, optimizer, scheduler, first, last):
    losses = []
    for step in range(first, last):
        data = torch.Generator().manual_seed(step)
        x, y = (
            torch.randn(8, 6, generator=data).double(),
            torch.randn(8, 2, generator=data).double(),
        )
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def made(model, kind):
    optimizer = OPTIMIZERS[kind](model)
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5)
    return {
        "model": model,
        "training": {"optimizer": optimizer, "scheduler": milestones},
        "step": 0,
    }


def train(state, first, last):
    state["step"] = last
    return trained(state["model"], *state["training"].values(), first, last)


def begun(rank, folder, kind):
    state = made(sharded_model(), kind)
    train(state, 0, 5)
    save(state, folder)
    return train(state, 5, 10)


def resumed(rank, folder, kind):
    state = made(sharded_model(), kind)
    with torch.no_grad():
        for p in state["model"].parameters():
            p.fill_(float("nan"))
    load(state, folder)
    assert state["step"] == 5
    assert state["model"].calls == 5
    return train(state, 5, 10)


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(k, marks=pytest.mark.slow) for k in list(OPTIMIZERS)[1:])]
)
def test_training_goes_on_with_other_shards(worlds, tmp_path, kind):
    expected = worlds.run(3, begun, tmp_path, kind)[0]
    for losses in worlds.run(1, resumed, tmp_path, kind):
        assert losses == pytest.approx(expected, rel=1e-11)
    # and without shards in one process without torch.distributed
    state = made(whole_model(), kind)
    load(state, tmp_path)
    assert train(state, 5, 10) == pytest.approx(expected, rel=1e-11)
    save(state, tmp_path)
    assert read(tmp_path)["step"] == 10
    assert worlds.run(3, loaded_step, tmp_path, kind) == [10] * 3


def loaded_step(rank, folder, kind):
    state = made(sharded_model(), kind)
    load(state, folder)
    return state["step"]


def test_a_fresh_optimizer_makes_no_step(tmp_path):
    state = made(whole_model(), "adamw")
    train(state, 0, 3)
    save(state, tmp_path)
    before = copy.deepcopy(state["model"].state_dict())
    fresh = made(whole_model(), "adamw")
    load(fresh, tmp_path)
    for name, value in fresh["model"].state_dict().items():
        assert torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value
    optimizer, other = fresh["training"]["optimizer"], state["training"]["optimizer"]
    for p, q in zip(fresh["model"].parameters(), state["model"].parameters(), strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        assert optimizer.state[p]["step"] == 3
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])


def test_states_of_parameters_that_had_none_are_gone(tmp_path):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.Adam(layers.parameters())
    layers[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"layers": layers, "optimizer": optimizer}, tmp_path)
    layers[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    load({"layers": layers, "optimizer": optimizer}, tmp_path)
    assert layers[0].weight in optimizer.state
    assert layers[1].weight not in optimizer.state


def test_one_optimizer_of_two_modules(tmp_path):
    encoder, head = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
    head(encoder(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    save({"nets": [encoder, head], "optimizer": optimizer}, tmp_path)
    found = read(tmp_path)["optimizer"]
    assert list(found["state"]) == ["nets.0.weight", "nets.0.bias", "nets.1.weight", "nets.1.bias"]
    step = optimizer.state[head.weight]["step"]
    step.zero_()
    load({"nets": [encoder, head], "optimizer": optimizer}, tmp_path)
    assert step == 1


def test_a_module_that_stands_in_two_places(tmp_path):
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    optimizer.step()
    save({"model": model, "best": [model], "optimizer": optimizer}, tmp_path)
    assert list(read(tmp_path)["optimizer"]["state"]) == ["weight", "bias"]


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
    "shape": torch.Size([2, 3]),
}


def keep_values(rank, folder):
    save({"values": VALUES}, folder)
    state = {"values": dict.fromkeys(VALUES)}
    state["values"]["nested"] = inner = {"a": {"b": {"c": 0}}, "empty": {}, "empty list": [7]}
    state["values"]["history"] = []
    load(state, folder)
    assert state["values"]["nested"] is inner
    return repr(state["values"]) == repr(VALUES) or state["values"]


def test_plain_values(worlds, tmp_path):
    assert worlds.run(3, keep_values, tmp_path) == [True] * 3
    assert repr(read(tmp_path)) == repr({"values": VALUES})


def own_streams(rank):
    streams = RandomStreams(3)
    if rank:
        with streams.fork("sharded"):
            torch.rand(rank)
    return streams


def drawn(streams, generator):
    with streams.fork("sharded"):
        return [*torch.rand(2).tolist(), *torch.rand(2, generator=generator).tolist()]


def keep_streams(rank, folder):
    streams, generator = own_streams(rank), torch.Generator().manual_seed(10 + rank)
    value = PerRank({"note": f"rank {rank}", "numbers": [torch.full((rank,), rank)]})
    save({"streams": PerRank(streams), "drops": [PerRank(generator)], "value": value}, folder)
    return drawn(streams, generator)


def take_streams(rank, folder):
    streams, generator = RandomStreams(3), torch.Generator().manual_seed(99)
    untouched = drawn(RandomStreams(3), torch.Generator().manual_seed(99))
    saved = min(rank, 2)
    value = PerRank({"note": "none", "numbers": [torch.full((saved,), 7)]})
    load({"streams": PerRank(streams), "drops": [PerRank(generator)], "value": value}, folder)
    told = value.value["note"], value.value["numbers"][0].tolist()
    return drawn(streams, generator), untouched, told


def test_what_each_rank_has_of_its_own(worlds, tmp_path):
    expected = worlds.run(3, keep_streams, tmp_path)
    for ranks in (1, 3):
        for rank, (found, untouched, told) in enumerate(worlds.run(ranks, take_streams, tmp_path)):
            assert found == (expected[rank] if rank < 3 else untouched)
            assert told == ((f"rank {rank}", [rank] * rank) if rank < 3 else ("none", [7, 7]))
    assert list(read(tmp_path)["streams"]) == ["0", "1", "2"]


class Pieces:
    """Flat pieces of parameters, whose states are made in the first step."""

    def __init__(self, rank, ranks, stepped):
        sizes = [2, 1, 2, 1, 0] if ranks == 5 else ShardSizes.balanced(6, ranks)
        self.spec = ShardSizes(sizes).range(rank)
        self.averages = torch.full((len(self.spec),), 1.0 * rank) if stepped else None
        self.steps = 0

    def wrapped(self):
        return Sharded.elements(self.averages, (2, 3), self.spec.start)

    def state_dict(self):
        return {"state": {"w": {"avg": self.wrapped()}} if len(self.spec) else {}, "steps": 4}

    def state_dict_for(self, saved):
        if not len(self.spec):
            self.averages = torch.zeros(0)
            return {"state": {}, "steps": 0}
        meta = saved["state"]["w"]["avg"]
        assert meta.is_meta
        assert meta.shape == (2, 3)
        self.averages = torch.zeros(len(self.spec), dtype=meta.dtype)
        return {"state": {"w": {"avg": self.wrapped()}}, "steps": 0}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def save_pieces(rank, ranks, folder):
    pieces = Pieces(rank, ranks, True)  # of 5 ranks one has nothing: its states are an empty dict
    save({"pieces": pieces}, folder)
    return pieces.averages.tolist()


def load_pieces(rank, ranks, folder):
    pieces = Pieces(rank, ranks, False)
    load({"pieces": pieces}, folder)
    return pieces.averages.tolist(), pieces.steps


@pytest.mark.parametrize(
    ("before", "after"), [(3, 1), pytest.param(5, 2, marks=pytest.mark.slow), (1, 3)]
)
def test_objects_that_say_what_they_want_to_be_loaded_into(worlds, tmp_path, before, after):
    saved = worlds.run(before, save_pieces, before, tmp_path)
    found = worlds.run(after, load_pieces, after, tmp_path)
    assert [number for one, _ in found for number in one] == [n for one in saved for n in one]
    assert [steps for _, steps in found] == [4] * after


def part_of_world(rank, folder):
    """Ranks 1 and 2 of 3 save and load; the other does something else."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return True
    spec = ShardSpec.of([1, 3], group=group)
    own = torch.full((spec.local,), float(rank))
    save({"x": Sharded.of(own, spec)}, folder, group=group)
    own.zero_()
    load({"x": Sharded.of(own, spec)}, folder, group=group)
    return bool((own == rank).all())


def test_a_group_that_is_not_the_world(worlds, tmp_path):
    assert worlds.run(3, part_of_world, tmp_path) == [True] * 3


def marked(rank, folder):
    """A marked parameter in a dict is one rank's part."""
    layer = ColumnParallelLinear(1, 3, bias=False)
    whole = torch.tensor([[1.0], [2.0], [3.0]])
    with torch.no_grad():
        layer.weight.copy_(shard_spec(layer.weight).shard(whole))
    save({"w": layer.weight, "own": PerRank(5)}, folder)
    state = {"w": layer.weight, "own": PerRank(None)}
    with torch.no_grad():
        layer.weight.zero_()
    load(state, folder)
    return torch.equal(read(folder)["w"], whole), layer.weight.item(), state["own"].value


def test_a_marked_tensor_in_a_dict(worlds, tmp_path):
    assert worlds.run(3, marked, tmp_path) == [(True, n, 5) for n in (1.0, 2.0, 3.0)]
