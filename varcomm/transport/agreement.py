"""Agreement between ranks: all raise the same error, or none does.

Set-up work always agrees. Hot calls do so only inside :func:`debug`, since it costs a round of
messages each time.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from varcomm import errors
from varcomm.errors import ArgumentError, CommunicationError, DisagreementError, VarcommError
from varcomm.transport.engine import EngineFailure
from varcomm.transport.engines import peers_answer
from varcomm.transport.failure import explained, leave
from varcomm.transport.group import Group
from varcomm.transport.objects import all_gather_object
from varcomm.transport.serialization import from_bytes, to_bytes
from varcomm.transport.timeout import seconds
from varcomm.transport.whereabouts import brief, leave_note, members, notes, spans, table, user_line

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

# Of the calls that this rank has compared, in each group.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]] = weakref.WeakKeyDictionary()

# What was said of each group in which a rank did not come.
_lost: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

# What other ranks may say that they raised.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, VarcommError)
}

# At an error that all ranks raise.
_EVERYWHERE = "_varcomm_on_all_ranks"

# How long ranks wait for each other, of each debug() block that is open, which threads may leave in
# another order. Backward runs in threads of its own and must see it too.
_limits: dict[object, float] = {}

_LIMIT = 30.0  # seconds

# Values of VARCOMM_DEBUG.
_OFF = {"", "0", "false", "no", "off"}


@contextmanager
def debug(timeout: float | timedelta = _LIMIT) -> Iterator[None]:
    """Compare every call between ranks before its data moves, in forward and in backward.

    All ranks of a group enter it together; then ranks that call different operations, or the same
    one with dims, sizes, dtypes, shapes or ``requires_grad`` that do not fit, all raise one
    :class:`~varcomm.errors.DisagreementError` that names them and the lines of their programs, in
    place of a hang; so do all where one rank's own arguments are wrong. Where a rank does not come,
    the others say after `timeout` where it was last. Setting ``VARCOMM_DEBUG=1`` does this for a
    whole program, with ``VARCOMM_DEBUG_TIMEOUT`` in seconds.

    Parameters
    ----------
    timeout : float or timedelta
        Seconds for which ranks wait for each other before a call. What a rank computes between two
        calls may not take longer than on others by more than this.

    Raises
    ------
    ArgumentError
        If `timeout` is not a positive number or timedelta.
    CommunicationError
        Inside, on ranks that have waited for one that did not come.

    Notes
    -----
    After a DisagreementError the group can be used. After a CommunicationError it cannot: the rank
    that did not come may still come, to what others have given up, and raises it as well.

    Communication: a round of messages before each call, about 1 KiB a rank, and a note in the
    store by which ranks have met.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     try:
    ...         with varcomm.debug():
    ...             varcomm.all_gather_v(torch.zeros(2, 3 + rank), [2, 2])
    ...     except varcomm.DisagreementError as error:
    ...         return str(error)
    >>> print(varcomm.launch(fn, 2)[0].splitlines()[0])
    all_gather_v: ranks disagree on shape of a row: rank 0 has [3]; rank 1 has [4].
    """
    block = object()
    _limits[block] = seconds(timeout)
    try:
        yield
    except BaseException as error:
        if not (on_all_ranks(error) or isinstance(error, CommunicationError)):
            leave_note({"left with": f"{type(error).__name__}: {brief(error)}"})
        raise
    finally:
        del _limits[block]


def debugging() -> bool:
    """Return whether calls are to be compared."""
    return bool(_limits) or os.environ.get("VARCOMM_DEBUG", "").lower() not in _OFF


def _limit() -> float:
    """Return for how many seconds ranks wait for each other inside of :func:`debug`."""
    if limits := list(_limits.values()):
        return limits[-1]
    given = os.environ.get("VARCOMM_DEBUG_TIMEOUT") or str(_LIMIT)
    try:
        return seconds(float(given))
    except ValueError:
        raise ArgumentError(
            f"VARCOMM_DEBUG_TIMEOUT must be a positive number of seconds; got {given!r}."
        ) from None


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
    call: dict[str, Any] = {"operation": what, "is set-up": True}
    try:
        value = local()
        call["told"] = to_bytes(tell(value)).decode()
    except Exception as error:
        failure = error
        call |= {"error": str(error), "kind": _kind(error).__name__}
    calls = _told(call, group)
    if failures := [rank for rank, other in enumerate(calls) if "error" in other]:
        if not all("is set-up" in other for other in calls):
            raise _not_called(group, calls) from failure
        first, *others = failures
        kind = _KINDS.get(calls[first].get("kind", ""), DisagreementError)
        also = f" (and on {len(others)} more: {others})" if others else ""
        agreed = kind(
            f"{calls[first]['operation']}: refused on rank {first} of {group.size}{also}: "
            f"{calls[first]['error']}{_rows(group, [], calls)}"
        )
        setattr(agreed, _EVERYWHERE, True)
        raise agreed from failure
    _same(group, ["operation"], calls)
    return value, [from_bytes(other["told"].encode()) for other in calls]


def on_all_ranks(error: BaseException) -> bool:
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
    Returns the call's number in the group, that of the first rank; 0 where nothing is numbered.
    """
    calls = _told(dict(call), group)
    if any("error" in other for other in calls):
        raise _not_called(group, calls)
    _same(group, ["operation"], calls)  # where it differs, nothing else needs to be said
    _same(group, [word for word in call if word not in ("send", "recv")], calls)
    number: int = calls[0].get("number", 0)
    if not peers_answer(group):  # of whose counts nothing is known
        return number
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if "send" in sender and sender["send"][j] != receiver["recv"][i]:
                raise DisagreementError(
                    f"{call['operation']}: rank {i} sends {sender['send'][j]} rows to rank {j}, "
                    f"which expects {receiver['recv'][i]}.{_rows(group, ['send', 'recv'], calls)}"
                )
    return number


def _not_called(group: Group, calls: Sequence[Mapping[str, Any]]) -> DisagreementError:
    """Return the error where a rank could not take part, and others are in a hot call."""
    failed = [f"rank {rank}: {c['error']}" for rank, c in enumerate(calls) if "error" in c]
    operation = next(c["operation"] for c in calls if "error" in c)
    return DisagreementError(
        f"{operation}: not called, since on {'; on '.join(failed)}{_rows(group, [], calls)}"
    )


def _told(call: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """Return what all ranks tell of their calls, or say which have not come."""
    if not debugging() or not peers_answer(group):
        with explained(call["operation"], group):
            return all_gather_object(call, group)
    if why := _lost.get(group.process_group):
        raise CommunicationError(f"{call['operation']}: this group has been given up: {why}")
    call["number"] = next(_numbers.setdefault(group.process_group, count(1)))
    call["at"] = user_line()
    here = {"group": group.name, "call": call["number"]}
    leave_note(
        {
            **here,
            "of ranks": spans(group.ranks),
            "operation": call["operation"],
            "at": call["at"],
            "left with": "",
        }
    )
    try:
        limit = _limit()
    except ArgumentError as error:  # of this rank alone, maybe: others hear of it
        limit, call = _LIMIT, call | {"error": str(error), "kind": _kind(error).__name__}
    began = time.monotonic()
    try:
        return all_gather_object(call, group, timedelta(seconds=limit))
    except EngineFailure as error:
        after = time.monotonic() - began
        told = _absent(call["operation"], here, group, after, error)
        _lost[group.process_group] = told
        # A rank that comes later must hear of it, and not take what is sent for another call.
        leave_note(_given_up(here))
        leave(group)
        raise CommunicationError(told) from error.__cause__


def _given_up(here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a rank that has not waited any longer."""
    return {"gave up": f"{here['group']} {here['call']}"}


def _absent(
    what: str, here: Mapping[str, Any], group: Group, after: float, error: RuntimeError
) -> str:
    """Say which ranks have not come to a call, and where all were last."""
    found, _ = notes(group)
    missing = [rank for rank, note in enumerate(found) if not here.items() <= note.items()]
    gone = [rank for rank, note in enumerate(found) if _given_up(here).items() <= note.items()]
    have = "rank {} has" if len(missing or gone) == 1 else "ranks {} have"
    if gone and not missing:
        said = f"{have.format(spans(gone))} given up waiting for this rank in"
    else:
        who = have.format(spans(missing)) if missing else "somebody has"
        said = f"{who} not come within {after:.1f} s to"
    # its name says something only where another group has the same ranks
    lists = {note.get("of ranks") for note in found}
    unsaid = {"gave up"}
    if len({note.get("group") for note in found}) <= len(lists):
        unsaid.add("group")
    nothing = {"at": "nothing told: is it inside varcomm.debug?"}
    rows = ({w: note[w] for w in note if w not in unsaid} or nothing for note in found)
    return (
        f"{what} on {group}: {said} call {here['call']} of the group inside varcomm.debug "
        f"({brief(error)}).{_numbered(group)} Where ranks were last:\n"
        f"{table(rows)}\n"
        "A rank that only takes longer may: varcomm.debug(timeout=...), VARCOMM_DEBUG_TIMEOUT."
    )


def _numbered(group: Group) -> str:
    """Say which ranks of the world a message means, where it does not number them so."""
    return "" if group.ranks == tuple(range(group.size)) else f" {members(group)}"


def _rows(group: Group, words: Sequence[str], calls: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what ranks say, if they say where they are."""
    if not all("at" in call for call in calls):
        return _numbered(group)
    shown = dict.fromkeys(("operation", *words, "at"))
    rows = table({word: call.get(word, "none") for word in shown} for call in calls)
    return f"{_numbered(group)}\n{rows}"


def _same(group: Group, words: Iterable[str], calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks differ in any of these words; the message starts with the first."""
    told = {word: [call.get(word, "none") for call in calls] for word in words}
    differing = [word for word, values in told.items() if any(v != values[0] for v in values)]
    if not differing:
        return
    first = differing[0]
    said = "; ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(told[first]))
    operation = f"{calls[0]['operation']}: " if first != "operation" else ""
    raise DisagreementError(
        f"{operation}ranks disagree on {first}: {said}.{_rows(group, differing, calls)}"
    )


def fail(group: Group, operation: str, error: Exception) -> None:
    """Tell ranks that are in :func:`compare` that this one cannot take part; collective."""
    compare(group, {"operation": operation, "error": str(error)})
