"""Checks and selections of values on a GPU for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from varcomm._torch_private import assert_on_device
from varcomm.errors import ArgumentError
from varcomm.transport.debug import debugging


def require(
    holds: torch.Tensor,
    error: Callable[[], ArgumentError],
    owner: object,
    key: Hashable,
    text: str = "",
) -> None:
    """Raise an error unless a condition, bool of shape (), holds.

    The host waits for a GPU to read the first condition of each `owner` and `key`. The GPU checks
    later ones by itself, and a violation ends the program with the error's text, or with `text`.
    Inside :func:`varcomm.debug` the host reads all of them, and for the owner None it reads none.
    """
    on_gpu = holds.device.type != "cpu"
    read: set[Hashable] = set()
    if on_gpu and owner is not None:
        read = vars(owner).setdefault("conditions", read)
    if on_gpu and not debugging() and (owner is None or key in read):
        assert_on_device(holds, text or str(error()))
        return
    if not bool(holds):
        raise error()
    read.add(key)


def positions(mask: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Return the positions of True in a mask, (n,).

    Given `count`, their number, the host does not wait for a GPU.
    """
    if count is None or mask.device.type == "cpu":
        return mask.nonzero().view(-1)
    rows = torch.arange(len(mask), device=mask.device)
    place = torch.where(mask, mask.cumsum(0) - 1, count)  # the last row is for all others
    return rows.new_empty(count + 1).scatter_(0, place, rows)[:count]
