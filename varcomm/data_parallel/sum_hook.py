"""A communication hook by which ``DistributedDataParallel`` sums gradients rather than average."""

# Without "from __future__ import annotations": torch compares the hook's annotations with types.

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from varcomm.data_parallel.bucket_sum import BucketSum
from varcomm.data_parallel.global_count import CountSum, GlobalCount, Reduce, described
from varcomm.data_parallel.leaf import accumulator, notes
from varcomm.errors import ArgumentError, GroupError
from varcomm.ops.operator import checking
from varcomm.transport.agreement import debugging
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.auxiliary_group import weakly

__all__ = ["sum_hook"]

_MARK = "varcomm.sum_hook"

# Of the backward in which each is used, by autograd's number for it.
_totals: weakref.WeakKeyDictionary[GlobalCount, tuple[int, CountSum]] = weakref.WeakKeyDictionary()


def sum_hook(
    state: GroupLike | tuple[GroupLike, Reduce], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over ranks, for ``DistributedDataParallel``.

    ``ddp.register_comm_hook(group, sum_hook)`` makes it leave the sum over ranks in each ``grad``,
    where it would leave the average: the gradient of a loss of which each rank computes a part.
    ``ddp.register_comm_hook((group, count), sum_hook)`` divides the sum by what a
    :class:`GlobalCount` has counted, and ``(group, "mean")`` by the number of ranks.

    Parameters
    ----------
    state : ProcessGroup, DeviceMesh or None, or a pair of that and what `reduce` is in `replicate`
        The ranks of the ``DistributedDataParallel``, None for the whole world; alone it is a sum.
        It has to be the group that was given there, which is not told to hooks, so nobody can
        check it.
    bucket : torch.distributed.GradBucket
        What ``DistributedDataParallel`` passes.

    Returns
    -------
    torch.futures.Future
        Of the sum, in the shape and dtype of the bucket; done when backward ends.

    Raises
    ------
    ArgumentError
        In backward, if a parameter has a gradient that has been summed before and is not zero, if
        `state` is something else, as :class:`GlobalCount` says where too little was counted, or if
        two ``DistributedDataParallel`` in it have the same count.
        ``DistributedDataParallel`` cannot be used after an error in backward.

    Notes
    -----
    Gradients of micro-batches are accumulated inside of ``ddp.no_sync()``, in all backwards but the
    last one, and ``zero_grad()`` comes before the next: ``DistributedDataParallel`` passes what is
    in ``grad``, and a part that has been summed would be summed again. So it is refused.
    :func:`replicate` sums what each backward adds, and has no such rule. Nor are counts dropped by
    ``zero_grad()`` here: what was added since the last sum belongs to the next. Each
    ``DistributedDataParallel`` needs a :class:`GlobalCount` of its own, which nothing else divides
    by.

    A model that communicates by itself (:func:`varcomm.graph.distribute`, before it is wrapped)
    should have a group to itself: pass ``dist.new_group()`` both to ``DistributedDataParallel`` and
    here. With ``find_unused_parameters=True``, ranks come to their buckets at other places of their
    backward, and on one group calls must come in the same order.

    Communication: as in :func:`replicate`, begun when the bucket is full; the second round, where
    there is one, at the end of backward. Floats narrower than 4 bytes travel narrow and are summed
    in fp32. The sums are in rank order, the same on all ranks bit for bit.

    In one process: nothing: backward from the sum of the losses of all ranks.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> def fn(rank):
    ...     ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    ...     ddp.register_comm_hook(None, varcomm.data_parallel.sum_hook)
    ...     ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     return ddp.module.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [3.0, 3.0]
    """
    if isinstance(state, tuple) and len(state) != 2:
        raise ArgumentError(
            f"sum_hook: state must be a group or a pair (group, reduce); got {state}."
        )
    group, reduce = state if isinstance(state, tuple) else (state, "sum")
    try:
        ranks = resolve(group)
    except GroupError as error:
        raise ArgumentError(
            f"sum_hook: state must be a group or a pair (group, reduce); got {state!r}. {error}"
        ) from error
    task = torch._C._current_graph_task_id()
    with checking("sum_hook", ranks) as where:
        described(reduce, where)
        taken = _totals.get(reduce) if isinstance(reduce, GlobalCount) else None
        if bucket.index() == 0 and taken is not None and taken[0] == task != -1:
            raise ArgumentError(
                f"{where}two DistributedDataParallel in one backward have the same GlobalCount, of "
                "which the first has taken what was counted. Give each its own."
            )
    for parameter in bucket.parameters():
        _watch(parameter, ranks)
    values = bucket.buffer()
    on: list[int | str | torch.device] = [values.device] if values.is_cuda else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on)

    @torch.no_grad()
    def begin() -> BucketSum:
        if isinstance(reduce, GlobalCount) and bucket.index() == 0:  # which comes first
            _totals[reduce] = task, CountSum(reduce.take(), [ranks])
        return BucketSum(values, ranks)

    # comparing blocks, and ranks may be at other places of their backward
    begun = None if debugging() else begin()

    @torch.no_grad()
    def finish() -> None:
        total, divisor = begun or begin(), ranks.size if reduce == "mean" else 1
        if isinstance(reduce, GlobalCount):
            divisor = _totals[reduce][1].wait(where)
        total.begin_second_round(divisor)
        future.set_result(total.wait())

    if torch._C._current_autograd_node() is None:
        finish()  # backward has ended (static_graph): DDP waits first
    else:
        # before DistributedDataParallel's own callback, which waits for the futures
        torch.autograd.Variable._execution_engine.queue_callback(finish)
    return future


def _watch(parameter: torch.Tensor, group: Group) -> None:
    """Note that the gradient of a parameter is summed now, and refuse to do so twice."""
    node = accumulator(parameter)
    if _MARK not in notes(node):
        # at the node, which DistributedDataParallel keeps
        state: dict[str, bool] = {}
        notes(node)[_MARK] = state
        node.register_prehook(partial(_check_fresh, weakref.ref(parameter), weakly(group), state))
    notes(node)[_MARK]["summed"] = True


def _check_fresh(
    me: weakref.ref[torch.Tensor],
    group: Callable[[], Group],
    state: dict[str, bool],
    _: object,
) -> None:
    """Raise if backward is about to add to a gradient that has been summed."""
    parameter = me()
    summed, state["summed"] = state["summed"], False
    if summed and parameter is not None and parameter.grad is not None and parameter.grad.any():
        with checking("sum_hook", group()) as where:
            raise ArgumentError(
                f"{where}the gradient of a parameter of shape {tuple(parameter.shape)} has been "
                "summed over ranks, and what this backward adds to it would sum it again. Call "
                "zero_grad() before; run all micro-batches but the last in ddp.no_sync()."
            )
