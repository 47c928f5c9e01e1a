"""By how much summed gradients are divided where ranks have different numbers of rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from varcomm.data_parallel.bucket_sum import BucketSum
from varcomm.errors import ArgumentError
from varcomm.layout import exact_int
from varcomm.transport.group import Group

if TYPE_CHECKING:
    from varcomm.data_parallel.replica import Replica

__all__ = ["CountSum", "GlobalCount", "Reduce", "described"]


class GlobalCount:
    """How many rows (samples, nodes, tokens) the losses of all ranks are sums of.

    Each rank's loss is a *sum* over its rows; with ``replicate(model, reduce=count)`` the gradients
    are those of the mean over the rows of all ranks, whose number may change with every step. The
    counts travel with the gradients.

    Notes
    -----
    Each rank calls :meth:`add` before each ``backward()``, also where it has no row. What was added
    since the last backward that summed belongs to the next one that does: in
    :func:`varcomm.data_parallel.no_sync` counts add up as gradients do. Modules that do not always
    run backward together need a count each.

    Parameters in several groups are divided once, by what was counted in all groups to which they
    and the parameters beside them were given with the same count.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import GlobalCount, replicate
    >>> def fn(rank):
    ...     count = GlobalCount()
    ...     model = replicate(torch.nn.Linear(1, 1, bias=False), reduce=count)
    ...     rows = torch.full((3 * rank, 1), 2.0)  # rank 0 has none
    ...     count.add(len(rows))
    ...     model(rows).sum().backward()
    ...     return model.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._count, self._added = 0, False
        # whose gradients are divided by it
        self.users: weakref.WeakSet[Replica] = weakref.WeakSet()

    def add(self, rows: int) -> None:
        """Count the rows of this rank's part of the loss of the next backward; 0 if it has none.

        Raises
        ------
        ArgumentError
            If `rows` is no integer, or negative.
        """
        number = exact_int(rows)
        if number is None or number < 0:
            raise ArgumentError(
                f"GlobalCount.add: rows must be an integer that is not negative; got {rows!r}."
            )
        self._count += number
        self._added = True

    def take(self) -> torch.Tensor:
        """Return what this rank has counted and whether it has, and begin anew."""
        told = torch.tensor([self._count, int(self._added)])
        self._count, self._added = 0, False
        return told


# What is made of the gradients of all ranks.
Reduce: TypeAlias = Literal["sum", "mean"] | GlobalCount


def described(reduce: object, where: str = "") -> str:
    """Return what ranks compare of `reduce`, or raise ArgumentError if it is none."""
    if isinstance(reduce, GlobalCount):
        return "a global count"
    if reduce not in ("sum", "mean"):
        raise ArgumentError(
            f'{where}reduce must be "sum", "mean" or a data_parallel.GlobalCount; got {reduce!r}.'
        )
    return repr(reduce)


class CountSum:
    """The total of a :class:`GlobalCount`, under way; 16 bytes of each rank, exact.

    Parameters
    ----------
    told : torch.Tensor
        What :meth:`GlobalCount.take` has returned.
    groups : sequence of Group
        Over which it is summed, one after the other; over the first it is begun now.
    """

    def __init__(self, told: torch.Tensor, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._total: int | None = None
        self._sum = BucketSum(told.to(groups[0].device()), groups[0])

    def wait(self, where: str) -> int:
        """Return the total; `where` is how messages start.

        Raises
        ------
        ArgumentError
            On every rank alike, if a rank has counted nothing, not even 0, or all have counted 0.
        """
        if self._total is None:
            self._total = self._checked(where)
        return self._total

    def _checked(self, where: str) -> int:
        ranks = self._groups[0].size
        self._sum.begin_second_round()
        for group in self._groups[1:]:
            self._sum = BucketSum(self._sum.wait(), group)
            self._sum.begin_second_round()
            ranks *= group.size
        total, added = (int(number) for number in self._sum.wait().tolist())
        if added < ranks:
            raise ArgumentError(
                f"{where}on {ranks - added} of {ranks} ranks GlobalCount.add was not called before "
                "this backward, by which gradients are to be divided. Call count.add(rows) on "
                "every rank before backward(), with 0 where a rank has no rows."
            )
        if total == 0:
            raise ArgumentError(
                f"{where}all ranks have counted 0 rows, and gradients cannot be divided by that. "
                "Leave out this backward on all ranks."
            )
        return total
