"""Metadata that ranks send to each other: small plain values, in one message of fixed length."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.transport.engine import NO_LIMIT, EngineFailure, engine_for, wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group
from varcomm.transport.serialization import from_bytes, to_bytes

__all__ = ["all_gather_object", "announce"]

# Bytes of the first message on every rank. Most agreements fit; a second message carries the rest.
# The description of a tensor takes 200 bytes; an error message may be cut.
_LENGTH = 1024

_HEAD = 8  # bytes that hold the length of the value


def announce(
    what: str, group: Group, src: int, local: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return on every rank the JSON values that `local` returns on `src`; collective.

    If `local` raises ArgumentError on `src`, every rank raises it. In a simulated group the root
    has the values of this rank.
    """
    device = group.device()
    engine = engine_for(group, device)
    failure: ArgumentError | None = None
    message: dict[str, Any] = {}
    if group.rank == src or engine.simulated:
        try:
            message = local()
        except ArgumentError as error:
            failure, message = error, {"error": _cut(str(error))}
    data = json.dumps(message).encode().ljust(_LENGTH, b"\0")
    if not engine.simulated:
        array = np.frombuffer(bytearray(data), np.uint8)
        with explained(what, group):
            if device.type == "cpu":
                wait_for(engine.broadcast_array(group, array, src))
            else:
                sent = _tensor(array, device)
                wait_for(engine.broadcast(group, sent, src))
                array = sent.cpu().numpy()
        data = array.tobytes()
    if failure is not None:
        raise failure
    message = json.loads(data.rstrip(b"\0"))
    if "error" in message:
        raise ArgumentError(f"refused by its root, rank {src}: {message['error']}")
    return message


def all_gather_object(value: Any, group: Group, timeout: timedelta = NO_LIMIT) -> list[Any]:
    """Return the plain `value` of every rank, in rank order; collective.

    torch.distributed's function of this name pickles values and pads them to the longest.
    """
    whole, device = to_bytes(value), group.device()
    engine = engine_for(group, device)
    if engine.simulated:
        return [from_bytes(whole)] * group.size

    def all_gather(own: bytes, counts: list[int]) -> list[bytes]:
        out = torch.empty(sum(counts), dtype=torch.uint8, device=device)
        data = _tensor(np.frombuffer(bytearray(own), np.uint8), device)
        try:
            engine.all_gather_metadata(group, out, data, counts, timeout)
        except RuntimeError as error:
            raise EngineFailure(str(error)) from error
        return [part.numpy().tobytes() for part in out.cpu().split(counts)]

    message = len(whole).to_bytes(_HEAD, "little") + whole
    answers = all_gather(message[:_LENGTH].ljust(_LENGTH, b"\0"), [_LENGTH] * group.size)
    lengths = [int.from_bytes(answer[:_HEAD], "little") for answer in answers]
    left = [max(0, _HEAD + length - _LENGTH) for length in lengths]
    if any(left):
        rests = all_gather(message[_LENGTH:], left)
        answers = [first + rest for first, rest in zip(answers, rests, strict=True)]
    return [
        from_bytes(answer[_HEAD : _HEAD + length])
        for answer, length in zip(answers, lengths, strict=True)
    ]


def _tensor(array: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


def _cut(text: str) -> str:
    """Shorten a text to fit when encoded, in which a character may have six bytes."""
    return text if len(json.dumps(text)) < _LENGTH - 20 else text[: _LENGTH // 8] + "..."
