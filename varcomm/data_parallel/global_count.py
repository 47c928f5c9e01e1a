"""Divisor of summed gradients if ranks have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from varcomm.errors import ArgumentError
from varcomm.sizes import exact_int
from varcomm.transport.agreement import share
from varcomm.transport.group import Group


class GlobalCount:
    """Number of rows (samples, nodes, tokens) in the losses of all ranks.

    Each rank's loss is a *sum* over its rows. With ``reduce=count``, the sum is the gradient of the
    mean over the rows of all ranks. The number of rows may change in every step.

    See Also
    --------
    sum_gradients, sum_hook

    Notes
    -----
    Each rank calls :meth:`add` for each micro-batch, before gradients are summed, even if the rank
    has no row. ``ShardedGradients.zero_grad()`` drops the counts too. Use one count per call that
    sums gradients. A copy of a count starts at 0.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import GlobalCount, sum_gradients
    >>> def fn(rank):
    ...     torch.manual_seed(0)  # the same parameters on all ranks
    ...     count, model = GlobalCount(), torch.nn.Linear(1, 1, bias=False)
    ...     rows = torch.full((3 * rank, 1), 2.0)  # rank 0 has none
    ...     count.add(len(rows))
    ...     model(rows).sum().backward()
    ...     sum_gradients(model, reduce=count)
    ...     return model.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalCount, ()

    def add(self, rows: int) -> None:
        """Add the number of rows in this rank's part of the loss, or 0.

        Raises ArgumentError if `rows` is not an integer, or negative.
        """
        number = exact_int(rows)
        if number is None or number < 0:
            raise ArgumentError(
                f"GlobalCount.add: rows must be an integer that is not negative; got {rows!r}."
            )
        self._rows += number
        self._added = True

    def local(self) -> tuple[int, int]:
        """Return this rank's rows, and 1 if :meth:`add` was called since the last sum, else 0."""
        return self._rows, int(self._added)

    def reset(self) -> None:
        """Reset the count to 0, after a sum."""
        self._rows, self._added = 0, False


# How the gradients of all ranks become one.
Reduce: TypeAlias = Literal["sum", "mean"] | GlobalCount


def described(reduce: object, where: str = "") -> str:
    """Return the words for `reduce` that ranks compare, or raise ArgumentError."""
    if isinstance(reduce, GlobalCount):
        return "a global count"
    if reduce not in ("sum", "mean"):
        raise ArgumentError(
            f'{where}reduce must be "sum", "mean" or a data_parallel.GlobalCount; got {reduce!r}.'
        )
    return repr(reduce)


def total_rows(counts: Sequence[Sequence[int]], where: str) -> int:
    """Return the rows of all ranks, of which `counts` has :meth:`GlobalCount.local`.

    Raises ArgumentError if a rank has not called ``add``, or if all counts are 0.
    """
    rows, added = map(sum, zip(*counts, strict=True))
    if added < len(counts):
        raise ArgumentError(
            f"{where}on {len(counts) - added} of {len(counts)} ranks GlobalCount.add was not "
            "called for the gradients that are to be divided. Call count.add(rows) on every rank "
            "for each backward(), with 0 if a rank has no rows."
        )
    if not rows:
        raise ArgumentError(
            f"{where}all ranks have counted 0 rows, and gradients cannot be divided by 0. Leave "
            "out this sum on all ranks."
        )
    return rows


def divisor_of(reduce: Reduce, group: Group, name: str) -> int:
    """Return the divisor of a sum, and reset a count; collective for a count, errors as above."""
    if not isinstance(reduce, GlobalCount):
        return group.size if reduce == "mean" else 1
    counts = share(name, reduce.local, group)
    reduce.reset()
    return total_rows(counts, f"{name} on {group}: ")
