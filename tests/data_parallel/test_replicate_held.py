"""What is held until the next sum: gradients that are dropped or changed, and their counts."""

import copy
import io
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import (
    GlobalCount,
    ShardedGradients,
    mark_module_as_shared,
    no_sync,
    replicate,
    sum_hook,
    unmark_module_as_shared,
)

ONE = torch.ones(1, 1)


class Weight(nn.Module):
    """Without rows, its output depends on no parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.weight * x if len(x) else x.new_zeros(0)


def made(by, count):
    """Return a module, its no_sync, what drops gradients, and what reads the one of the weight."""
    model = Weight()
    if by == "replicate":
        replicate(model, reduce=count)
        return model, lambda: no_sync(model), model.zero_grad, lambda: model.weight.grad
    own = ShardedGradients(
        model, lambda groups: torch.optim.SGD(groups), sizes="whole-parameters", reduce=count
    )

    def grad():
        piece = own.pieces.get("weight")
        return None if piece is None else piece.value.grad

    return model, own.no_sync, own.zero_grad, grad


def counted(rank, by, steps, set_to_none):
    """Steps are backwards that hold or sum, with so many rows on each rank, or zero_grad.

    The slope of each row is 1, so every mean is.
    """
    count = GlobalCount()
    model, paused, zero_grad, grad = made(by, count)
    found = []
    for step in steps:
        if step == "z":
            zero_grad(set_to_none=set_to_none)
            continue
        what, rows = step[0], int(step[1 + rank])
        count.add(rows)
        with paused() if what == "n" else nullcontext():
            model(torch.ones(rows)).sum().backward()
        if what == "s":
            found.append(None if grad() is None else grad().item())
    return found, model.unused.grad is None


STEPS = {
    "dropped": (["n40", "z", "s10"], [1.0]),
    "dropped on a rank without gradients": (["n04", "z", "n11", "s20"], [1.0]),
    "dropped after a sum": (["s11", "n40", "z", "s12"], [1.0, 1.0]),
    "kept": (["n40", "n01", "s11"], [1.0]),
    "kept after a sum": (["s11", "n40", "s10", "z", "s33"], [1.0, 2.0, 1.0]),
    "dropped twice": (["n40", "z", "n02", "z", "s10"], [1.0]),
    "nobody uses it at last": (["n10", "s01"], [1.0]),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("by", ["replicate", "sharded"])
def test_counts_go_with_their_gradients(worlds, by, what, set_to_none):
    steps, expected = STEPS[what]
    results = worlds.run(2, counted, by, steps, set_to_none)
    assert [unused for _, unused in results] == [True, True]
    found = [grads for grads, _ in results]
    # one of them owns the piece
    assert sorted(found, key=str) == [
        expected,
        [None] * len(expected) if by != "replicate" else expected,
    ]


def forgotten(rank):
    """A backward that nobody can divide is gone; what was held before is not."""
    count = GlobalCount()
    model = replicate(nn.Linear(1, 1, bias=False), reduce=count)
    with no_sync(model):
        if rank == 0:
            count.add(8)
        model(4 * ONE).sum().backward()
    if rank == 0:
        count.add(100)
    with pytest.raises(ArgumentError, match=r"on 1 of 2 ranks GlobalCount\.add was not called"):
        model(100 * ONE).sum().backward()
    count.add(1)
    model(ONE).sum().backward()
    return model.weight.grad.item()


def test_a_refused_count_leaves_what_is_held(worlds):
    assert worlds.run(2, forgotten) == [1.0, 1.0]


def anew(rank, where):
    """Of a backward that fails, in the module or before, nothing is counted after that."""
    count = GlobalCount()
    model = replicate(nn.Linear(1, 1, bias=False), reduce=count)
    count.add(3)
    out = model(ONE)

    def fail(gradient):
        raise ValueError("out of memory, say")

    handle = (out if where == "before" else model.weight).register_hook(fail)
    with pytest.raises(ValueError, match="out of memory, say"):
        out.sum().backward()
    handle.remove()
    replicate(model, reduce=count)
    count.add(1)
    model(ONE).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("where", ["before", "within"])
def test_starting_anew_forgets_what_was_counted(worlds, where):
    assert worlds.run(2, anew, where) == [1.0, 1.0]


def data(weight):
    weight.grad.data.mul_(0.5)


def moved(weight):
    weight.grad.data = torch.full((1, 1), 7.0)


def scaler(weight):
    amp = torch.amp.GradScaler("cpu", init_scale=2.0)
    amp.scale(ONE)
    amp.unscale_(torch.optim.SGD([weight], lr=0.1))


def zeroed(weight):
    weight.grad.data.zero_()


def none(weight):
    weight.grad = None


def same(weight):
    weight.grad = weight.grad.clone()


CHANGES = {data: None, moved: None, scaler: None, zeroed: 2.0, none: 2.0, same: 24.0}


def changed(rank, how):
    """Not all of it is told to torch."""
    model = replicate(nn.Linear(1, 1, bias=False))
    model(ONE).sum().backward()
    with no_sync(model):
        model(10 * ONE).sum().backward()
    how(model.weight)
    if CHANGES[how] is None:
        with pytest.raises(ArgumentError, match="changed or replaced since a backward in no_sync"):
            model(ONE).sum().backward()
        return None
    model(ONE).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("how", CHANGES)
def test_changes_that_torch_does_not_count(worlds, how):
    assert worlds.run(2, changed, how) == [CHANGES[how]] * 2


def not_a_number(rank):
    """Such a sum has not changed either."""
    model = replicate(nn.Linear(1, 1, bias=False))
    model(torch.nan * ONE).sum().backward()
    with no_sync(model):
        model(ONE).sum().backward()
    model(ONE).sum().backward()
    return model.weight.grad.isnan().item()


def test_sums_that_are_no_numbers(worlds):
    assert worlds.run(2, not_a_number) == [True, True]


def unmarked(rank):
    model = mark_module_as_shared(nn.Linear(1, 1, bias=False))
    with no_sync(model):
        model(ONE).sum().backward()
    said = (
        "unmark_module_as_shared: gradients of a backward in no_sync have not been summed. Call "
        "backward() outside of no_sync, or zero_grad(), before."
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
        unmark_module_as_shared(model)
    model(ONE).sum().backward()
    unmark_module_as_shared(model)
    return model.weight.grad.item()


def test_unsummed_gradients_of_what_is_unmarked(worlds):
    assert worlds.run(2, unmarked) == [4.0, 4.0]


def copied(rank):
    """A count in a module is copied and saved with it, as a new one."""
    count = GlobalCount()
    model = nn.Linear(1, 1, bias=False)
    model.count = count
    replicate(model, reduce=count)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = []
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        replicate(other, reduce=other.count)
        other.count.add(2)
        other(ONE).sum().backward()
        found.append(other.weight.grad.item())
    with pytest.raises(ArgumentError, match=r"on 2 of 2 ranks GlobalCount\.add was not called"):
        model(ONE).sum().backward()
    return found


def test_copies_of_a_count(worlds):
    assert worlds.run(2, copied) == [[0.5, 0.5]] * 2


def reentrant(rank):
    """Each such checkpoint has a backward of its own."""
    count = GlobalCount()
    model = replicate(nn.Linear(1, 1), reduce=count)
    count.add(1)
    x = torch.ones(1, 1, requires_grad=True)
    out = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    said = r"A reentrant checkpoint around the module has a backward of its own: use checkpoint\("
    with pytest.raises(ArgumentError, match=said):
        out.sum().backward()
    return True


def test_counts_and_reentrant_checkpoints(worlds):
    assert worlds.run(2, reentrant) == [True, True]


def hooked(rank, make, said):
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(make(), sum_hook)
    with pytest.raises(ArgumentError, match=said):
        model(ONE).sum().backward()
    return True


STATES = {
    "list": (lambda: [None, "mean"], r"sum_hook: state must be .*; got \[None, 'mean'\]. group mu"),
    "three": (lambda: (None, "mean", 1), r"sum_hook: .* a pair \(group, reduce\); got \(None, 'm"),
    "word": (
        lambda: ("mean", None),
        r"sum_hook: state must be .*; got \('mean', None\). group mus",
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_states_of_the_hook_that_are_none(worlds, what):
    assert worlds.run(2, hooked, *STATES[what]) == [True, True]


def one_for_two(rank):
    count = GlobalCount()
    models = [DistributedDataParallel(nn.Linear(1, 1)) for _ in range(2)]
    for model in models:
        model.register_comm_hook((None, count), sum_hook)
    count.add(1)
    said = "two DistributedDataParallel in one backward have the same GlobalCount, of which the fi"
    with pytest.raises((ArgumentError, DisagreementError), match=said):
        sum(model(ONE).sum() for model in models).backward()
    return True


def test_one_count_of_two_hooks(worlds):
    assert worlds.run(2, one_for_two) == [True, True]
