"""Gathers without sizes: of tensors, and of nested tensors side by side."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm as vc
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.testing import gradcheck, gradgradcheck

ROWS = (3, 0, 2, 4, 1)


def values_of(rank):
    """Tensors of many dtypes; rank 1 has no rows."""
    n, draws = ROWS[rank], torch.Generator().manual_seed(rank)
    complex_rows = torch.randn(2, n + 1, generator=draws, dtype=torch.complex64).T
    return {
        "scores": torch.randn(n, 2, generator=draws, dtype=torch.float64).requires_grad_(),
        "ids": [torch.arange(n), torch.arange(n) % 2 == 0, None],
        "waves": complex_rows.requires_grad_(),  # not contiguous
        "number": torch.tensor(float(rank)),
        "narrow": torch.randn(n, 3, generator=draws).bfloat16().requires_grad_(),
        "fixed": torch.randn(n, 1, generator=draws),
    }


def close(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **tolerance)


@on_ranks(*WORLDS)
def test_values_and_gradients(rank, ranks):
    every = [values_of(other) for other in range(ranks)]
    own, names = every[rank], ("scores", "waves", "narrow", "fixed")
    whole = {name: torch.cat([each[name] for each in every]) for name in names}
    with vc.trace() as calls:
        got = vc.all_gather_v(own)
    assert [call.name for call in calls] == ["all_gather_v"] * 4  # three dtypes, and the others
    for name in names:
        close(got[name], whole[name], rtol=0, atol=0)
        assert got[name].requires_grad == (name != "fixed")
    assert type(got["ids"]) is list
    assert got["ids"][1].dtype == torch.bool
    assert got["ids"][2] is None
    close(got["ids"][0], torch.cat([each["ids"][0] for each in every]))
    close(got["number"], torch.arange(float(ranks)))

    got["scores"] *= 1  # a result may be changed
    loss = got["scores"].sin().sum() + got["waves"].abs().pow(3).sum()
    loss = loss + got["narrow"].double().sin().sum()
    with vc.trace() as calls:
        loss.backward()
    assert [call.name for call in calls] == ["reduce_scatter_v"] * 3
    sent = sum(own[name].nbytes for name in ("scores", "waves", "narrow"))
    total = sum(whole[name].nbytes for name in ("scores", "waves", "narrow"))
    assert sum(call.sent for call in calls) == total - sent  # no other gradient travels
    close(own["scores"].grad, ranks * own["scores"].detach().cos())
    close(own["narrow"].grad, (ranks * own["narrow"].detach().double().cos()).bfloat16())

    last = ranks - 1
    at_last = vc.gather_v(own, dst=last)
    for name in names:
        wanted = whole[name] if rank == last else whole[name][:0]
        close(at_last[name], wanted, rtol=0, atol=0)
    own["scores"].grad = None
    at_last["scores"].square().sum().backward()
    close(own["scores"].grad, 2 * own["scores"].detach())

    close(vc.all_gather_v(own["scores"]), whole["scores"], rtol=0, atol=0)
    close(vc.all_gather_v(own["scores"], async_op=True).wait(), whole["scores"])
    close(vc.all_gather_v(own["waves"].T, dim=-1), whole["waves"].T)
    assert vc.all_gather_v(torch.tensor(rank)).tolist() == list(range(ranks))
    assert vc.all_gather_v({"a": [], "b": (None,)}) == {"a": [], "b": (None,)}
    with vc.debug():
        vc.all_gather_v(own)["scores"].sum().backward()
    scale = torch.func.grad(lambda x: vc.all_gather_v([x, x.float()])[0].square().sum())(
        own["scores"].detach()
    )
    close(scale, 2 * ranks * own["scores"].detach())


@pytest.mark.slow
@on_ranks(3)
def test_second_derivatives(rank):
    x = values_of(rank)["scores"].detach()
    y = torch.randn(len(x), 2, dtype=torch.complex128)
    for gather in (vc.all_gather_v, partial(vc.gather_v, dst=2)):
        for dim in (0, -2):

            def fn(x, y, gather=gather, dim=dim):
                return tuple(gather([x**2, y**2, x.detach()], dim=dim))[:2]

            for check in (gradcheck, gradgradcheck):
                check(fn, x, y, fast_mode=True)
                check(fn, x, y, fast_mode=True, forward_mode=False)


class Same(str):
    """A key whose text is that of another key."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return self is other


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")


@on_ranks(3)
def test_one_item_per_sample_is_refused(rank):
    """Ranks with equal numbers of samples: a gather would join the samples of ranks."""
    boxes = [torch.ones(rows, 4) for rows in (1, 3 - rank)]
    images = [{"boxes": each, "labels": torch.ones(len(each))} for each in boxes]
    for value, place in (
        (boxes, ""),
        (images, ""),
        ([boxes, boxes], ""),
        ([tuple(boxes)], ""),
        ({"boxes": boxes, "loss": torch.ones(())}, r" of \['boxes'\]"),
        ((torch.ones(2), images), r" of \[1\]"),
        ([torch.ones(()), torch.ones(())], ""),
        (dict(enumerate(boxes)), ""),
        ({3 + rank: boxes[0], 7: boxes[1]}, ""),
        ([] if rank == 1 else images, ""),  # a rank without samples
        (images if rank == 1 else tuple(images), ""),
    ):
        for gather in (vc.all_gather_v, vc.gather_v):
            with pytest.raises(ArgumentError, match=f"the value{place} is a list.*split") as error:
                gather(value)
            assert error.value.on_all_ranks
    rows = torch.cat([torch.empty(0, 4), *boxes[:rank]])  # the cure; rank 0 has no samples
    counts = torch.tensor([len(each) for each in boxes[:rank]], dtype=torch.int64)
    whole = vc.all_gather_v({"boxes": rows, "counts": counts})
    assert [len(each) for each in whole["boxes"].split(whole["counts"].tolist())] == [1, 1, 1]
    pair = vc.all_gather_v(tuple(boxes))  # parts of one value
    assert [len(each) for each in pair] == [3, 6]


@on_ranks(3)
def test_refusals(rank):
    ones = torch.ones(2)
    graded = ones.clone().requires_grad_(rank == 0)
    around = {"a": ones}
    around["b"] = [around] if rank == 1 else ones
    for wrong, word in (
        (around, "contains itself"),
        ({"1": ones, **({Same("1"): ones} if rank else {})}, "must differ as text"),
        ({Unprintable() if rank else "a": ones}, "no text"),
        (None if rank == 1 else ones, "must be a tensor"),
        ({"a": None if rank == 1 else ones}, r"kind of \['a'\]"),
        ((ones,) * (rank + 1), r"kind of \[1\]"),
        ({"a": ones, rank: ones}, "kind of"),
        (torch.ones(2, 3 + rank), "shape of a row"),
        ([ones, torch.ones(2, 3 + rank)], r"shape of a row of \[1\]"),
        ((ones, ones.double() if rank else ones), r"dtype of \[1\]"),
        ((ones, graded), r"requires_grad of \[1\]"),
        (torch.ones((2,) * (1 + rank)), "dimensions"),
        ([1.0, ones], r"value of \[0\] must be a tensor"),
    ):
        with pytest.raises((ArgumentError, DisagreementError), match=word) as error:
            vc.all_gather_v(wrong)
        assert error.value.on_all_ranks
    for call, word in (
        (lambda: vc.all_gather_v(torch.ones(2, 2), dim=int(rank == 0)), "dim"),
        (lambda: vc.all_gather_v(ones.bfloat16(), use_fp32=rank == 0), "use_fp32"),
        (lambda: vc.gather_v(ones, dst=rank), "dst"),
        (lambda: vc.gather_v(ones, dst=3), "dst must be a rank"),
        (lambda: vc.all_gather_v([ones], async_op=True), "async_op=True needs one tensor"),
    ):
        with pytest.raises((ArgumentError, DisagreementError), match=word) as error:
            call()
        assert error.value.on_all_ranks
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ones, ones) if rank == 1 else ones
        for value in (dual, (ones, dual)):
            for gather in (vc.all_gather_v, vc.gather_v):
                with pytest.raises(DisagreementError, match="tangent of forward mode"):
                    gather(value)
    assert len(vc.all_gather_v(ones)) == 6  # ranks agree again


@pytest.mark.slow
@on_ranks(2)
def test_compiled(rank):
    def fn(x):
        return vc.all_gather_v(x * 2) + 1

    x = torch.arange(float(rank))
    close(torch.compile(fn, backend="eager")(x), fn(x))
    with pytest.raises(ArgumentError, match="while a graph is recorded"):
        torch.fx.experimental.proxy_tensor.make_fx(fn)(x)
