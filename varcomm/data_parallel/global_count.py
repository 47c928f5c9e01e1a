"""By how much summed gradients are divided where ranks have different numbers of rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import torch

from varcomm.data_parallel.bucket_sum import BucketSum
from varcomm.errors import ArgumentError
from varcomm.sizes import exact_int
from varcomm.transport.group import Group

__all__ = ["CountSum", "GlobalCount", "Reduce", "User", "described", "missing"]


class GlobalCount:
    """How many rows (samples, nodes, tokens) the losses of all ranks are sums of.

    Each rank's loss is a *sum* over its rows; with ``replicate(model, reduce=count)``, or with
    ``ShardedGradients(..., reduce=count)``, the gradients are those of the mean over the rows of
    all ranks, whose number may change with every step. The counts travel with the gradients.

    Notes
    -----
    Each rank calls :meth:`add` before each ``backward()``, also where it has no row. In
    :func:`varcomm.data_parallel.no_sync`, or that of a ``ShardedGradients``, counts add up as
    gradients do, and go with them: where ``zero_grad()`` drops all the gradients that are not
    summed yet, what was counted for them is dropped too. Modules that do not always run backward
    together need a count each.

    What was added before a backward that fails stays, if that did not get as far as to the module:
    then it is counted for the next one as well. ``replicate``, called anew for the same module,
    forgets it. After a backward that was refused since a rank had not called :meth:`add`, what was
    added for that one alone is gone.

    A reentrant checkpoint around the module is a backward of its own, of which each needs a count;
    ``checkpoint(..., use_reentrant=False)`` makes one of all. A copy of a count counts from 0, for
    nobody as yet.

    Parameters in several groups are divided once, by what was counted in all groups to which they
    and the parameters beside them were given with the same count.

    Communication: 16 bytes beside the gradients of each backward.

    In one process: the loss divided by how many rows it is a sum of.

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
        self.forget()
        # of gradients of earlier backwards that are not summed yet
        self._held, self._held_added = 0, False
        # whose gradients are divided by it
        self.users: weakref.WeakSet[User] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalCount, ()

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

    def forget(self) -> None:
        """Forget what was added for the next backward."""
        self._count, self._added = 0, False

    def begin(self) -> None:
        """Know that a backward begins: what is held for gradients that were dropped is dropped."""
        if self._held_added and not any(user.has_unsummed() for user in self.users):
            self._held, self._held_added = 0, False

    def hold(self) -> None:
        """Keep what was added for a backward that has not summed with its gradients."""
        self._held += self._count
        self._held_added |= self._added
        self.forget()

    def take(self) -> torch.Tensor:
        """Return what this rank has counted and whether it has; what is held stays so."""
        told = torch.tensor([self._count + self._held, int(self._added or self._held_added)])
        self.forget()
        return told

    def summed(self) -> None:
        """Know that there are no gradients any more for which something is held."""
        self._held, self._held_added = 0, False


class User(Protocol):
    """Whose gradients are divided by a count."""

    @property
    def count(self) -> GlobalCount | None:
        """What that is."""

    def has_unsummed(self) -> bool:
        """Return whether it has gradients of earlier backwards that are to be summed."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError."""


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
        if (wrong := missing(total, added, ranks)) is not None:
            raise ArgumentError(where + wrong)
        return total


def missing(total: int, added: int, ranks: int) -> str | None:
    """Return why nothing can be divided by what ranks have counted, of which some have added."""
    if added < ranks:
        return (
            f"on {ranks - added} of {ranks} ranks GlobalCount.add was not called before this "
            "backward, by which gradients are to be divided. Call count.add(rows) on every rank "
            "before backward(), with 0 where a rank has no rows. A reentrant checkpoint around the "
            "module has a backward of its own: use checkpoint(..., use_reentrant=False)."
        )
    if total == 0:
        return (
            "all ranks have counted 0 rows, and gradients cannot be divided by that. Leave out "
            "this backward on all ranks."
        )
    return None
