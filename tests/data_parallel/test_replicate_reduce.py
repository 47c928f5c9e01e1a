"""Means and global counts: the sum of the gradients, divided once, before it is rounded."""

import re

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import DOUBLE, Branches, Layers, rows, square
from tests.data_parallel.comparing import assert_same_gradients, replicated
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, no_sync, replicate

WORLDS = (1, 2, 3, 5)


def mean(rank, ranks, in_debug):
    model, twin = replicated(Layers, reduce="mean", bucket_bytes=150)
    for _ in range(2):
        with varcomm.debug() if in_debug else torch.enable_grad():
            square(model(rows(rank, ranks))).backward()
        (sum(square(twin(rows(r, ranks))) for r in range(ranks)) / ranks).backward()
        assert_same_gradients(model, twin)
    return model.scale.grad.item() != 0


@pytest.mark.parametrize("ranks", WORLDS)
def test_means_over_ranks(worlds, ranks):
    for in_debug in (False, True):
        assert worlds.run(ranks, mean, ranks, in_debug) == [True] * ranks


def counted(rank, ranks, bucket_bytes):
    """The mean over rows, of which there are others in each step; in the last rank 0 has some."""
    count = GlobalCount()
    model, twin = replicated(Layers, reduce=count, bucket_bytes=bucket_bytes)
    for step in range(3):
        parts = [rows((r + step) % ranks, ranks) for r in range(ranks)]
        with varcomm.debug() if step == 2 else torch.enable_grad():
            count.add(len(parts[rank]))
            square(model(parts[rank])).backward()
        whole = torch.cat(parts)
        (square(twin(whole)) / len(whole)).backward()
        assert_same_gradients(model, twin)
    return model.scale.grad.item() != 0


@pytest.mark.parametrize("ranks", WORLDS)
def test_means_over_the_rows_of_all_ranks(worlds, ranks):
    for bucket_bytes in (1, 25 * 2**20):
        assert worlds.run(ranks, counted, ranks, bucket_bytes) == [True] * ranks


def of_micro_batches(rank):
    """What is counted in backwards that are not summed adds up; parameters differ between ranks."""
    count = GlobalCount()
    model, twin = replicated(Branches, reduce=count)
    for step in range(2):
        number = 0
        for micro in range(2):
            part = rows(rank + 1, 3)[: micro + step]
            count.add(torch.tensor(len(part)))
            loss = square(model(part, (rank + micro) % 3))
            if micro == 0:
                with no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            number += sum(len(rows(r + 1, 3)[: micro + step]) for r in range(3))
        losses = (
            square(twin(rows(r + 1, 3)[: micro + step], (r + micro) % 3))
            for r in range(3)
            for micro in range(2)
        )
        (sum(losses) / number).backward()
        assert_same_gradients(model, twin)
    return [p.grad is None for p in model.parameters()]


def test_counts_of_micro_batches(worlds):
    assert worlds.run(3, of_micro_batches) == [[True] + [False] * 4 + [True] * 2] * 3


def of_two_modules(rank):
    """Both are divided by what was counted once, and so are parts of them that run alone."""
    count = GlobalCount()
    first, last = (replicate(nn.Linear(1, 1, bias=False), reduce=count) for _ in range(2))
    count.add(2 + rank)
    (first(torch.ones(1, 1)) + last(torch.ones(1, 1)) * 5).sum().backward()
    count.add(1)
    first(torch.ones(1, 1)).sum().backward()
    return round(first.weight.grad.item(), 6), last.weight.grad.item()


def test_one_count_of_two_modules(worlds):
    assert worlds.run(2, of_two_modules) == [(2 / 5 + 1, 10 / 5)] * 2


def of_modules_apart(rank):
    count = GlobalCount()
    first, last = (replicate(nn.Linear(1, 1), reduce=count) for _ in range(2))
    x = torch.ones(1, 1)
    count.add(1)
    with no_sync(first):
        first(x).sum().backward()
    count.add(1)
    said = "another module with the same GlobalCount has gradients that this backward does not sum"
    with pytest.raises(ArgumentError, match=said):
        last(x).sum().backward()
    return last.weight.grad


def test_one_count_of_modules_that_are_summed_apart(worlds):
    assert worlds.run(2, of_modules_apart) == [None, None]


def nothing_counted(rank, how):
    """All ranks raise, and the next backward is as if this one had not been."""
    count = GlobalCount()
    model, twin = replicated(Layers, reduce=count, bucket_bytes=150)
    if how == "zeros" or rank != 1:
        count.add(0)
    with pytest.raises(ArgumentError) as caught:
        square(model(rows(rank, 3))).backward()
    assert model.scale.grad is None
    count.add(rank)
    square(model(rows(rank, 3))).backward()
    (sum(square(twin(rows(r, 3))) for r in range(3)) / 3).backward()
    assert_same_gradients(model, twin)
    return str(caught.value)


SAID = {
    "zeros": "all ranks have counted 0 rows, and gradients cannot be divided by that. Leave out",
    "forgotten": "on 1 of 3 ranks GlobalCount.add was not called before this backward, by which ",
}


@pytest.mark.parametrize("how", SAID)
def test_where_too_little_was_counted_all_ranks_raise(worlds, how):
    for rank, told in enumerate(worlds.run(3, nothing_counted, how)):
        assert told.startswith(f"replicate on rank {rank} of 3: {SAID[how]}")


def test_what_cannot_be_counted():
    count = GlobalCount()
    for wrong in (2.0, -1, True, None):
        said = f"rows must be an integer that is not negative; got {wrong!r}."
        with pytest.raises(ArgumentError, match=re.escape(said)):
            count.add(wrong)


def differing(rank, word, values):
    with pytest.raises(DisagreementError) as caught:
        replicate(nn.Linear(1, 1), **{word: values[rank]})
    return str(caught.value).removeprefix("data_parallel.replicate: ranks disagree on ")


def test_ranks_that_differ_in_how_they_sum(worlds):
    for word, values, told in (
        ("reduce", ("mean", "sum"), ("'mean'", "'sum'")),
        ("reduce", ("mean", GlobalCount()), ("'mean'", "a global count")),
        ("use_fp32", (True, False), ("True", "False")),
        ("initial", ("check", "broadcast"), ("check", "broadcast")),
    ):
        said = f"{word}: for {word!r}, rank 0 has {told[0]}; rank 1 has {told[1]}."
        assert worlds.run(2, differing, word, values) == [said] * 2


def wrong_options(rank):
    found = []
    for options in ({"reduce": 3}, {"initial": "none"}, {"use_fp32": 1}):
        with pytest.raises(ArgumentError) as caught:
            replicate(nn.Linear(1, 1), **options)
        found.append(str(caught.value).removeprefix("data_parallel.replicate: refused on "))
    eight = nn.Linear(1, 1, bias=False).to(torch.float8_e5m2)
    with pytest.raises(ArgumentError) as caught:
        replicate(eight, use_fp32=False)
    found.append(str(caught.value).removeprefix("data_parallel.replicate: refused on "))
    replicate(eight)
    return found


def test_wrong_options(worlds):
    assert worlds.run(1, wrong_options) == [
        [
            'rank 0 of 1: reduce must be "sum", "mean" or a data_parallel.GlobalCount; got 3.',
            'rank 0 of 1: initial must be "broadcast" or "check"; got \'none\'.',
            "rank 0 of 1: use_fp32 must be True or False; got 1.",
            "rank 0 of 1: the gradient of parameter 'weight': torch cannot add torch.float8_e5m2. "
            "Take use_fp32=True.",
        ]
    ]


class Weights(nn.Module):
    def __init__(self, n, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def drawn(rank, n, dtype, scale):
    generator = torch.Generator().manual_seed(rank)
    return (
        (torch.randn(n, dtype=DOUBLE, generator=generator) * scale).clamp(-60_000, 60_000).to(dtype)
    )


def narrow(rank, n, dtype, reduce, scale):
    """Return the errors of means of narrow gradients, as parts of what is allowed."""
    ranks, number = 3, 7
    count = GlobalCount()
    model = replicate(Weights(n, dtype), reduce=count if reduce == "count" else reduce)
    count.add(number)
    with varcomm.trace() as calls:
        model(drawn(rank, n, dtype, scale)).sum().backward()
    divisor = number * ranks if reduce == "count" else ranks
    parts = torch.stack([drawn(r, n, dtype, scale).double() for r in range(ranks)])
    exact, total = parts.sum(0) / divisor, parts.abs().sum(0) / divisor
    single, own = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    bound = (ranks + 2) * single * total
    if own > single:
        bound = bound + own * (exact.abs() + bound)
    error = (model.weight.grad.double() - exact).abs() / bound
    return error.max().item(), sum(call.sent for call in calls)


@pytest.mark.parametrize("reduce", ["mean", "count"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 15000.0), (torch.float32, 1.0)]
)
def test_narrow_gradients_are_divided_before_they_are_rounded(worlds, dtype, scale, reduce):
    """Sums of the fp16 ones would overflow. No byte more travels than for a sum, but the count."""
    for n in (11, 20_001):  # one round, and two
        for error, sent in worlds.run(3, narrow, n, dtype, reduce, scale):
            assert error <= 1
            width, of_count = dtype.itemsize, 2 * 16 if reduce == "count" else 0
            values = 2 * (n + 1) if n == 11 else 4 / 3 * (n + 1)
            assert abs(sent - of_count - values * width) <= 3 * width


def in_own_dtype(rank):
    """Beside 256 the spacing is 2, and 3/4 is lost each time."""
    model = replicate(Weights(1, torch.bfloat16), use_fp32=False)
    model(torch.tensor([0.75 if rank else 256.0], dtype=torch.bfloat16)).backward()
    return model.weight.grad.item()


def test_sums_in_the_narrow_dtype(worlds):
    assert worlds.run(3, in_own_dtype) == [256.0] * 3


def checked(rank, how):
    model = nn.BatchNorm1d(3, affine=True)
    if how == "different" and rank == 2:
        with torch.no_grad():
            model.weight[1] = 2.0
            model.running_var[0] = 3.0
    if how == "equal":
        with varcomm.trace() as calls:
            return replicate(model, initial="check") is model and calls == []
    with pytest.raises(DisagreementError) as caught:
        replicate(model, initial="check")
    return str(caught.value)


def test_values_may_be_checked_in_place_of_sent(worlds):
    assert worlds.run(3, checked, "equal") == [True] * 3
    said = (
        "data_parallel.replicate: 'weight', 'running_var' of rank 0 and of ranks [2] differ. Give "
        'all ranks the same values, or take those of rank 0: initial="broadcast".'
    )
    assert worlds.run(3, checked, "different") == [said] * 3
