"""Communication hook by which ``DistributedDataParallel`` sums gradients in place of averaging."""

# Without "from __future__ import annotations": torch compares the hook's annotations with types.

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from varcomm._torch_private import at_end_of_backward
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.carried import carried, words
from varcomm.ops.checks import checking
from varcomm.ops.handle import send_in_rule
from varcomm.ops.reduction import pieces
from varcomm.ops.rule import Operator
from varcomm.transport.agreement import debugging
from varcomm.transport.debug import settle
from varcomm.transport.engine import Pending
from varcomm.transport.group import MANY, Group, GroupLike, resolve, weakly


def sum_hook(state: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over ranks, for ``DistributedDataParallel``.

    ``ddp.register_comm_hook(group, sum_hook)`` leaves the sum over ranks in each ``grad``, in place
    of the average. The sum is the gradient of the total loss if each rank computes a part of the
    loss.

    Parameters
    ----------
    state : ProcessGroup, DeviceMesh or None
        The group of the ``DistributedDataParallel``; None means the whole world.
    bucket : torch.distributed.GradBucket
        Passed by ``DistributedDataParallel``.

    Returns
    -------
    torch.futures.Future
        Future of the sum, in the shape and dtype of the bucket; complete at the end of backward.

    Raises
    ------
    ArgumentError
        In backward, if a parameter has a gradient that is already summed and is not zero. The
        ``DistributedDataParallel`` cannot be used after this error.

    See Also
    --------
    sum_gradients, GlobalCount

    Notes
    -----
    Run all micro-batches except the last in ``ddp.no_sync()``, and call ``zero_grad()`` before the
    next step. If the model itself communicates, pass one ``dist.new_group()`` to the
    ``DistributedDataParallel`` and to ``register_comm_hook``.

    Communication: as in :func:`sum_gradients`, begun when the bucket is full. The last bucket and
    the further rounds of all buckets begin at the end of backward. Floats narrower than 4 bytes are
    sent in their own dtype and summed in fp32.

    In one process: backward of the sum of all ranks' losses.

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
    ranks = resolve(state)
    sums: _Sums = ranks.auxiliary.setdefault("sum_hook", _Sums())
    first = bucket.parameters()[0]
    if any(other is first for other, *_ in sums.jobs):
        sums.jobs.clear()  # an earlier backward has failed
    for parameter in bucket.parameters():
        watch = sums.watched.get(id(parameter))
        if watch is None or watch.parameter() is not parameter:
            watch = sums.watched[id(parameter)] = _Watch(weakref.ref(parameter), weakly(ranks))
            parameter.register_hook(watch)
        watch.summed = True
    on: list[int | str | torch.device] = [bucket.buffer().device] if bucket.buffer().is_cuda else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on)
    begin = partial(_begun, ranks, bucket.buffer(), bucket.is_last())
    waits = debugging() or bucket.is_last()  # both compare, where all ranks are at one place
    sums.jobs.append((first, begin, None if waits else begin(), future))
    if bucket.is_last():
        # a rank that leaves out parameters must not wait here, in the middle of its backward
        at_end_of_backward(sums.finish)
    return future


_LastRound = Callable[[], Pending]


def _begun(ranks: Group, values: torch.Tensor, compares: bool) -> _LastRound:
    """Begin the sum of a bucket, and return the start of its last round."""
    count, word = len(values), None
    if compares:
        settle(ranks)
        of_dtype = words(ranks, values.dtype, values.device)
        word = None if of_dtype is None else of_dtype.now()
    values = values if word is None else torch.cat((values, word.values))
    # None for a small bucket, and for many ranks, where all rounds of a sum are one operator
    counts = None if ranks.size >= MANY else pieces(values, ranks, one_round=False)
    how = ranks, tuple(counts or ()), 0, True
    operator: Operator = (
        ReduceScatterV(*how) if counts else AllReduce(ranks, use_fp32=True, compares=False)
    )
    begun = send_in_rule(operator, values, False)

    def last_round() -> Pending:
        total = send_in_rule(AllGatherV(*how), begun.wait(), False) if counts else begun
        return total if word is None else carried(total, ranks, (count,), word)

    return last_round


# first parameter of a bucket, start of its sum, start of the last round if the sum has begun, and
# its future
_Job = tuple[
    torch.Tensor, Callable[[], _LastRound], _LastRound | None, torch.futures.Future[torch.Tensor]
]


@dataclass
class _Sums:
    """Sums of all modules that share a group, and the parameters that have been summed."""

    jobs: list[_Job] = field(default_factory=list)
    watched: dict[int, "_Watch"] = field(default_factory=dict)

    def finish(self) -> None:
        """Complete all sums, at the end of backward."""
        jobs, self.jobs = self.jobs, []  # none is left behind by an error
        begun = [(last_round or begin(), done) for _, begin, last_round, done in jobs]
        for total, done in [(last_round(), done) for last_round, done in begun]:
            done.set_result(total.wait())


@dataclass
class _Watch:
    """Hook that raises if backward is about to add to a gradient that has been summed."""

    parameter: weakref.ref[torch.Tensor]
    group: Callable[[], Group]
    summed: bool = False

    def __call__(self, _: torch.Tensor) -> None:
        parameter, summed = self.parameter(), self.summed
        self.summed = False
        if summed and parameter is not None and parameter.grad is not None and parameter.grad.any():
            with checking("sum_hook", self.group()) as where:
                raise ArgumentError(
                    f"{where}the gradient of a parameter of shape {tuple(parameter.shape)} has "
                    "been summed over ranks, and this backward would sum it again. Call "
                    "zero_grad() before; run all micro-batches but the last in ddp.no_sync()."
                )
