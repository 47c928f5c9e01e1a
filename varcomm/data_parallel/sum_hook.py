"""Communication hook by which ``DistributedDataParallel`` sums gradients in place of averaging."""

# Without "from __future__ import annotations": torch compares the hook's annotations with types.

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from varcomm.data_parallel.buckets import BucketSum
from varcomm.data_parallel.global_count import GlobalCount, Reduce, described, summed_rows
from varcomm.errors import ArgumentError
from varcomm.ops.operator import checking
from varcomm.transport.agreement import debugging
from varcomm.transport.auxiliary_group import weakly
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["sum_hook"]


def sum_hook(
    state: GroupLike | tuple[GroupLike, Reduce], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over ranks, for ``DistributedDataParallel``.

    ``ddp.register_comm_hook(group, sum_hook)`` leaves the sum over ranks in each ``grad``, in place
    of the average: the gradient of a loss of which each rank computes a part.
    ``ddp.register_comm_hook((group, count), sum_hook)`` divides the sum by the rows of a
    :class:`GlobalCount`, and ``(group, "mean")`` by the number of ranks.

    Parameters
    ----------
    state : ProcessGroup, DeviceMesh or None, or a pair of that and "sum", "mean" or a GlobalCount
        The group that was given to the ``DistributedDataParallel``, which hooks cannot check; None
        is the whole world.
    bucket : torch.distributed.GradBucket
        Passed by ``DistributedDataParallel``.

    Returns
    -------
    torch.futures.Future
        Of the sum, in the shape and dtype of the bucket; done in the hook of the last bucket.

    Raises
    ------
    ArgumentError
        In backward, if a parameter has a gradient that was summed before and is not zero, if
        `state` is something else, if a rank has counted nothing or all have counted 0, or if two
        modules share a count. A ``DistributedDataParallel`` cannot be used after such an error.

    Notes
    -----
    Run all micro-batches but the last in ``ddp.no_sync()``, and call ``zero_grad()`` before the
    next. A model that communicates by itself should have a group to itself: pass
    ``dist.new_group()`` to ``DistributedDataParallel`` and here. If such a model leaves out
    parameters on some ranks, use :func:`sum_gradients`.

    Communication: as in :func:`sum_gradients`, begun when the bucket is full; the second round
    begins with the last bucket. Floats narrower than 4 bytes travel narrow and are summed in fp32.

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
    group, reduce = state if isinstance(state, tuple) else (state, "sum")
    ranks = resolve(group)
    sums: _Sums = ranks.auxiliary.setdefault("sum_hook", _Sums())
    with checking("sum_hook", ranks) as where:
        described(reduce, where)
        if bucket.index() == 0:
            sums.begin(bucket.parameters()[0], reduce, where)
    for parameter in bucket.parameters():
        sums.watch(parameter, ranks)
    values = bucket.buffer()
    on: list[int | str | torch.device] = [values.device] if values.is_cuda else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on)
    # comparing blocks, and ranks may be at other places of their backward
    begun = None if debugging() else BucketSum(values, ranks)
    sums.jobs.append((reduce, lambda: begun or BucketSum(values, ranks), future))
    if bucket.is_last():
        sums.finish(reduce, ranks)
    return future


class _Sums:
    """Sums over one group in the backward that runs, and the parameters that were summed.

    Modules in one backward have a GlobalCount each, which names the buckets of one module.
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[Reduce, Callable[[], BucketSum], torch.futures.Future[Any]]] = []
        self._begun: list[tuple[torch.Tensor, Reduce]] = []
        self._watched: dict[int, _Watch] = {}

    def begin(self, first: torch.Tensor, reduce: Reduce, where: str) -> None:
        """Begin the sums of one DistributedDataParallel, which has `first` in its first bucket."""
        if any(other is first for other, _ in self._begun):
            self.jobs, self._begun = [], []  # an earlier backward has failed
        if isinstance(reduce, GlobalCount) and any(other is reduce for _, other in self._begun):
            raise ArgumentError(
                f"{where}two DistributedDataParallel in one backward have the same GlobalCount, "
                "of which the first has taken the rows. Give each its own."
            )
        self._begun.append((first, reduce))

    def finish(self, reduce: Reduce, group: Group) -> None:
        """Complete the sums that have begun with `reduce`."""
        jobs = [job for job in self.jobs if job[0] == reduce]
        self.jobs = [job for job in self.jobs if job[0] != reduce]
        self._begun = [one for one in self._begun if one[1] != reduce]
        sums = [(begun(), future) for _, begun, future in jobs]
        divisor = group.size if reduce == "mean" else 1
        if isinstance(reduce, GlobalCount):
            divisor = summed_rows(reduce, group, "sum_hook")
        for total, _ in sums:
            total.begin_second_round(divisor)
        for total, future in sums:
            future.set_result(total.wait())

    def watch(self, parameter: torch.Tensor, group: Group) -> None:
        """Note that a gradient is summed now, and refuse to sum it again."""
        watch = self._watched.get(id(parameter))
        if watch is None or watch.parameter() is not parameter:
            watch = self._watched[id(parameter)] = _Watch(weakref.ref(parameter), weakly(group))
            parameter.register_hook(watch)
        watch.summed = True


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
