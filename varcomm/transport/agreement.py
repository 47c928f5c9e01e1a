"""Agreement between ranks: all raise the same error, or none does.

Set-up always agrees. Hot calls agree inside :func:`varcomm.debug`, because it costs a round of
messages per call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from varcomm import errors
from varcomm.errors import ArgumentError, CommunicationError, DisagreementError, VarcommError
from varcomm.transport.announce import all_gather_object
from varcomm.transport.debug import debug, debug_timeout, debugging
from varcomm.transport.engine import EngineFailure, is_simulated
from varcomm.transport.failure import explained, leave
from varcomm.transport.group import Group
from varcomm.transport.last_seen import (
    brief,
    leave_note,
    members,
    notes,
    spans,
    table,
    user_line,
)
from varcomm.transport.serialization import from_bytes, to_bytes

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

# Kinds of errors that ranks name to each other.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, VarcommError)
}


def agree(what: str, local: Callable[[], T], group: Group) -> T:
    """Run `local` on every rank and return this rank's result, or raise on all; collective.

    If `local` raises on one rank, every rank raises the same message: an error of the kind that the
    first failing rank raised, or an ArgumentError if that is no error of varcomm.
    """
    return agree_and_share(what, local, lambda _: None, group)[0]


def share(what: str, local: Callable[[], T], group: Group) -> list[T]:
    """Run `local` on every rank and return all results in rank order, or raise on all."""
    return agree_and_share(what, local, lambda value: value, group)[1]


def agree_and_share(
    what: str, local: Callable[[], T], public: Callable[[T], S], group: Group
) -> tuple[T, list[S]]:
    """Run `local` on every rank; return its result here, and ``public(result)`` of every rank.

    One round of messages; raises as :func:`agree` does.
    """
    failure: Exception | None = None
    call: dict[str, Any] = {"operation": what, "is set-up": True}
    try:
        value = local()
        call["value"] = to_bytes(public(value)).decode()
    except Exception as error:
        failure = error
        call |= {"error": str(error), "kind": _kind(error)}
    calls = _gathered(call, group)
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
        agreed.on_all_ranks = True
        raise agreed from failure
    _require_equal(group, ["operation"], calls)
    return value, [from_bytes(other["value"].encode()) for other in calls]


def on_all_ranks(error: BaseException) -> bool:
    """Return whether all ranks of the group raise this error."""
    return getattr(error, "on_all_ranks", False)


def _kind(error: Exception) -> str:
    """Return the first of varcomm's own kinds that an error belongs to."""
    own = (kind for kind in type(error).__mro__ if kind.__module__ == VarcommError.__module__)
    return next(own, ArgumentError).__name__


def compare(group: Group, call: Mapping[str, Any]) -> int:
    """Raise on every rank if the ranks describe a call differently; collective.

    `call` maps words to plain values. ``"operation"`` and all others must be equal on all ranks,
    except ``"send"`` and ``"recv"``, counts per peer: a rank sends as many as its peer expects.
    Returns the number of the call on the first rank; 0 outside :func:`varcomm.debug`.
    """
    calls = _gathered(dict(call), group)
    if any("error" in other for other in calls):
        raise _not_called(group, calls)
    _require_equal(group, ["operation"], calls)  # a difference here explains all others
    _require_equal(group, [word for word in call if word not in ("send", "recv")], calls)
    number: int = calls[0].get("number", 0)
    if "send" not in call or is_simulated(group):
        return number
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if sender["send"][j] != receiver["recv"][i]:
                raise DisagreementError(
                    f"{call['operation']}: rank {i} sends {sender['send'][j]} rows to rank {j}, "
                    f"which expects {receiver['recv'][i]}.{_rows(group, ['send', 'recv'], calls)}"
                )
    return number


def fail(group: Group, operation: str, error: Exception) -> None:
    """Report to ranks in :func:`compare` that this rank cannot take part; collective."""
    compare(group, {"operation": operation, "error": str(error)})


def _not_called(group: Group, calls: Sequence[Mapping[str, Any]]) -> DisagreementError:
    """Return the error of a hot call in which some ranks cannot take part."""
    failed = [f"rank {rank}: {c['error']}" for rank, c in enumerate(calls) if "error" in c]
    operation = next(c["operation"] for c in calls if "error" in c)
    return DisagreementError(
        f"{operation}: not called, since on {'; on '.join(failed)}{_rows(group, [], calls)}"
    )


def _gathered(call: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """Return the calls of all ranks; inside debug(), name the ranks that do not come."""
    if not debugging():
        with explained(call["operation"], group):
            return all_gather_object(call, group)
    if group.given_up:
        raise CommunicationError(
            f"{call['operation']}: this group has been given up: {group.given_up}"
        )
    group.compared_calls += 1
    call |= {"number": group.compared_calls, "at": user_line()}
    here = {"group": group.name, "call": call["number"]}
    ranks = {"of ranks": spans(group.ranks)}
    leave_note(here | ranks | {"operation": call["operation"], "at": call["at"], "left with": ""})
    began = time.monotonic()
    try:
        return all_gather_object(call, group, debug_timeout())
    except EngineFailure as error:
        after = time.monotonic() - began
        group.given_up = _absent(call["operation"], here, group, after, error)
        # a rank that comes later must not take what is in flight for another call
        leave_note(_given_up(here))
        leave(group)
        raise CommunicationError(group.given_up) from error.__cause__


def _given_up(here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a rank that has stopped to wait."""
    return {"gave up": f"{here['group']} {here['call']}"}


def _absent(
    what: str, here: Mapping[str, Any], group: Group, after: float, error: RuntimeError
) -> str:
    """Return a message that names the ranks missing in a call, and the last place of all ranks."""
    found, _ = notes(group)
    missing = [rank for rank, note in enumerate(found) if not here.items() <= note.items()]
    gone = [rank for rank, note in enumerate(found) if _given_up(here).items() <= note.items()]
    have = "rank {} has" if len(missing or gone) == 1 else "ranks {} have"
    if gone and not missing:
        reason = f"{have.format(spans(gone))} given up waiting for this rank in"
    else:
        absent = have.format(spans(missing)) if missing else "a rank has"
        reason = f"{absent} not come within {after:.1f} s to"
    # the name of a group matters only if another group has the same ranks
    lists = {note.get("of ranks") for note in found}
    hidden = {"gave up"}
    if len({note.get("group") for note in found}) <= len(lists):
        hidden.add("group")
    nothing = {"at": "no note: is it inside varcomm.debug?"}
    rows = ({w: note[w] for w in note if w not in hidden} or nothing for note in found)
    return (
        f"{what} on {group}: {reason} call {here['call']} of the group inside varcomm.debug "
        f"({brief(error)}).{_numbering(group)} Where ranks were last:\n"
        f"{table(rows)}\n"
        "If a rank is only slow, raise the timeout: varcomm.debug(timeout=...), "
        "VARCOMM_DEBUG_TIMEOUT."
    )


def _numbering(group: Group) -> str:
    """Return a sentence that names the world ranks of the group, if they differ."""
    return "" if group.ranks == tuple(range(group.size)) else f" {members(group)}"


def _rows(group: Group, words: Sequence[str], calls: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the calls, if they have lines."""
    if not all("at" in call for call in calls):
        return _numbering(group)
    shown = dict.fromkeys(("operation", *words, "at"))
    rows = table({word: call.get(word, "none") for word in shown} for call in calls)
    return f"{_numbering(group)}\n{rows}"


def _require_equal(group: Group, words: Iterable[str], calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks differ in any of these words; the message starts with the first."""
    values = {word: [call.get(word, "none") for call in calls] for word in words}
    differing = [word for word, row in values.items() if any(v != row[0] for v in row)]
    if not differing:
        return
    first = differing[0]
    each = "; ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values[first]))
    operation = f"{calls[0]['operation']}: " if first != "operation" else ""
    raise DisagreementError(
        f"{operation}ranks disagree on {first}: {each}.{_rows(group, differing, calls)}"
    )
