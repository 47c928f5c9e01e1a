"""Objects, modules and optimizers that hold more than parameters: put back, or refused aloud."""

import pytest
import torch
from torch import nn

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


def test_extra_state_in_tensors(tmp_path):
    saved = [Extra([1.0, 2.0, 3.0]), OnlyTensor([7, 8, 9])]
    saved[0].nested = {"n": torch.ones(2), 3: torch.zeros(1), "note": "x"}
    save({"modules": saved}, tmp_path)
    found = [Extra([5.0]), OnlyTensor()]
    load({"modules": found}, tmp_path)
    assert found[0].history == [1, 2, 3]
    assert found[0].nested["n"].tolist() == [1, 1]
    assert found[0].nested[3].tolist() == [0]
    assert found[0].nested["note"] == "x"
    assert found[1].history == [7, 8, 9]
    assert torch.equal(found[0].layer.weight, saved[0].layer.weight)


def test_copies_that_a_hook_has_made(tmp_path):
    save({"inner": nn.Sequential(Copies(5.0), nn.Linear(1, 1))}, tmp_path)
    found = nn.Sequential(Copies(), nn.Linear(1, 1))
    load({"inner": found}, tmp_path)
    assert found[0].weight.tolist() == [5, 5]
    with pytest.raises(ArgumentError, match=r"saved as \(2,\)"):
        load({"inner": nn.Sequential(Copies(size=3), nn.Linear(1, 1))}, tmp_path)


def flat(rank, folder):
    """FullyShardedDataParallel tells of copies of whole parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=True
    )
    save({"model": model}, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load({"model": model}, folder)
    found = model.state_dict()["weight"]
    return torch.equal(found, read(folder)["model"]["weight"]) and bool(found.any())


@pytest.mark.slow
def test_parameters_that_torch_keeps_flat(worlds, tmp_path):
    assert worlds.run(3, flat, tmp_path) == [True] * 3


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
    assert table == {4: torch.ones(1), "5": 6}
    found = read(tmp_path)
    assert list(found["trainer"]["optimizer"]["state"]) == [0, 1]
    assert found["table"] == {4: torch.ones(1), "5": 6}


def test_other_keys(tmp_path):
    with pytest.raises(ArgumentError, match="'x': None is a key"):
        save({"x": {None: torch.ones(1)}}, tmp_path)


class Counting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


class Taking(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(state)


def refused(make, folder, word):
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=f"'o': .*{word}"):
        save({"model": model, "o": make(model.parameters())}, folder / "refused")
    save({"model": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, folder / "there")
    with pytest.raises(ArgumentError, match=f"'o': .*{word}"):
        load({"model": model, "o": make(model.parameters())}, folder / "there")
    return True


def with_more(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.state["all"] = {"count": 5}
    return optimizer


def test_optimizers_that_keep_states_elsewhere(tmp_path):
    assert refused(lambda p: Counting(p, lr=0.1), tmp_path, "Counting has a state_dict")
    assert refused(lambda p: Taking(p, lr=0.1), tmp_path, "Taking has a load_state_dict")
    assert refused(with_more, tmp_path, "'all'")


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.eye(2)) - torch.tensor([[1.0], [-2.0]])).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("before", [0, 1])
def test_states_that_are_lists_of_tensors(tmp_path, before):
    """LBFGS has lists of directions, shorter or longer than those that were saved."""
    torch.manual_seed(0)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    fresh = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3)
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer))
    for _ in range(before):
        fresh.step(closure_of(other, fresh))
    save({"model": model, "optimizer": optimizer}, tmp_path)
    load({"model": other, "optimizer": fresh}, tmp_path)
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer))
        fresh.step(closure_of(other, fresh))
    assert torch.equal(model.weight, other.weight)


def test_another_kind_of_optimizer(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    plain = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    save({"m": model, "o": torch.optim.Adam(model.parameters())}, tmp_path)
    with pytest.raises(ArgumentError, match=r"'o': .*'amsgrad', 'betas',.*'dampening'"):
        load(plain, tmp_path)
    save(plain, tmp_path)
    with pytest.raises(ArgumentError, match=r"'o': .*\[2\] parameters.*'bias'"):
        load({"m": other, "o": torch.optim.SGD(other.parameters())}, tmp_path)
    save({"m": model, "o": model.bias}, tmp_path)
    with pytest.raises(ArgumentError, match=r"'o': .*not the state of an optimizer"):
        load(plain, tmp_path)


def test_a_scheduler_more_or_less(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.optim.lr_scheduler.OneCycleLR(scheduled, 1.0, 10)
    save({"model": model, "o": scheduled}, tmp_path)
    load({"model": model, "o": optimizer}, tmp_path)
    assert optimizer.param_groups[0]["lr"] == scheduled.param_groups[0]["lr"]
    save({"model": model, "o": torch.optim.SGD(model.parameters(), lr=0.125)}, tmp_path)
    load({"model": model, "o": scheduled}, tmp_path)
    assert scheduled.param_groups[0]["lr"] == 0.125


def stepped(rank):
    torch.manual_seed(0)
    model = ColumnParallelLinear(4, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def factors(rank, folder):
    model, optimizer = stepped(rank)
    before = model.weight.detach().clone()
    with pytest.raises(ArgumentError, match="'optimizer': the state 'row_var' of 'weight'"):
        save({"model": model, "optimizer": optimizer}, folder / "new")
    fresh = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ArgumentError, match="'optimizer': the state 'row_var' of 'weight'"):
        load({"model": model, "optimizer": fresh}, folder)
    return torch.equal(model.weight, before)


def test_states_that_cannot_be_shared_out(worlds, tmp_path):
    model = nn.Linear(4, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = torch.optim.Adafactor(model.parameters())
    load({"model": model, "optimizer": fresh}, tmp_path)
    row = fresh.state[model.weight]["row_var"]
    assert torch.equal(row, optimizer.state[model.weight]["row_var"])
    assert worlds.run(3, factors, tmp_path) == [True] * 3


def of_its_own(rank, folder):
    """A module of each rank's own and its optimizer."""
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2) + rank).sum().backward()
    optimizer.step()
    state = {"own": PerRank({"model": model, "optimizer": optimizer})}
    save(state, folder)
    kept = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["momentum_buffer"]
    with torch.no_grad():
        model.weight.zero_()
        moment.zero_()
    load(state, folder)
    return torch.equal(model.weight, kept) and moment.tolist() == [[1.0 + rank] * 2]


def test_a_module_and_its_optimizer_of_each_rank(worlds, tmp_path):
    assert worlds.run(3, of_its_own, tmp_path) == [True] * 3
