"""What the root of a collective tells the others before it sends data that they know nothing of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.transport.engine import wait_for
from varcomm.transport.engines import engine_for, peers_answer
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = ["announce"]

# One message of fixed length, so that nobody needs to be told how long it is. An exchange of shape,
# dtype and a few flags takes 200 bytes; an error message may be cut.
_LENGTH = 1024


def announce(
    what: str, group: Group, src: int, local: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return on every rank what `local` returns on `src`; collective.

    Raises
    ------
    ArgumentError
        On every rank, where `local` raised it on `src`.
    """
    if not peers_answer(group):  # the root is taken to have what this rank has
        return json.loads(json.dumps(local()))  # type: ignore[no-any-return]
    failure: ArgumentError | None = None
    message: dict[str, Any] = {}
    if group.rank == src:
        try:
            message = local()
        except ArgumentError as error:
            failure, message = error, {"error": _cut(str(error))}
    told = json.dumps(message).encode().ljust(_LENGTH, b"\0")
    # by plain tensors, also inside torch.func's transforms, which would wrap them
    with torch._C._DisableFuncTorch():
        data = torch.from_numpy(np.frombuffer(bytearray(told), np.uint8)).to(group.device())
        with explained(what, group):
            wait_for(engine_for(group, data.device).broadcast(group, data, src))
        message = json.loads(data.cpu().numpy().tobytes().rstrip(b"\0"))
    if failure is not None:
        raise failure
    if "error" in message:
        raise ArgumentError(f"refused by its root, rank {src}: {message['error']}")
    return message


def _cut(text: str) -> str:
    """Shorten to what surely fits when encoded, since a character may take six bytes."""
    return text if len(json.dumps(text)) < _LENGTH - 20 else text[: _LENGTH // 8] + "..."
