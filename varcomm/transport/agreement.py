"""Agreement between ranks: all raise the same error, or none does.

Set-up always agrees. Hot calls agree before they start inside :func:`varcomm.debug`, because it
costs a round of messages per call; else at the next sum over ranks (:mod:`varcomm.ops.carried`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from math import inf
from typing import Any, TypeVar

import numpy as np
import torch

import varcomm.errors as errors
from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError, CommunicationError, DisagreementError, VarcommError
from varcomm.transport import failure
from varcomm.transport.call_log import RECORDED
from varcomm.transport.debug import debug as debug
from varcomm.transport.debug import debug_timeout
from varcomm.transport.debug import debugging as debugging
from varcomm.transport.engine import NO_LIMIT, EngineFailure, Route, broadcast_route, wait_for
from varcomm.transport.engines.choose import prepared
from varcomm.transport.failure import explained
from varcomm.transport.group import Group
from varcomm.transport.notes import brief, leave_note, notes, user_line
from varcomm.transport.serialization import from_bytes, to_bytes

T = TypeVar("T")
S = TypeVar("S")

# Bytes of the first message of each rank, of which some hold the length of its value. Most
# agreements fit; a second message carries the rest.
_LENGTH, _HEAD = 1024, 8

Calls = Sequence[Mapping[str, Any]]

# Kinds of errors that ranks name to each other.
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, VarcommError)
}


def agree(what: str, local: Callable[[], T], group: Group) -> T:
    """Run `local` on every rank and return this rank's result, or raise on all; collective.

    All ranks raise the error of the first failing rank, or an ArgumentError if varcomm did not
    raise that error.
    """
    return agree_and_share(what, local, lambda _: None, group)[0]


def share(what: str, local: Callable[[], T], group: Group) -> list[T]:
    """Run `local` on every rank and return all results in rank order, or raise on all."""
    return agree_and_share(what, local, lambda value: value, group)[1]


def agree_and_share(
    what: str, local: Callable[[], T], public: Callable[[T], S], group: Group
) -> tuple[T, list[S]]:
    """Run `local` on every rank; return its result here, and ``public(result)`` of every rank."""
    cause: Exception | None = None
    call: dict[str, Any] = {"operation": what, "is set-up": True}
    try:
        value = local()
        call["value"] = to_bytes(public(value)).decode()
    except Exception as error:
        cause = error
        own = (k.__name__ for k in type(error).__mro__ if k.__module__ == errors.__name__)
        call |= {"error": str(error), "kind": next(own, "ArgumentError")}
    if group.log is not None and group.log.active:
        call["digest"] = group.log.whole()
    calls = _gathered(call, group, cause)
    if failures := [rank for rank, other in enumerate(calls) if "error" in other]:
        first, *others = failures
        kind = _KINDS.get(calls[first].get("kind", ""), DisagreementError)
        also = f" (and on {len(others)} more: {others})" if others else ""
        where = f"{calls[first]['operation']}: refused on rank {first} of {group.size}{also}"
        agreed = kind(f"{where}: {calls[first]['error']}{_table(group, [], calls)}")
        agreed.on_all_ranks = True
        raise agreed from cause
    _require_equal(group, ["operation"], calls)
    if any(other.get("digest") != call.get("digest") for other in calls):
        disagree(group)
    return value, [from_bytes(other["value"].encode()) for other in calls]


def on_all_ranks(error: BaseException) -> bool:
    """Return whether all ranks of the group raise this error."""
    return getattr(error, "on_all_ranks", False)


def compare(group: Group, call: Mapping[str, Any]) -> int:
    """Raise on every rank if the ranks describe a call differently; collective.

    `call` maps words to plain values. ``"operation"`` and all others must be equal on all ranks,
    except ``"send"`` and ``"recv"``, counts per peer: a rank sends as many as its peer expects.
    Returns the number of the call on the first rank; 0 outside :func:`varcomm.debug`.
    """
    calls = _gathered(dict(call), group)
    _require_equal(group, ["operation"], calls)  # a difference here explains all others
    _require_equal(group, [word for word in call if word not in ("send", "recv")], calls)
    number: int = calls[0].get("number", 0)
    if "send" not in call or group.simulated:
        return number
    for i, j in product(range(group.size), repeat=2):
        sent, expected = calls[i]["send"][j], calls[j]["recv"][i]
        if sent != expected:
            raise DisagreementError(
                f"{call['operation']}: rank {i} sends {sent} rows to rank {j}, "
                f"which expects {expected}.{_table(group, ['send', 'recv'], calls)}"
            )
    return number


def fail(group: Group, operation: str, error: Exception) -> None:
    """Report to ranks in :func:`compare` that this rank cannot take part; collective."""
    compare(group, {"operation": operation, "error": str(error)})


def announce(
    what: str, group: Group, src: int, local: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return on every rank the JSON values that `local` returns on `src`; collective.

    If `local` raises ArgumentError on `src`, every rank raises it.
    """
    if group.simulated:
        return local()
    device = group.device()
    cause: ArgumentError | None = None
    message: dict[str, Any] = {}
    if group.rank == src:
        try:
            message = local()
        except ArgumentError as error:
            cause, message = error, {"error": str(error)}
            if len(json.dumps(message)) > _LENGTH:  # encoded, a character may have six bytes
                message = {"error": str(error)[: _LENGTH // 8] + "..."}
    memory = bytearray(json.dumps(message).encode().ljust(_LENGTH, b"\0"))
    # torch.func wraps tensors that other functions make, and hides their memory
    data = torch.frombuffer(memory, dtype=torch.uint8)
    data = data if device.type == "cpu" else data.to(device)
    with explained(what, group):
        route = broadcast_route(group, len(data), src)
        wait_for(prepared(route, device)(data, data))
    if cause is not None:
        raise cause
    sent = memory if device.type == "cpu" else data.cpu().numpy().tobytes()
    message = json.loads(sent.rstrip(b"\0"))
    if "error" in message:
        raise ArgumentError(f"refused by its root, rank {src}: {message['error']}")
    return message


def disagree(group: Group, explain: Callable[[], None] | None = None) -> None:
    """Raise DisagreementError with the first calls that differ; on all ranks, collective.

    If all calls are equal, `explain` raises the error. If only layers differ, because some ranks
    compile them, ranks compare layers no longer.
    """
    log = group.log
    assert log is not None
    own = {"names": log.numbered(), "digest": log.digest, "layers": log.layers}
    own |= {"explains": explain is not None, "compiles": group.compiles}
    with explained("comparison of calls", group):
        given = all_gather_object(own, group)
    log.clear()
    compiles = any(each["compiles"] for each in given)
    if all(each["digest"] == own["digest"] for each in given):
        if any(each["layers"] != own["layers"] for each in given):
            if compiles:
                log.compares_layers = False
                return
        elif explain is not None and all(each["explains"] for each in given):
            explain()
    names = [
        {at: name for at, name in each["names"].items() if not (compiles and at[1])}
        for each in given
    ]
    kept_by_all = max(min(row, default=(inf, 0)) for row in names)
    numbers = [at for at in sorted(set().union(*names)) if at >= kept_by_all]
    first = next((at for at in numbers if len({row.get(at) for row in names}) > 1), None)
    text = "ranks have made different calls"
    if first is None:
        text += f", and more than {len(numbers)} equal calls after that."
    else:
        call, after = first
        rows = ({"call": call, "name": row.get(first, "not made")} for row in names)
        where = f"a layer after call {call}" if after else f"call {call}"
        text += f"; the first that differs is {where} of the group."
        calls = [row.get(first, "") for row in names]
        if len({call.removesuffix(RECORDED) for call in calls}) == 1:
            each = (f"rank {rank} has {c.endswith(RECORDED)}" for rank, c in enumerate(calls))
            text += f" Ranks disagree on requires_grad: {'; '.join(each)}."
        text += f"\n{failure.table(rows)}"
    error = DisagreementError(
        f"{text}\nRun the program inside varcomm.debug() to see the line of each rank."
    )
    error.on_all_ranks = True
    raise error


def all_gather_object(value: Any, group: Group, timeout: timedelta = NO_LIMIT) -> list[Any]:
    """Return the plain `value` of every rank, in rank order; collective.

    torch.distributed's function of this name pickles values and pads them to the longest.
    """
    whole = to_bytes(value)
    if group.simulated:
        return [from_bytes(whole)] * group.size
    message = len(whole).to_bytes(_HEAD, "little") + whole
    first = message[:_LENGTH].ljust(_LENGTH, b"\0")
    answers = _all_gather(first, [_LENGTH] * group.size, group, timeout)
    lengths = [_HEAD + int.from_bytes(answer[:_HEAD], "little") for answer in answers]
    if any(length > _LENGTH for length in lengths):
        left = [max(0, length - _LENGTH) for length in lengths]
        rests = _all_gather(message[_LENGTH:], left, group, timeout)
        answers = [first + rest for first, rest in zip(answers, rests, strict=True)]
    return [from_bytes(answer[_HEAD:n]) for answer, n in zip(answers, lengths, strict=True)]


def _all_gather(own: bytes, counts: list[int], group: Group, timeout: timedelta) -> list[bytes]:
    """Gather on the first rank and broadcast: a message per pair takes 7 times as long (P=16)."""
    if transforms_active():  # they wrap tensors, and belong to this thread
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(_all_gather, own, counts, group, timeout).result()
    device, none = group.device(), [0] * group.size
    recv = none if group.rank else counts
    data = torch.from_numpy(np.frombuffer(bytearray(own), np.uint8)).to(device)
    out = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    to_first = Route("one", group, recv, [len(own), *none[1:]])
    wait_for(prepared(to_first, device)(out[: sum(recv)], data), timeout)
    wait_for(prepared(broadcast_route(group, len(out), 0), device)(out, out), timeout)
    return [part.numpy().tobytes() for part in out.cpu().split(counts)]


def _gathered(
    call: dict[str, Any], group: Group, cause: Exception | None = None
) -> list[dict[str, Any]]:
    """Return the calls of all ranks; raise if some rank cannot take part in a hot call."""
    operation, began = call["operation"], time.monotonic()
    if debugging():
        calls = _gathered_in_debug(call, group, began)
    else:
        with explained(operation, group):
            calls = all_gather_object(call, group)
    failed = [rank for rank, other in enumerate(calls) if "error" in other]
    if failed and not all("is set-up" in other for other in calls):
        errors = "; on ".join(f"rank {rank}: {calls[rank]['error']}" for rank in failed)
        raise DisagreementError(
            f"{calls[failed[0]]['operation']}: not called, since on {errors}"
            f"{_table(group, [], calls)}"
        ) from cause
    return calls


def _gathered_in_debug(call: dict[str, Any], group: Group, began: float) -> list[dict[str, Any]]:
    """Return the calls of all ranks; leave a note, and name the ranks that do not come."""
    if group.given_up:
        raise CommunicationError(
            f"{call['operation']}: this group has been given up: {group.given_up}"
        )
    group.compared_calls += 1
    call |= {"number": group.compared_calls, "at": user_line()}
    here = {"group": group.name, "call": call["number"]}
    more = {"operation": call["operation"], "at": call["at"], "left with": ""}
    leave_note({**here, "of ranks": failure.spans(group.ranks), **more})
    try:
        return all_gather_object(call, group, debug_timeout())
    except EngineFailure as error:
        after, (last_notes, _) = time.monotonic() - began, notes(group)
        missing = [rank for rank, note in enumerate(last_notes) if not here.items() <= note.items()]
        reason = "other ranks have given up"
        if missing:
            have = "rank {} has" if len(missing) == 1 else "ranks {} have"
            have = have.format(failure.spans(missing))
            reason = f"{have} not come within {after:.1f} s to"
        rows = (note or {"at": "no note: is it inside varcomm.debug?"} for note in last_notes)
        group.given_up = (
            f"{call['operation']} on {group}: {reason} call {call['number']} of the group inside "
            f"varcomm.debug ({brief(error)}).{_numbering(group)} Where ranks were last:\n"
            f"{failure.table(rows)}\n"
            "If a rank is only slow, raise the timeout: varcomm.debug(timeout=...)."
        )
        failure.leave(group)  # a rank that comes later must not read what is in flight
        raise CommunicationError(group.given_up) from error.__cause__


def _numbering(group: Group) -> str:
    """Return a sentence that names the world ranks of the group, if they differ."""
    return "" if group.ranks == tuple(range(group.size)) else f" {failure.members(group)}"


def _table(group: Group, words: Sequence[str], calls: Calls) -> str:
    """Return a table of the calls, if they have lines."""
    if not all("at" in call for call in calls):
        return _numbering(group)
    shown = dict.fromkeys(("operation", *words, "at"))
    rows = failure.table({word: call.get(word, "none") for word in shown} for call in calls)
    return f"{_numbering(group)}\n{rows}"


def _require_equal(group: Group, words: Iterable[str], calls: Calls) -> None:
    """Raise if ranks differ in any of these words; the message starts with the first."""
    values = {word: [call.get(word, "none") for call in calls] for word in words}
    differing = [word for word, row in values.items() if any(v != row[0] for v in row)]
    if not differing:
        return
    first = differing[0]
    each = "; ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values[first]))
    operation = f"{calls[0]['operation']}: " if first != "operation" else ""
    raise DisagreementError(
        f"{operation}ranks disagree on {first}: {each}.{_table(group, differing, calls)}"
    )
