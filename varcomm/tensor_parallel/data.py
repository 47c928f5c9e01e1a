"""Batches that one rank reads, sent to all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_tensor
from varcomm.tensor_parallel.layout import agreed
from varcomm.transport.engine import wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import GroupLike, resolve

__all__ = ["broadcast_data"]


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    group: GroupLike = None,
) -> dict[str, Tensor]:
    """Return the tensors of the group's first rank on all ranks; not differentiable.

    Parameters
    ----------
    keys : sequence of str
        Entries of `data` to send; identical on all ranks, in the same order.
    data : mapping of str to torch.Tensor, or None
        On the first rank, tensors of any shapes, on one device. Other ranks may pass None.
    dtype : torch.dtype
        Dtype of all tensors; identical on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Returns
    -------
    dict of str to torch.Tensor
        Copies of the entries, on the device of the first rank's tensors, or on the group's device
        if the group does not communicate there.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if `keys` or `dtype` is wrong on one of them or differs, or a tensor of the
        first rank is missing, not dense, of another dtype, or on another device.

    Notes
    -----
    Communication: a short message with the shapes, then all tensors in one. All results share one
    allocation.

    In one process: ``{key: data[key].clone() for key in keys}``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import broadcast_data
    >>> def fn(rank):
    ...     batch = {"tokens": torch.tensor([[3, 1]]), "mask": torch.zeros(0, 2).long()}
    ...     got = broadcast_data(["tokens", "mask"], batch if rank == 0 else None, torch.int64)
    ...     return got["tokens"], got["mask"].shape
    >>> varcomm.launch(fn, 2)[1]
    (tensor([[3, 1]]), torch.Size([0, 2]))
    """
    ranks = resolve(group)
    own: list[Tensor] = []

    def check() -> dict[str, Any]:
        strings = isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)
        if isinstance(keys, str) or not strings or len(set(keys)) < len(keys):
            raise ArgumentError(f"keys must be a list of different strings; got {keys!r}.")
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"dtype must be a torch.dtype; got {dtype!r}.")
        asked = list(keys)
        try:
            own.extend(_checked_data(asked, data, dtype))
        except ArgumentError:
            if ranks.rank == 0:  # elsewhere data may be anything
                raise
        return {"keys": asked, "dtype": dtype}

    def described() -> tuple[str, list[list[int]]]:
        kind = own[0].device.type if own else ""
        known = kind if kind in ranks.backends() else ranks.device().type
        return known, [list(x.shape) for x in own]

    _, (kind, shapes) = agreed("broadcast_data", check, ranks, described)
    if len(shapes) < len(keys):  # this rank answers for a first rank that is simulated
        raise ArgumentError("broadcast_data: data must have all keys where ranks are simulated.")
    here = ranks.rank == 0 and own and own[0].device.type == kind
    device = own[0].device if here else torch.device(kind)
    counts = [prod(shape) for shape in shapes]
    values = torch.empty(sum(counts), dtype=dtype, device=device)
    # `data` separates the version counters: a change in place of one result is none of the others
    parts = (part.data for part in values.split(counts)) if counts else ()
    got = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    for place, tensor in zip(got, own, strict=False):
        if place.shape == tensor.shape:  # not so for data of another rank, which are left out
            place.copy_(tensor.detach())
    with explained("broadcast_data", ranks):
        wait_for(packing.broadcast("broadcast_data", ranks, values, 0))
    return dict(zip(keys, got, strict=True))


def _checked_data(keys: list[str], data: object, dtype: torch.dtype) -> list[Tensor]:
    if not isinstance(data, Mapping):
        raise ArgumentError(
            f"data must be a mapping on the group's first rank; got {type(data).__name__}."
        )
    if missing := [key for key in keys if key not in data]:
        raise ArgumentError(f"data has no {missing}; it has {list(data)}.")
    tensors: list[Tensor] = []
    for key in keys:
        checked_tensor(data[key], "", f"data[{key!r}]")
        tensors.append(data[key])
        if tensors[-1].dtype != dtype:
            raise ArgumentError(
                f"data[{key!r}] is of {tensors[-1].dtype}, but dtype is {dtype}. Convert it, or "
                "send it by another call."
            )
    if len({tensor.device for tensor in tensors}) > 1:
        listed = {key: str(tensor.device) for key, tensor in zip(keys, tensors, strict=True)}
        raise ArgumentError(f"data must be on one device; it is on {listed}.")
    if tensors and tensors[0].is_meta:
        raise ArgumentError("data is on the meta device, where it has no values.")
    return tensors
