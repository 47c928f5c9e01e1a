"""debug() and agreement: ranks that differ, or fail, all raise one error in place of a hang."""

import re
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ArgumentError, DisagreementError, ExchangePlan, GroupError, VarcommError
from varcomm.transport.agreement import agree, compare, debugging, on_all_ranks, share
from varcomm.transport.group import resolve


def message_of(call):
    """Return the first line of the one error that `call` raises in debug(), above its table."""
    with pytest.raises(DisagreementError) as caught, varcomm.debug():
        call()
    return str(caught.value).splitlines()[0]


F = torch.zeros
SPLIT = [[1, 1, 0], [2, 0, 0]]


def sizes_of(rank):
    return [2 * rank, 2 - 2 * rank, 0]


# the call on rank 0 and 2, and on rank 1, and the word on which they differ
DISAGREE = {
    "operation": lambda r: varcomm.all_reduce(F(1)) if r else varcomm.all_gather_v(F(1), [1] * 3),
    "dim": lambda r: varcomm.all_gather_v(F(2, 2), [2] * 3, dim=r),
    "sizes": lambda r: varcomm.all_gather_v(F(2 + r), [2 + r] * 3),
    "dtype": lambda r: varcomm.all_reduce(F(2).to([torch.float32, torch.int32][r])),
    "shape": lambda r: varcomm.all_reduce(F(2, r)),
    "shape of a row": lambda r: varcomm.gather_v(F(1, 2 + r), [1] * 3),
    "root": lambda r: varcomm.reduce(F(1), dst=r),
    "root of a broadcast": lambda r: varcomm.broadcast(F(1), src=r),
    "sizes of a scatter": lambda r: varcomm.scatter_v(F(2), sizes_of(r)),
    "use_fp32": lambda r: varcomm.all_reduce(F(1), use_fp32=r == 0),
    "requires_grad": lambda r: varcomm.all_reduce(F(1, requires_grad=r == 1)),
    "split_sizes": lambda r: varcomm.transpose_v(F(1, 2), 1, SPLIT[r], 0, [1] * 3),
    "sizes of a shard": lambda r: varcomm.shard_v(F(2), sizes_of(r)),
    "shape, asynchronously": lambda r: varcomm.all_reduce(F(r), async_op=True),
}


def disagree(rank):
    said = {}
    for what, call in DISAGREE.items():
        said[what] = message_of(lambda call=call: call(int(rank == 1)))
    rows = [3, 4, 3][rank]
    said["counts"] = message_of(
        lambda: varcomm.all_to_all_v(F(rows), [1, rows - 1, 0], [1, 1, rows - 2])
    )
    assert varcomm.all_reduce(torch.tensor(1)).item() == 3, "the group works as before"
    return said


def test_all_ranks_raise_one_error(worlds):
    first, *others = worlds.run(3, disagree)
    assert others == [first] * 2
    for what, message in first.items():
        assert (
            what == "counts" or f"disagree on {re.split(' of a s| of a b|,', what)[0]}" in message
        )
        assert what == "counts" or ("rank 0 has " in message and "rank 1 has " in message)
    assert "sends" in first["counts"]
    assert first["operation"] == (
        "ranks disagree on operation: rank 0 has 'all_gather_v'; rank 1 has 'all_reduce'; "
        "rank 2 has 'all_gather_v'."
    )


def in_backward(rank):
    x = torch.ones(2, requires_grad=True)
    results = varcomm.all_reduce(x), varcomm.all_gather_v(x, [2, 2, 2])
    other_result = message_of(results[rank == 1].sum().backward)
    y = varcomm.all_reduce(x**2).sum()
    second = message_of(lambda: torch.autograd.grad(y, x, create_graph=rank == 0))
    with varcomm.debug():
        sums = [varcomm.all_reduce(x * v) for v in (1.0, 2.0)]
    order = message_of(lambda: [s.sum().backward() for s in sums[:: -1 if rank else 1]])
    with varcomm.debug():
        rows = varcomm.all_gather_v(torch.ones(2, 3, requires_grad=True), [2, 2, 2])
        rows = torch.nn.functional.embedding(torch.tensor([0, 4]), rows, sparse=rank == 1)
    sparse = message_of(rows.sum().backward)
    return other_result, second, order, sparse


def test_disagreement_in_backward(worlds):
    first, *others = worlds.run(3, in_backward)
    assert others == [first] * 2
    other_result, second, order, sparse = first
    assert other_result.startswith("ranks disagree on operation: rank 0 has 'all_reduce'; rank 1")
    assert second.startswith("all_reduce: ranks disagree on requires_grad")
    assert order.startswith("all_reduce: ranks disagree on backward of call: rank 0 has ")
    assert sparse.startswith("reduce_scatter_v: not called, since on rank 1: ")


def right_calls(rank, ranks):
    """Comparing changes nothing: every primitive, forward and backward."""
    for name in PRIMITIVES:
        c = case(name, "one empty", ranks)
        with varcomm.debug():
            x = c.input(rank, torch.float64).requires_grad_()
            y = c.bind()(x)
            y.sum().backward()
        torch.testing.assert_close(y, c.reference(c.draw(torch.float64))[rank])
    return debugging()


@pytest.mark.parametrize("ranks", [1, 3])
def test_right_calls_pass(worlds, ranks):
    assert worlds.run(ranks, right_calls, ranks) == [False] * ranks


ONE = torch.ones(1)
SETUP = {
    "all_gather_v": lambda: varcomm.all_gather_v(ONE, [1, 1, 1]),
    "ExchangePlan.from_indices": lambda: ExchangePlan.from_indices([torch.tensor([0])] * 3, 1),
    "ExchangePlan.from_needed": lambda: ExchangePlan.from_needed(torch.tensor([0]), [1, 1, 1]),
    "ShardSizes.from_local": lambda: varcomm.ShardSizes.from_local(1),
}


def beside_setup(rank):
    said = {}
    for here in SETUP:
        for there in SETUP:
            if here != there:
                said[here, there] = message_of(SETUP[there if rank == 1 else here])
    wrong = {
        "all_gather_v": lambda: varcomm.all_gather_v(ONE, [2, 2, 2]),
        "ExchangePlan.from_indices": lambda: ExchangePlan.from_indices([torch.tensor([7])] * 3, 1),
    }
    refused = [
        message_of(wrong["all_gather_v"] if rank == 1 else SETUP["ExchangePlan.from_needed"]),
        message_of(wrong["all_gather_v"] if rank == 1 else lambda: varcomm.all_reduce(ONE)),
        message_of(
            wrong["ExchangePlan.from_indices"] if rank == 1 else lambda: varcomm.all_reduce(ONE)
        ),
    ]
    x = torch.ones(1, device="meta" if rank == 1 else "cpu")
    device = message_of(lambda: varcomm.all_gather_v(x, [1] * 3, async_op=True))
    return said, refused, device, varcomm.all_reduce(torch.tensor(1)).item()


def test_different_work_on_ranks(worlds):
    first, *others = worlds.run(3, beside_setup)
    assert others == [first] * 2
    said, refused, device, total = first
    for (here, there), message in said.items():
        assert f"operation: rank 0 has '{here}'; rank 1 has '{there}'" in message
    assert "all_gather_v on rank 1 of 3: the tensor of shape (1,) has 1 rows" in refused[0]
    assert refused[1].startswith("all_gather_v: not called, since on rank 1: all_gather_v on rank")
    assert refused[2].startswith("ExchangePlan.from_indices: not called, since on rank 1: ")
    assert "on meta" in device
    assert total == 3


def waits(rank):
    def sums(shape, reverse):
        handles = [varcomm.all_reduce(torch.full(shape, v), async_op=True) for v in (1.0, 100.0)]
        for handle in handles[:: -1 if reverse else 1]:
            handle.wait()
        return [handle.wait().unique().tolist() for handle in handles]

    values = [sums(shape, reverse=rank == 1) for shape in ((4,), (30_000,))]
    order = message_of(lambda: sums((4,), rank == 1))
    with varcomm.debug():
        values.append(sums((4,), True))
        x = torch.ones(2)
        handle = varcomm.all_reduce(x, async_op=True)
    if rank == 1:
        x.add_(1)
    return values, order, message_of(handle.wait)


def test_waits_in_another_order(worlds):
    first, *others = worlds.run(3, waits)
    assert others == [first] * 2
    values, order, changed = first
    assert values == [[[3.0], [300.0]]] * 3
    assert order.startswith("wait for all_reduce: ranks disagree on which call: rank 0 has ")
    assert changed.startswith(
        "wait for all_reduce: not called, since on rank 1: all_reduce on rank"
    )


class OwnError(VarcommError):
    """A kind that takes more than a message, and so cannot be made from one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unprintable(Exception):
    def __str__(self):
        return "\ud800 \0"  # a lone surrogate, which no encoding has


ERRORS = {
    "ArgumentError": (lambda: ArgumentError("no"), ArgumentError, "no"),
    "GroupError": (lambda: GroupError("no"), GroupError, "no"),
    "KeyError": (lambda: KeyError("name"), ArgumentError, "'name'"),
    "OSError": (lambda: OSError(2, "gone", "a.txt"), ArgumentError, "gone"),
    "unpicklable": (lambda: ValueError(lambda: None), ArgumentError, "lambda"),
    "unprintable": (Unprintable, ArgumentError, "\ud800"),
    "own": (lambda: OwnError("this", "that"), VarcommError, "this and that"),
    "long": (lambda: ArgumentError("x" * 5000), ArgumentError, "x" * 5000),
}


def refused(rank):
    group, said = resolve(None), []
    for through in (agree, share):
        for make, kind, text in ERRORS.values():
            for culprits in ((1,), (0, 1, 2)):

                def local(make=make, culprits=culprits):
                    if rank in culprits:
                        raise make()

                with pytest.raises(kind) as caught:
                    through("set-up", local, group)
                assert text in str(caught.value)
                assert on_all_ranks(caught.value)
                said.append(str(caught.value)[:60].encode(errors="replace"))
    with pytest.raises(ArgumentError) as caught, varcomm.debug():
        ExchangePlan.from_indices([torch.tensor([7 * (rank == 1)])] * 3, 1)
    said.append(str(caught.value).splitlines()[1].split())
    results = agree("set-up", lambda: rank, group), share("set-up", lambda: [rank] * rank, group)
    return said, results


def test_error_on_one_rank_is_an_error_on_all(worlds):
    answers = worlds.run(3, refused)
    assert [said for said, _ in answers] == [answers[0][0]] * 3
    assert answers[0][0][0] == b"set-up: refused on rank 1 of 3: no"
    assert answers[0][0][1].startswith(
        b"set-up: refused on rank 0 of 3 (and on 2 more: [1, 2]): no"
    )
    assert answers[0][0][-1] == ["rank", "operation", "at"]
    assert [results for _, results in answers] == [(r, [[], [1], [2, 2]]) for r in range(3)]


def in_a_part(rank):
    """Two of three ranks, in another order than in the world."""
    group = dist.new_group([2, 1], sort_ranks=False)
    said = []
    if rank:
        calls = (
            lambda: varcomm.all_gather_v(torch.ones(rank, 1), [1, 1], group=group),
            lambda: agree("work", refusing if rank == 1 else int, resolve(group)),
            lambda: varcomm.all_gather_v(torch.ones(2, rank), [2, 2], group=group),
            lambda: compare(resolve(group), {"operation": "work", "value": rank}),
        )
        for call in calls:
            with varcomm.debug(), pytest.raises(VarcommError) as caught:
                call()
            said.append(str(caught.value).splitlines()[0])
    dist.barrier()
    return said


def refusing():
    raise ArgumentError("no.")


def test_ranks_of_a_part_are_distinguished_from_those_of_the_world(worlds):
    nothing, *others = worlds.run(3, in_a_part)
    assert not nothing
    for said in others:
        numbers = "The group is of ranks 2, 1 of the world, which are 0, 1 in it."
        assert all(text.endswith(numbers) for text in said), said
        assert said[1].startswith("work: refused on rank 1 of 2: no.")
        assert "rank 0 has [2]; rank 1 has [1]." in said[2]
        assert "rank 0 has 2; rank 1 has 1." in said[3]


def test_blocks_may_be_nested_and_left_in_any_order():
    with varcomm.debug():
        with pytest.raises(KeyError), varcomm.debug():
            raise KeyError
        assert debugging()
    assert not debugging()
    begun, ended = Event(), Event()

    def beside():
        with varcomm.debug(50):
            begun.set()
            ended.wait()

    thread = Thread(target=beside)
    with varcomm.debug(7):
        thread.start()
        begun.wait()
    assert debugging()
    ended.set()
    thread.join()
    assert not debugging()


def by_environment(rank):
    with pytest.raises(DisagreementError, match="disagree on shape"):
        varcomm.all_reduce(F(rank))


def test_environment_variable(monkeypatch):
    monkeypatch.setenv("VARCOMM_DEBUG", "1")
    varcomm.launch(by_environment, 2)


@pytest.mark.slow
def test_environment_variables_that_are_wrong_or_off(monkeypatch):
    monkeypatch.setenv("VARCOMM_DEBUG", "1")
    monkeypatch.setenv("VARCOMM_DEBUG_TIMEOUT", "-2 s")
    with pytest.raises(varcomm.LaunchError, match=r"VARCOMM_DEBUG_TIMEOUT|exited with code 1"):
        varcomm.launch(by_environment, 1)
    monkeypatch.delenv("VARCOMM_DEBUG_TIMEOUT")
    for value in ("0", "off", "False", ""):
        monkeypatch.setenv("VARCOMM_DEBUG", value)
        assert varcomm.launch(lambda rank: debugging(), 1) == [False]


@pytest.mark.parametrize("timeout", [0, -1, "soon", None, float("nan")])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ArgumentError, match="timeout"):
        varcomm.debug(timeout).__enter__()
