"""Agreement between ranks: all raise the same error, or none does.

Set-up work always agrees. Hot calls do so only inside :func:`debug`, since it costs a round of
messages each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from varcomm.errors import ArgumentError, DisagreementError, VarcommError
from varcomm.transport.engines import peers_answer
from varcomm.transport.group import Group
from varcomm.transport.objects import all_gather_object

__all__ = [
    "agree",
    "agree_and_share",
    "compare",
    "debug",
    "debugging",
    "fail",
    "on_all_ranks",
    "share",
]

T = TypeVar("T")
S = TypeVar("S")

# Of the calls that this rank has compared; the group's first rank gives a call its number.
_numbers = count()

# At an error that all ranks raise.
_EVERYWHERE = "_varcomm_on_all_ranks"

# How many debug() blocks are open. Backward runs in threads of its own and must see it too.
_depth = 0


@contextmanager
def debug() -> Iterator[None]:
    """Compare every call between ranks before its data moves, in forward and in backward.

    All ranks of a group enter it together; then ranks that call different operations, or the same
    one with dims, sizes, dtypes, shapes or ``requires_grad`` that do not fit, all raise one
    :class:`~varcomm.errors.DisagreementError` that names them, in place of a hang; so do all where
    one rank's own arguments are wrong. Setting ``VARCOMM_DEBUG=1`` does this for a whole program.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     try:
    ...         with varcomm.debug():
    ...             varcomm.all_gather_v(torch.zeros(2, 3 + rank), [2, 2])
    ...     except varcomm.DisagreementError as error:
    ...         return str(error)
    >>> print(varcomm.launch(fn, 2)[0])
    all_gather_v: ranks disagree on shape of a row: rank 0 has [3]; rank 1 has [4].
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def debugging() -> bool:
    """Return whether calls are to be compared."""
    return _depth > 0 or os.environ.get("VARCOMM_DEBUG", "") not in ("", "0")


def agree(what: str, local: Callable[[], T], group: Group) -> T:
    """Run `local` on every rank and return this rank's result, or raise on all; collective.

    Raises
    ------
    VarcommError
        On every rank with the same message, if one of them raised: of the kind that the first of
        them raised, or an ArgumentError where that was no error of varcomm's.
    """
    return agree_and_share(what, local, lambda _: None, group)[0]


def share(what: str, local: Callable[[], T], group: Group) -> list[T]:
    """Run `local` on every rank and return all results in rank order, or raise on all."""
    return agree_and_share(what, local, lambda value: value, group)[1]


def agree_and_share(
    what: str, local: Callable[[], T], tell: Callable[[T], S], group: Group
) -> tuple[T, list[S]]:
    """Run `local` on every rank and return its result, and what each rank tells of its own.

    One round of messages; raises as :func:`agree` does.
    """
    failure: Exception | None = None
    call: dict[str, Any] = {"operation": what}
    try:
        value = local()
        call["told"] = tell(value)
    except Exception as error:
        failure = error
        call |= {"error": str(error), "kind": _kind(error)}
    calls = all_gather_object(call, group)
    if failures := [rank for rank, other in enumerate(calls) if "error" in other]:
        first, *others = failures
        kind = calls[first].get("kind", DisagreementError)
        also = f" (and on {len(others)} more: {others})" if others else ""
        agreed = kind(
            f"{what}: refused on rank {first} of {group.size}{also}: {calls[first]['error']}"
        )
        setattr(agreed, _EVERYWHERE, True)
        raise agreed from failure
    _same("operation", calls)
    return value, [other["told"] for other in calls]


def on_all_ranks(error: Exception) -> bool:
    """Tell whether ranks have agreed on an error, so that all of them raise it."""
    return isinstance(error, DisagreementError) or getattr(error, _EVERYWHERE, False)


def _kind(error: Exception) -> type[VarcommError]:
    # of varcomm's own kinds, which a message is enough to make, and which every rank has
    own = (kind for kind in type(error).__mro__ if kind.__module__ == VarcommError.__module__)
    return next(own, ArgumentError)


def compare(group: Group, call: Mapping[str, Any]) -> int:
    """Raise on every rank if the ranks' descriptions of a call do not fit; collective.

    `call` maps words to plain values. ``"operation"`` and all others must be equal on all ranks,
    but for ``"send"`` and ``"recv"``, counts a peer: what a rank sends is what its peer expects.
    Returns a number for the call, the same on all ranks.
    """
    calls = all_gather_object({**call, "number": next(_numbers)}, group)
    failed = [f"rank {rank}: {text}" for rank, c in enumerate(calls) if (text := c.get("error"))]
    if failed:
        raise DisagreementError(f"{call['operation']}: not called, since on {'; on '.join(failed)}")
    _same("operation", calls)  # where it differs, nothing else needs to be said
    for word in call:
        if word not in ("operation", "send", "recv"):
            _same(word, calls)
    if not peers_answer(group):  # of whose counts nothing is known
        return calls[0]["number"]  # type: ignore[no-any-return]
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if "send" in sender and sender["send"][j] != receiver["recv"][i]:
                raise DisagreementError(
                    f"{call['operation']}: rank {i} sends {sender['send'][j]} rows to rank {j}, "
                    f"which expects {receiver['recv'][i]}."
                )
    return calls[0]["number"]  # type: ignore[no-any-return]


def _same(word: str, calls: list[dict[str, Any]]) -> None:
    values = [call.get(word, "none") for call in calls]
    if any(value != values[0] for value in values):
        said = "; ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
        operation = f"{calls[0]['operation']}: " if word != "operation" else ""
        raise DisagreementError(f"{operation}ranks disagree on {word}: {said}.")


def fail(group: Group, operation: str, error: Exception) -> None:
    """Tell ranks that are in :func:`compare` that this one cannot take part; collective."""
    compare(group, {"operation": operation, "error": str(error)})
