"""What training scripts do beside ShardedGradients, and would go wrong without a word."""

import copy
import io
import re

import pytest
import torch
from torch import nn

from tests.data_parallel.cases import DOUBLE, rows, square
from tests.data_parallel.sharded_cases import plain, twins
from varcomm import ArgumentError
from varcomm.checkpoint import load, save
from varcomm.data_parallel import GlobalCount, mark_module_as_shared, replicate, sum_gradients
from varcomm.data_parallel.sharded import ShardedGradients
from varcomm.data_parallel.sharded.shard import Shard

BF16 = torch.bfloat16


def linear(dtype=DOUBLE):
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(dtype)


def adam(groups):
    return torch.optim.Adam(groups, lr=0.1)


def one_step(model, own):
    model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()
    own.step()
    own.zero_grad()


def clamped(rank):
    """By way of .data, of which torch keeps no account."""
    model = linear(BF16)
    own = ShardedGradients(model, lambda groups: torch.optim.SGD(groups, lr=0.5))
    one_step(model, own)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.125, 0.125)
    before = [p.tolist() for p in model.parameters()]
    model(torch.zeros(1, 3, dtype=BF16)).mul(0).sum().backward()
    own.step()
    return before == [p.tolist() for p in model.parameters()], model.weight.abs().max().item()


def test_masters_take_over_what_is_written_by_way_of_data(worlds):
    assert worlds.run(2, clamped) == [(True, 0.125)] * 2


class Arrived:
    """In the place of an event of a GPU."""

    synchronize = staticmethod(lambda: None)


def on_their_way(shard, total, used):
    shard._arriving.append((total, used, Arrived))


def dropped_by_the_inner_one(rank, set_to_none):
    """As on a GPU with cpu_offload, where sums arrive later."""
    own_add, Shard.add = Shard.add, on_their_way
    try:
        model = linear()
        own = ShardedGradients(model, plain, reduce="sum", cpu_offload=True)
        model(torch.full((1, 3), 100.0, dtype=DOUBLE)).sum().backward()
        own.optimizer.zero_grad(set_to_none)
        for _ in range(2):
            model(torch.ones(1, 3, dtype=DOUBLE)).sum().backward()
        values = own.optimizer.param_groups[0]["params"]
        return {x for value in values for x in value.grad.flatten().tolist()}
    finally:
        Shard.add = own_add


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_inner_optimizer_drops_what_a_backward_has_brought(worlds, set_to_none):
    assert worlds.run(2, dropped_by_the_inner_one, set_to_none) == [{4.0}] * 2


def of_other_pieces(rank, before, after):
    model, other = linear(), linear()
    own = ShardedGradients(model, adam, sizes=before)
    one_step(model, own)
    second = ShardedGradients(other, adam, sizes=after)
    with pytest.raises(ArgumentError) as caught:
        second.load_state_dict(own.state_dict())
    return str(caught.value), second.state_dict()["state"] == {}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("whole-parameters", "balanced", "Sharded(shape=(2, 3), "),
        ([8, 0], [0, 8], "the state holds a part of parameter 'bias', of which this rank has none"),
        ([2, 6], [5, 3], "exp_avg of parameter 'weight' is Sharded(shape=(2, 3), "),
    ],
)
def test_states_of_other_pieces_are_refused_on_all(worlds, before, after, said):
    for text, empty in worlds.run(2, of_other_pieces, before, after):
        assert text.startswith("ShardedGradients.load_state_dict: refused on rank ")
        assert said in text
        assert empty


def shifted(rank):
    """Rank 1 has two elements in both, but not the same."""
    model = nn.Linear(8, 1, bias=False).double()
    own = ShardedGradients(model, adam, sizes=[2, 2, 4])
    model(torch.ones(1, 8, dtype=DOUBLE)).sum().backward()
    own.step()
    state = own.state_dict()
    own.close()
    model.zero_grad()
    other = ShardedGradients(model, adam, sizes=[4, 2, 2])
    with pytest.raises(ArgumentError, match=r"on 2 more: \[1, 2\]"):
        other.load_state_dict(state)
    same = ShardedGradients(nn.Linear(8, 1, bias=False).double(), adam, sizes=[2, 2, 4])
    same.load_state_dict(copy.deepcopy(state))
    (value,) = same.state_dict()["state"].values()
    (first,) = state["state"].values()
    assert value["exp_avg"].local is not first["exp_avg"].local
    return torch.equal(value["exp_avg"].local, first["exp_avg"].local)


def test_states_of_pieces_elsewhere_are_refused_and_their_own_copies_taken(worlds):
    assert worlds.run(3, shifted) == [True] * 3


NO_STATES = {
    "None": (lambda state: None, "got NoneType."),
    "nothing": (lambda state: {}, "got dict with []."),
    "no groups": (lambda state: {"state": {}}, "got dict with ['state']."),
    "a number": (lambda state: {**state, "state": 3}, "got dict with ['state', 'param_groups']."),
}


def no_state(rank, what):
    model = linear()
    own = ShardedGradients(model, adam)
    one_step(model, own)
    with pytest.raises(ArgumentError) as caught:
        own.load_state_dict(NO_STATES[what][0](own.state_dict()) if rank else own.state_dict())
    return str(caught.value)


@pytest.mark.parametrize("what", NO_STATES)
def test_what_is_no_state_is_refused_on_all(worlds, what):
    for text in worlds.run(2, no_state, what):
        assert "refused on rank 1 of 2: state must be what state_dict() has returned: a " in text
        assert text.endswith(NO_STATES[what][1])


def masters_of_others(rank):
    """The masters of a state tell the pieces too, where an optimizer has no states."""
    model, other = linear(BF16), linear(BF16)
    own = ShardedGradients(model, plain, sizes=[3, 5])
    second = ShardedGradients(other, plain, sizes=[5, 3])
    with pytest.raises(ArgumentError) as caught:
        second.load_state_dict(own.state_dict())
    return str(caught.value)


def test_masters_of_other_pieces_are_refused_on_all(worlds):
    text, other = worlds.run(2, masters_of_others)
    assert text == other
    assert (
        "the master of parameter 'weight' is Sharded(shape=(2, 3), dtype=torch.float32, b" in text
    )


def foreign_masters(rank):
    own = ShardedGradients(linear(BF16), plain, sizes=[8, 0])
    state = own.state_dict()
    if rank:
        state["masters"] = {"weight": torch.ones(2, 3)}
    with pytest.raises(ArgumentError) as caught:
        own.load_state_dict(state)
    return str(caught.value)


def test_masters_that_nobody_has_here_are_refused_on_all(worlds):
    said = "refused on rank 1 of 2: the state holds a part of the master of parameter 'weight', of "
    assert all(said in text for text in worlds.run(2, foreign_masters))


def moved_between(rank, folder, before, after):
    """With masters and without, and into a plain optimizer."""
    model = linear(BF16)
    own = ShardedGradients(model, adam, fp32_masters=before)
    one_step(model, own)
    save({"model": model, "optimizer": own}, folder)
    other = nn.Linear(3, 2).to(BF16)
    if after is None:
        plain_one = adam(other.parameters())
        with pytest.raises(ArgumentError) as caught:
            load({"model": other, "optimizer": plain_one}, folder)
        return str(caught.value)
    own = ShardedGradients(other, adam, fp32_masters=after)
    one_step(other, own)
    load({"model": other, "optimizer": own}, folder)
    same = all(map(torch.equal, model.parameters(), other.parameters()))
    states = own.optimizer.state.items()
    dtypes = {state["exp_avg"].dtype == value.dtype for value, state in states}
    first = {state["step"].item() for _, state in states}
    one_step(other, own)
    return same, dtypes, first, {state["step"].item() for _, state in states}


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_checkpoints_with_masters_and_without(worlds, tmp_path, before, after):
    results = worlds.run(2, moved_between, str(tmp_path / "c"), before, after)
    assert results == [(True, {True}, {1.0}, {2.0})] * 2


def test_a_plain_optimizer_takes_no_masters(worlds, tmp_path):
    for text in worlds.run(2, moved_between, str(tmp_path / "c"), True, None):
        assert "'optimizer': what was saved has masters, wider than the parameters, to whi" in text


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(3, 2)
        self.double()

    def forward(self, x):
        return self.last(x) + self.empty.sum()


def empty_ones(rank, folder):
    """To a plain optimizer and back, with a clipped norm of all."""
    model = WithEmpty()
    own = ShardedGradients(model, adam)
    for _ in range(2):
        own.zero_grad()
        square(model(torch.ones(1, 3, dtype=DOUBLE))).backward()
        own.clip_grad_norm_(1.0, float("inf"))
        own.step()
    save({"model": model, "optimizer": own}, folder)
    other = WithEmpty()
    one = adam(other.parameters())
    load({"model": other, "optimizer": one}, folder)
    steps = [state["step"].item() for state in one.state.values()]
    save({"model": other, "optimizer": one}, folder)
    last = WithEmpty()
    own = ShardedGradients(last, adam)
    load({"model": last, "optimizer": own}, folder)
    return steps, "empty" in own.state_dict()["state"]


def test_parameters_without_elements_have_states(worlds, tmp_path):
    first, second = worlds.run(2, empty_ones, str(tmp_path / "c"))
    assert first == ([2.0] * 3, True)
    assert second == ([2.0] * 3, False)


def summed_twice(rank):
    model = linear()
    own = ShardedGradients(model, plain)
    said = r"belongs to a ShardedGradients, which sums its gradients in backward\. Take one of the "
    for call in (sum_gradients, replicate, mark_module_as_shared):
        with pytest.raises(ArgumentError, match=said):
            call(model)
    own.close()
    sum_gradients(model)
    return model.weight.grad.abs().sum().item()


def test_whoever_else_sums_gradients_is_refused(worlds):
    assert worlds.run(2, summed_twice) == [0.0] * 2


def left(rank, how):
    """Zeros are no gradient; a rank without one refuses a step where others have some."""
    model = linear()
    own = ShardedGradients(model, plain, reduce="sum")
    with own.no_sync():
        loss = model(torch.ones(1, 3, dtype=DOUBLE)) if not rank else model(rows(0, 2)[:0, :3])
        (
            loss.sum() if how != "nothing" or not rank else loss.detach().sum() + loss[:0].sum()
        ).backward()
    if how == "zeros":
        model.zero_grad(set_to_none=False)
        own.step()
        return "stepped"
    with pytest.raises(ArgumentError, match="has a gradient of no_sync that has not been summed"):
        own.step()
    model(torch.ones(1, 3, dtype=DOUBLE)).sum().backward()
    own.step()
    return [p.grad for p in model.parameters()]


def test_zeros_are_no_gradient(worlds):
    assert worlds.run(2, left, "zeros") == ["stepped"] * 2


@pytest.mark.parametrize("how", ["no rows", "nothing"])
def test_a_step_without_a_sum_is_refused_on_ranks_without_rows(worlds, how):
    assert worlds.run(2, left, how) == [[None, None]] * 2


def grown(rank):
    model = linear()
    own = ShardedGradients(model, plain)
    model(torch.ones(1, 3, dtype=DOUBLE)).sum().backward()
    own.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    calls = {
        "step": own.step,
        "state_dict": own.state_dict,
        "state_dict_for": lambda: own.state_dict_for({}),
        "clip_grad_norm_": lambda: own.clip_grad_norm_(1.0),
    }
    for name, call in calls.items():
        said = f"^ShardedGradients.{name} on rank {rank} of 2: the optimizer has other groups or "
        with pytest.raises(ArgumentError, match=said):
            call()
    return len(calls)


def test_groups_that_are_added_to_the_inner_optimizer(worlds):
    assert worlds.run(2, grown) == [4] * 2


def counted(rank):
    """What was counted for gradients that are dropped is dropped with them."""
    count = GlobalCount()
    model, twin = twins(lambda: nn.Linear(1, 1, bias=False).double())
    own = ShardedGradients(model, plain, reduce=count, sizes="whole-parameters")
    x = torch.ones(1, 1, dtype=DOUBLE)
    with own.no_sync():
        count.add(3)
        model(x.expand(3, 1)).sum().backward()
    own.zero_grad()
    count.add(1)
    model(x).sum().backward()
    assert torch.equal(model.weight, twin.weight)
    return [piece.value.grad.item() for piece in own.pieces.values()]


def test_counts_of_dropped_gradients_are_dropped(worlds):
    assert worlds.run(2, counted) == [[1.0], []]


def shared_count(rank):
    count = GlobalCount()
    first, second = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    own = ShardedGradients(first, plain, reduce=count)
    other = ShardedGradients(second, plain, reduce=count)
    x = torch.ones(2, 1, dtype=DOUBLE)
    count.add(2)
    said = "another module with the same GlobalCount has gradients that this backward does not sum"
    with own.no_sync(), pytest.raises(ArgumentError, match=said):
        (first(x) + second(x)).sum().backward()
    return len(own.pieces) + len(other.pieces) if rank > 1 else "refused"


def test_two_with_one_count_of_which_one_is_in_no_sync(worlds):
    assert worlds.run(2, shared_count) == ["refused"] * 2


def pickled(rank):
    model = linear()
    own = ShardedGradients(model, adam)
    one_step(model, own)
    with pytest.raises(ArgumentError) as caught:
        torch.save(own.state_dict(), io.BytesIO())
    return str(caught.value)


def test_states_are_not_pickled(worlds):
    said = re.escape("a Sharded tensor cannot be pickled, as by torch.save: this rank has only a p")
    assert all(re.match(said, text) for text in worlds.run(2, pickled))
