"""Inside debug(): set-up work beside hot calls, other devices, and the order of waits."""

import re
from threading import Event, Thread

import pytest
import torch

import varcomm
from tests.transport.test_agree import message_of
from varcomm import ArgumentError, DisagreementError, ExchangePlan, ShardSizes
from varcomm.transport import agree

ONE = torch.ones(1)
SETUP = {
    "all_gather_v": lambda: varcomm.all_gather_v(ONE, [1, 1]),
    "ExchangePlan.from_indices": lambda: ExchangePlan.from_indices([torch.tensor([0])] * 2, 1),
    "ExchangePlan.from_needed": lambda: ExchangePlan.from_needed(torch.tensor([0]), [1, 1]),
    "ShardSizes.from_local": lambda: ShardSizes.from_local(1),
}
PAIRS = [(a, b) for a in SETUP for b in SETUP if a != b]


def other_setup(rank, pair):
    message = message_of(SETUP[pair[rank]])
    return message, varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_different_work_on_ranks(worlds, pair):
    said = f"ranks disagree on operation: rank 0 has '{pair[0]}'; rank 1 has '{pair[1]}'."
    assert worlds.run(2, other_setup, pair) == [(said, 2)] * 2


def wrong_argument_beside_setup(rank):
    bad = lambda: varcomm.all_gather_v(ONE, [2, 2])  # noqa: E731
    return message_of(bad if rank else SETUP["ExchangePlan.from_needed"])


def test_wrong_argument_beside_setup(worlds):
    text = "all_gather_v on rank 1 of 2: the tensor of shape (1,) has 1 rows"
    assert all(text in message for message in worlds.run(2, wrong_argument_beside_setup))


def wrong_argument_beside_another_call(rank):
    bad = lambda: varcomm.all_gather_v(ONE, [2, 2])  # noqa: E731
    return message_of(bad if rank else lambda: varcomm.all_reduce(ONE))


def test_wrong_argument_beside_another_call(worlds):
    one, other = worlds.run(2, wrong_argument_beside_another_call)
    assert one == other
    assert one.startswith("all_gather_v: not called, since on rank 1: all_gather_v on rank 1 of 2:")


def refused_setup_beside_a_hot_call(rank):
    bad = lambda: ExchangePlan.from_indices([torch.tensor([7])] * 2, 1)  # noqa: E731
    call = bad if rank else lambda: varcomm.all_reduce(ONE)
    with pytest.raises(DisagreementError) as caught, varcomm.debug():
        call()
    return str(caught.value), varcomm.all_reduce(torch.tensor(1)).item()


def test_refused_setup_beside_a_hot_call(worlds):
    (message, _), *_ = answers = worlds.run(2, refused_setup_beside_a_hot_call)
    assert answers == [(message, 2)] * 2
    first, _, *rows = message.splitlines()
    assert first.startswith("ExchangePlan.from_indices: not called, since on rank 1: ")
    assert [row.split()[:2] for row in rows] == [
        ["0", "all_reduce"],
        ["1", "ExchangePlan.from_indices"],
    ]


def refused_setup(rank):
    with pytest.raises(ArgumentError) as caught, varcomm.debug():
        ExchangePlan.from_indices([torch.tensor([7 * rank])] * 2, 1)
    return str(caught.value)


def test_refused_setup_has_a_table(worlds):
    message, other = worlds.run(2, refused_setup)
    assert message == other
    first, words, row = message.splitlines()
    assert first.startswith("ExchangePlan.from_indices: refused on rank 1 of 2: ")
    assert words.split() == ["rank", "operation", "at"]
    assert row.split()[:3] == ["0,", "1", "ExchangePlan.from_indices"]


def backward_in_another_order(rank, async_op):
    """Two calls that are alike in all but their place among the calls."""
    x, z = (torch.full((2,), v, requires_grad=True) for v in (1.0, 2.0))
    with varcomm.debug():
        sums = [varcomm.all_reduce(v, async_op=async_op) for v in (x, z)]
        sums = [s.wait() if async_op else s for s in sums]
        right = sum(s.sum() for s in sums)
        right.backward(retain_graph=True)
    message = message_of(lambda: [s.sum().backward() for s in sums[:: -1 if rank else 1]])
    return message, x.grad.tolist(), varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("async_op", [False, True])
def test_backward_in_another_order(worlds, async_op):
    answers = worlds.run(3, backward_in_another_order, async_op)
    assert answers == [(answers[0][0], [3.0, 3.0], 3)] * 3
    start, _, said = answers[0][0].partition(" backward of call: ")
    assert start == "all_reduce: ranks disagree on"
    first, second, third = (int(number) for number in re.findall(r"has (\d+)", said))
    assert first < second == third


def on_another_device(rank):
    x = torch.ones(1, device="meta" if rank == 1 else "cpu")
    return message_of(lambda: varcomm.all_reduce(x)), message_of(
        lambda: varcomm.all_gather_v(x, [1, 1], async_op=True)
    )


def test_another_device_on_one_rank(worlds):
    for first, second in worlds.run(2, on_another_device):
        for name, message in (("all_reduce", first), ("all_gather_v", second)):
            assert message.startswith(f"{name}: not called, since on rank 1: ")
            assert (
                "the tensor is on meta, but this group has an engine for cpu and cuda only"
                in message
            )


def sums(rank, shape, reverse):
    handles = [varcomm.all_reduce(torch.full(shape, v), async_op=True) for v in (1.0, 100.0)]
    for handle in handles[:: -1 if reverse else 1]:
        handle.wait()
    return [handle.wait().unique().tolist() for handle in handles]


def out_of_order(rank, shape):
    return sums(rank, shape, reverse=rank == 1)


@pytest.mark.parametrize("shape", [(4,), (30_000,)])
def test_waits_in_another_order_give_the_same_values(worlds, shape):
    """A large sum too: all of it was under way when it was waited for."""
    assert worlds.run(3, out_of_order, shape) == [[[3.0], [300.0]]] * 3


def out_of_order_in_debug(rank):
    with pytest.raises(DisagreementError) as caught, varcomm.debug():
        out_of_order(rank, (4,))
    with varcomm.debug():
        right = sums(rank, (4,), reverse=True)
    return str(caught.value), right


def test_waits_are_compared(worlds):
    answers = worlds.run(3, out_of_order_in_debug)
    for message, right in answers:
        assert message == answers[0][0]
        assert message.startswith("wait for all_reduce: ranks disagree on which call: rank 0 has ")
        assert right == [[3.0], [300.0]]


def bytes_of_large(rank):
    with varcomm.trace() as calls:
        varcomm.all_reduce(torch.ones(30_000), async_op=True).wait()
    return [(call.sent, call.received) for call in calls]


def test_an_asynchronous_sum_takes_one_round(worlds):
    assert worlds.run(3, bytes_of_large) == [[(240_000, 240_000)]] * 3


def sparse_on_one_rank(rank, async_op):
    x = torch.ones(2, 3, requires_grad=True)
    with varcomm.debug():
        y = varcomm.all_gather_v(x, [2, 2, 2], async_op=async_op)
        y = y.wait() if async_op else y
        rows = torch.nn.functional.embedding(torch.tensor([0, 4]), y, sparse=rank == 1)
    return message_of(rows.sum().backward), varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("async_op", [False, True])
def test_sparse_gradient_on_one_rank(worlds, async_op):
    said = (
        "reduce_scatter_v: not called, since on rank 1: reduce_scatter_v on rank 1 of 3, in "
        "backward: gradient must be dense; got torch.sparse_coo of torch.float32. Convert it: "
        "to_dense(), dequantize(), or to_padded_tensor()."
    )
    assert worlds.run(3, sparse_on_one_rank, async_op) == [(said, 3)] * 3


def changed_on_one_rank(rank):
    x = torch.ones(2)
    with varcomm.debug():
        handle = varcomm.all_reduce(x, async_op=True)
    if rank == 1:
        x.add_(1)
    return message_of(handle.wait), varcomm.all_reduce(torch.tensor(1)).item()


def test_changed_in_place_on_one_rank(worlds):
    said = (
        "wait for all_reduce: not called, since on rank 1: all_reduce on rank 1 of 3: the tensor "
        "was changed in place between async_op=True and wait(). Change a clone, or wait first."
    )
    assert worlds.run(3, changed_on_one_rank) == [(said, 3)] * 3


def test_threads_leave_debug_in_another_order():
    begun, ended = Event(), Event()

    def beside():
        with varcomm.debug(50):
            begun.set()
            ended.wait()

    thread = Thread(target=beside)
    with varcomm.debug(7):
        thread.start()
        begun.wait()
    left = agree._limit()
    ended.set()
    thread.join()
    assert (left, agree.debugging()) == (50.0, False)
