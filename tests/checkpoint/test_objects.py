"""Objects, modules and optimizers that hold more than parameters: put back, or refused aloud."""

import pytest
import torch
from torch import nn

from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.checkpoint import PerRank, load, read, save
from varcomm.tensor_parallel import ColumnParallelLinear


class Extra(nn.Module):
    """Extra state that is a tensor, of a length that changes, and in a dict."""

    def __init__(self, history=()):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.history = list(history)
        self.nested = {}

    def get_extra_state(self):
        return {"history": torch.tensor(self.history), "nested": self.nested}

    def set_extra_state(self, state):
        self.history, self.nested = state["history"].tolist(), state["nested"]


class OnlyTensor(Extra):
    def get_extra_state(self):
        return torch.tensor(self.history, dtype=torch.uint8)

    def set_extra_state(self, state):
        self.history = state.tolist()


class Copies(nn.Module):
    """A module whose hook puts copies into its state."""

    def __init__(self, value=0.0, size=2):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))
        self.register_state_dict_post_hook(self._copy)

    @staticmethod
    def _copy(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().clone()


def test_extra_state_in_tensors_and_copies_of_a_hook(tmp_path):
    saved = [Extra([1.0, 2.0, 3.0]), OnlyTensor([7, 8, 9]), nn.Sequential(Copies(5.0), Extra())]
    saved[0].nested = {"n": torch.ones(2), 3: torch.zeros(1), "note": "x"}
    save({"modules": saved}, tmp_path)
    found = [Extra([5.0]), OnlyTensor(), nn.Sequential(Copies(), Extra())]
    load({"modules": found}, tmp_path)
    assert found[0].history == [1, 2, 3]
    assert found[0].nested == {"n": found[0].nested["n"], 3: torch.zeros(1), "note": "x"}
    assert found[0].nested["n"].tolist() == [1, 1]
    assert found[1].history == [7, 8, 9]
    assert torch.equal(found[0].layer.weight, saved[0].layer.weight)
    assert found[2][0].weight.tolist() == [5, 5]
    found[2][0] = Copies(size=3)
    with pytest.raises(ArgumentError, match=r"saved as \(2,\)"):
        load({"modules": found}, tmp_path)


@on_ranks(3)
def test_factors(rank, tmp_path):
    """Adafactor's states of sharded parameters are refused, and loaded for whole ones."""
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 6), ColumnParallelLinear(4, 6)
    optimizers = [torch.optim.Adafactor(module.parameters()) for module in (plain, model)]
    plain(torch.ones(1, 4)).sum().backward()
    optimizers[0].step()
    weight = torch.nn.Parameter(model.weight.detach().clone())  # not known to be sharded: it steps
    of_parts = torch.optim.Adafactor([weight])
    weight.sum().backward()
    of_parts.step()
    optimizers[1].state[model.weight] = of_parts.state[weight]
    before = model.weight.detach().clone()
    save({"model": plain, "optimizer": optimizers[0]}, tmp_path)
    other = torch.optim.Adafactor(plain.parameters())
    load({"model": plain, "optimizer": other}, tmp_path)
    row_vars = [optimizer.state[plain.weight]["row_var"] for optimizer in (optimizers[0], other)]
    assert torch.equal(*row_vars)
    with pytest.raises(ArgumentError, match="'optimizer': the state 'row_var' of 'weight'"):
        save({"model": model, "optimizer": optimizers[1]}, tmp_path / "new")
    fresh = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ArgumentError, match="'optimizer': the state 'row_var' of 'weight'"):
        load({"model": model, "optimizer": fresh}, tmp_path)
    assert torch.equal(model.weight, before)


@on_ranks(3)
def test_of_its_own(rank, tmp_path):
    """A module of each rank's own and its optimizer."""
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2) + rank).sum().backward()
    optimizer.step()
    state = {"own": PerRank({"model": model, "optimizer": optimizer})}
    save(state, tmp_path)
    kept = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["momentum_buffer"]
    with torch.no_grad():
        model.weight.zero_()
        moment.zero_()
    load(state, tmp_path)
    assert torch.equal(model.weight, kept)
    assert moment.tolist() == [[1.0 + rank] * 2]


class Trainer:
    """Holds what torch's optimizers tell, with numbers as keys."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def train(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(3, 2)).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_keys_that_are_numbers(tmp_path):
    trainer, fresh = Trainer(), Trainer()
    for _ in range(3):
        trainer.train()
    save({"trainer": trainer, "table": {4: torch.ones(1), "5": 6}}, tmp_path)
    table = {4: torch.zeros(1), "5": 0}
    load({"trainer": fresh, "table": table}, tmp_path)
    assert [fresh.train() for _ in range(3)] == [trainer.train() for _ in range(3)]
    found = read(tmp_path)
    assert list(found["trainer"]["optimizer"]["state"]) == [0, 1]
    assert found["table"] == table == {4: torch.ones(1), "5": 6}
    with pytest.raises(ArgumentError, match="'x': None is a key"):
        save({"x": {None: torch.ones(1)}}, tmp_path)


class Counting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


class Taking(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(state)


def with_more(parameters):
    optimizer = torch.optim.SGD(parameters)
    optimizer.state["all"] = {"count": 5}
    return optimizer


def test_optimizers_that_are_refused(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    plain = {"m": model, "o": torch.optim.SGD(model.parameters())}
    for kind, word in (
        (Counting, "Counting has a state_dict"),
        (Taking, "Taking has a state_dict or load_state_dict"),
        (with_more, "SGD has .* states of other keys"),
    ):
        state = {"m": model, "o": kind(model.parameters())}
        save(plain, tmp_path)
        for call in (save, load):
            with pytest.raises(ArgumentError, match=f"'o': .*{word}"):
                call(state, tmp_path)
    small = {"m": other, "o": torch.optim.SGD(other.parameters())}
    for saved, state, word in (
        ({"m": model, "o": torch.optim.Adam(model.parameters())}, plain, "'betas', .*'dampening'"),
        (plain, small, r"\[2\] parameters.*\['bias'\]"),
        ({"m": model, "o": model.bias}, plain, "not the state of an optimizer"),
    ):
        save(saved, tmp_path)
        with pytest.raises(ArgumentError, match=f"'o': .*{word}"):
            load(state, tmp_path)


@pytest.mark.parametrize("before", [0, 1])
def test_states_that_are_lists_of_tensors(tmp_path, before):
    """LBFGS has lists of directions, shorter or longer than those that were saved."""
    torch.manual_seed(0)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in models]

    def train(number, steps):
        def closure():
            optimizers[number].zero_grad()
            y = models[number](torch.eye(2)) - torch.tensor([[1.0], [-2.0]])
            loss = y.square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizers[number].step(closure)

    train(0, 2)
    train(1, before)
    save({"model": models[0], "optimizer": optimizers[0]}, tmp_path)
    load({"model": models[1], "optimizer": optimizers[1]}, tmp_path)
    train(0, 2)
    train(1, 2)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_scheduler_more_or_less(tmp_path):
    model = nn.Linear(2, 1)
    optimizer, scheduled = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25))
    torch.optim.lr_scheduler.OneCycleLR(scheduled, 1.0, 10)
    save({"model": model, "o": scheduled}, tmp_path)
    load({"model": model, "o": optimizer}, tmp_path)
    assert optimizer.param_groups[0]["lr"] == scheduled.param_groups[0]["lr"]
    save({"model": model, "o": torch.optim.SGD(model.parameters(), lr=0.125)}, tmp_path)
    load({"model": model, "o": scheduled}, tmp_path)
    assert scheduled.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("change", [lambda a, b: [b, a], lambda a, b: [a + b]])
def test_the_same_parameters_in_other_groups(change, tmp_path):
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
    groups = [[*model[0].parameters()], [*model[1].parameters()]]
    save({"model": model, "o": torch.optim.SGD([{"params": one} for one in groups])}, tmp_path)
    other = torch.optim.SGD([{"params": one} for one in change(*groups)])
    told = r"same parameters in other groups .* with \['0.weight', '1.weight'\] and .* in the order"
    with pytest.raises(ArgumentError, match=told):
        load({"model": model, "o": other}, tmp_path)
