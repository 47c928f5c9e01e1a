"""Backwards that are not summed at once: the next one sums exactly what is not summed yet."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, Branches, rows, square
from tests.data_parallel.comparing import assert_same_gradients, replicated
from tests.data_parallel.test_replicate_misuse import Fragile
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import no_sync, replicate, sum_gradients

# s: a backward that sums; n: one that does not; z, Z: zero_grad, with set_to_none or without
SEQUENCES = (
    "ns",
    "nns",
    "sns",
    "nss",
    "snnsns",
    "nzs",
    "nZs",
    "snzs",
    "snZs",
    "sznsZns",
    "snZnzns",
)


def run(model, twin, losses, sequence, rank, ranks):
    """Compare with one process after each backward that sums."""
    compared = 0
    for step, what in enumerate(sequence):
        if what in "zZ":
            for module in (model, twin):
                module.zero_grad(set_to_none=what == "z")
            continue
        with no_sync(model) if what == "n" else nullcontext(), varcomm.trace() as calls:
            losses(model, rank, step).backward()
        assert calls == [] or what == "s"
        sum(losses(twin, r, step) for r in range(ranks)).backward()
        if what == "s":
            assert_same_gradients(model, twin)
            compared += 1
    return compared


def in_sequence(rank, ranks, name, sequences, bucket_bytes):
    make, loss = CASES[name]
    compared = 0
    for sequence in sequences:
        model, twin = replicated(make, bucket_bytes=bucket_bytes)

        def losses(module, r, step):
            return (step + 1) * loss(module, (r + step) % ranks, ranks)

        compared += run(model, twin, losses, sequence, rank, ranks)
    return compared


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["layers", "branches"])
def test_what_is_not_summed_yet_is_summed_once(worlds, ranks, name):
    """Parameters are used on some ranks, or in some of the backwards alone."""
    compared = sum(sequence.count("s") for sequence in SEQUENCES)
    for bucket_bytes in (1, 150):
        done = worlds.run(ranks, in_sequence, ranks, name, SEQUENCES, bucket_bytes)
        assert done == [compared] * ranks


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_modules(worlds, name):
    assert worlds.run(3, in_sequence, 3, name, ("nsns",), 150) == [2] * 3


def used_once(rank):
    """Rank 1 uses a branch in a backward that is not summed, and nobody does after that."""
    model, twin = replicated(Branches)
    x = rows(2, 3)
    with no_sync(model):
        square(model(x, 1 if rank == 1 else 2)).backward()
    square(model(x, 2)).backward()
    square(twin(x, 1)).backward()
    assert_same_gradients(model, twin)
    return [p.grad is not None for p in model.branches[1].parameters()]


def test_a_parameter_used_in_an_unsummed_backward_alone(worlds):
    assert worlds.run(3, used_once) == [[True, True]] * 3


def sparse(rank, tied):
    model, twin = replicated(lambda: nn.EmbeddingBag(5, 2, mode="sum", sparse=True))
    parts = [torch.tensor([[1, 1, 3]]), torch.tensor([[0, 3]]), torch.tensor([[4]])]
    for step in range(4):
        with no_sync(model) if step < 3 else nullcontext():
            model(parts[(rank + step) % 3]).sum().backward()
        sum(twin(parts[(r + step) % 3]).sum() for r in range(3)).backward()
        if step == tied:  # used both by rows and as a whole
            with no_sync(model):
                model.weight.square().sum().backward()
            sum(twin.weight.square().sum() for r in range(3)).backward()
    for _ in range(2):
        torch.testing.assert_close(model.weight.grad, twin.weight.grad.to_dense())
        with no_sync(model):
            model(parts[rank]).sum().backward()
        model(parts[rank]).sum().backward()
        (2 * sum(twin(part).sum() for part in parts)).backward()
    return model.weight.grad.layout == torch.strided


@pytest.mark.parametrize("tied", [0, 2, None])
def test_sparse_gradients(worlds, tied):
    assert worlds.run(3, sparse, tied) == [True] * 3


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=DOUBLE))

    def forward(self, x):
        return self.weight * x


def incoming(rank):
    """What arrives is not kept but copied: whoever made it may write into it later."""
    model = replicate(Weight())
    model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    gradient = torch.ones(2, dtype=DOUBLE)
    with no_sync(model):
        (model.weight * 1.0).backward(gradient)
        (model.weight * 1.0).backward(gradient)
        gradient.fill_(100.0)
    model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    return model.weight.grad.tolist(), gradient.tolist()


def test_incoming_gradients_are_neither_kept_nor_written_to(worlds):
    assert worlds.run(2, incoming) == [([8.0, 8.0], [100.0, 100.0])] * 2


def where_it_is(rank):
    """Without a grad, this rank's part is in it; a sum stays as it was."""
    model = replicate(Weight())
    x = torch.full((2,), rank + 1.0, dtype=DOUBLE)
    seen = []
    with no_sync(model):
        for _ in range(2):
            model(x).sum().backward()
            seen.append(model.weight.grad[0].item())
    before = model.weight.grad
    model(x).sum().backward()
    assert model.weight.grad is before
    seen.append(model.weight.grad[0].item())
    with no_sync(model):
        model(x).sum().backward()
    seen.append(model.weight.grad[0].item())
    return seen


def test_what_grad_is_meanwhile(worlds):
    assert worlds.run(2, where_it_is) == [[r + 1.0, 2 * (r + 1.0), 9.0, 9.0] for r in range(2)]


def scaled(weight):
    weight.grad.mul_(0.5)


def replaced(weight):
    weight.grad = weight.grad / 2


CHANGES = {"sn": scaled, "snn": replaced, "n": replaced}


def changed(rank, before, again):
    """Whatever was summed and what was not cannot be told any more."""
    model = replicate(Weight())
    x = torch.ones(2, dtype=DOUBLE)
    for what in before:
        with no_sync(model) if what == "n" else nullcontext():
            model(x).sum().backward()
    CHANGES[before](model.weight)
    said = (
        f"replicate on rank {rank} of 2: the gradient of parameter 'weight' has been changed or "
        "replaced since a backward in no_sync, and what of it has been summed is not known. "
        "Between such a backward and the next one that sums, call nothing but zero_grad()."
    )
    paused = no_sync(model) if again == "n" else nullcontext()
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}"), paused:
        model(x).sum().backward()
    model.zero_grad()
    replicate(model)
    model(x).sum().backward()
    return model.weight.grad.tolist()


@pytest.mark.parametrize("again", ["s", "n"])
@pytest.mark.parametrize("before", CHANGES)
def test_gradients_that_are_changed_meanwhile(worlds, before, again):
    assert worlds.run(2, changed, before, again) == [[2.0, 2.0]] * 2


def scaled_own(rank):
    """What is all this rank's own may be scaled before it is summed."""
    model = replicate(Weight())
    with no_sync(model):
        model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    model.weight.grad.mul_(10)
    model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    return model.weight.grad.tolist()


def test_a_part_of_this_rank_alone_may_be_scaled(worlds):
    assert worlds.run(2, scaled_own) == [[22.0, 22.0]] * 2


def not_summed(rank):
    model = replicate(Weight())
    with no_sync(model):
        model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    said = (
        f"sum_gradients on rank {rank} of 2: replicate has yet to sum what backwards in no_sync "
        "have brought to the module of parameter 0, of shape (2,): the next backward() outside of "
        "no_sync does. Leave this call out."
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}"):
        sum_gradients(model)
    said = (
        "data_parallel.replicate: refused on rank 0 of 2 (and on 1 more: [1]): parameter 'weight' "
        "or another one has a gradient of a backward in no_sync that has not been summed. Call "
        "backward() outside of no_sync, or zero_grad(), before."
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}"):
        replicate(model)
    model.zero_grad()
    return replicate(model) is model


def test_gradients_that_nobody_has_summed(worlds):
    assert worlds.run(2, not_summed) == [True, True]


def failed(rank, set_to_none):
    """What a backward that failed has left in grad is refused, until it is dropped."""
    model = replicate(Fragile(), bucket_bytes=1)
    with no_sync(model), pytest.raises(ValueError, match="out of memory, say"):
        square(model(rows(1, 2), 1)).backward()
    assert bool(model.layers[2].weight.grad.any())
    with pytest.raises(DisagreementError, match="an earlier backward ended in an error"):
        model(rows(1, 2))
    with pytest.raises(ArgumentError, match="gradient of a backward in no_sync that has not been"):
        replicate(model)
    model.zero_grad(set_to_none)
    replicate(model)
    square(model(rows(1, 2))).backward()
    return model.layers[0].weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_failed_backward(worlds, set_to_none):
    assert worlds.run(2, failed, set_to_none) == [True, True]


def apart(rank):
    """Ranks that differ in whether they sum; in debug() all are told."""
    model = replicate(Weight())
    loss = model(torch.ones(2, dtype=DOUBLE)).sum()
    said = (
        "replicate, at the end of backward: ranks disagree on whether it sums: rank 0 has True; "
        "rank 1 has False."
    )
    paused = no_sync(model) if rank else nullcontext()
    told = pytest.raises(DisagreementError, match=f"^{re.escape(said)}")
    with varcomm.debug(), paused, told:
        loss.backward()
    model.zero_grad()
    replicate(model)
    with varcomm.debug(), no_sync(model):
        model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    return model.weight.grad.tolist()


def test_debug_compares_whether_ranks_sum(worlds):
    assert worlds.run(2, apart) == [[1.0, 1.0]] * 2


def left_by_an_error(rank):
    model = replicate(Weight())
    with pytest.raises(ValueError, match="left"), no_sync(model), no_sync(model):
        raise ValueError("left")
    model(torch.ones(2, dtype=DOUBLE)).sum().backward()
    return model.weight.grad.tolist()


def test_it_ends_where_an_error_leaves_it(worlds):
    assert worlds.run(2, left_by_an_error) == [[2.0, 2.0]] * 2


def test_a_module_that_is_not_replicated():
    said = (
        "no_sync: model must be a module that was replicated, or holds one; got {}, in which "
        "nothing was. Pass what replicate was given."
    )
    for model, kind in ((nn.Linear(1, 1), "Linear"), ([nn.Linear(1, 1)], "list")):
        with pytest.raises(ArgumentError, match=re.escape(said.format(kind))), no_sync(model):
            pass
