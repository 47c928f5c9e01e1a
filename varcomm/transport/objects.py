"""What every rank has to say, told to all: small objects, in one round of messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch

from varcomm.transport.engine import NO_LIMIT, EngineFailure, wait_for
from varcomm.transport.engines import engine_for, peers_answer
from varcomm.transport.group import Group
from varcomm.transport.serialization import from_bytes, to_bytes

__all__ = ["all_gather_object"]

# Bytes of the first message, which is as long on all ranks, so that nobody needs to be told how
# long it is. What an agreement says mostly fits; the rest of what does not travels in a second one.
_FIRST = 1024

# Bytes that say how long the whole is.
_HEAD = 8


def all_gather_object(value: Any, group: Group, timeout: timedelta = NO_LIMIT) -> list[Any]:
    """Return the `value` of every rank, in rank order, before `timeout`; collective.

    In a world that is only planned, every rank says what this one says.

    The value is plain (:mod:`varcomm.transport.serialization`): nothing received is unpickled.
    torch.distributed's function of this name asks for lengths first, and pads all to the longest.
    """
    whole = to_bytes(value)
    if not peers_answer(group):
        return [from_bytes(whole)] * group.size
    told = len(whole).to_bytes(_HEAD, "little") + whole
    engine = engine_for(group, group.device())
    firsts = torch.empty(group.size * _FIRST, dtype=torch.uint8, device=group.device())
    first = _tensor(told[:_FIRST].ljust(_FIRST, b"\0"), group)
    try:
        engine.all_gather_small(group, firsts, first, timeout)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error
    answers = [_bytes(part) for part in firsts.split(_FIRST)]

    lengths = [int.from_bytes(answer[:_HEAD], "little") for answer in answers]
    left = [max(0, _HEAD + length - _FIRST) for length in lengths]
    if any(left):
        rests = torch.empty(sum(left), dtype=torch.uint8, device=group.device())
        rest = _tensor(told[_FIRST:], group)
        wait_for(engine.all_gather(group, rests, rest, left), timeout)
        answers = [
            answer + _bytes(part) for answer, part in zip(answers, rests.split(left), strict=True)
        ]
    return [
        from_bytes(answer[_HEAD : _HEAD + length])
        for answer, length in zip(answers, lengths, strict=True)
    ]


def _tensor(data: bytes, group: Group) -> torch.Tensor:
    return torch.from_numpy(np.array(bytearray(data), dtype=np.uint8)).to(group.device())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
