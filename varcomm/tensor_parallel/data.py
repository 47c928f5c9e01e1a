"""Batches that one rank reads, sent to all ranks of a group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_tensor
from varcomm.tensor_parallel.layout import agreed
from varcomm.transport.engine import wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import GroupLike, resolve

K = TypeVar("K", bound=Hashable)


def broadcast_data(
    keys: Sequence[K],
    data: Mapping[K, Tensor] | None,
    dtype: torch.dtype,
    group: GroupLike = None,
) -> dict[K, Tensor]:
    """Return the tensors of the group's first rank on all ranks; not differentiable.

    Parameters
    ----------
    keys : sequence of hashable
        Entries of `data` to send; identical on all ranks, in the same order. Ranks compare the
        ``repr`` of the keys.
    data : mapping of keys to torch.Tensor, or None
        On the first rank, tensors of any shapes, on one device. Other ranks may pass None.
    dtype : torch.dtype
        The dtype of all tensors; identical on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    dict of keys to torch.Tensor
        Copies of the entries, in one allocation, on the device of the first rank's tensors, or on
        the group's device if the group does not communicate there.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if `keys` or `dtype` is wrong or differs. Also raised if a tensor of the
        first rank is missing, not dense, of another dtype, or on another device.

    See Also
    --------
    varcomm.broadcast, vocab_range

    Notes
    -----
    Communication: a short message with the shapes, then all tensors in one.

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
        fits = isinstance(keys, Sequence) and all(isinstance(key, Hashable) for key in keys)
        if isinstance(keys, str | bytes) or not fits or len(set(keys)) < len(keys):
            raise ArgumentError(f"keys must be a list of different hashable keys; got {keys!r}.")
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"dtype must be a torch.dtype; got {dtype!r}.")
        try:
            own.extend(_checked_data(keys, data, dtype))
        except ArgumentError:
            if ranks.rank == 0:  # elsewhere data may be anything
                raise
        return {"keys": list(keys), "dtype": dtype}

    def described() -> tuple[str, list[list[int]]]:
        kind = own[0].device.type if own else ""
        known = kind if kind in ranks.backends() else ranks.device().type
        return known, [list(x.shape) for x in own]

    _, (kind, shapes) = agreed("broadcast_data", check, ranks, described)
    here = ranks.rank == 0 and own and own[0].device.type == kind
    device, counts = own[0].device if here else torch.device(kind), [prod(s) for s in shapes]
    values = torch.empty(sum(counts), dtype=dtype, device=device)
    # `data` separates the version counters: a change in place of one result is none of the others
    got = [part.data.view(s) for part, s in zip(values.split(counts), shapes, strict=True)]
    for place, tensor in zip(got, own, strict=False):
        if place.shape == tensor.shape:  # not so for data of another rank, which are left out
            place.copy_(tensor.detach())
    with explained("broadcast_data", ranks):
        wait_for(packing.broadcast("broadcast_data", ranks, values, 0))
    return dict(zip(keys, got, strict=True))


def _checked_data(keys: Sequence[Hashable], data: Any, dtype: torch.dtype) -> list[Tensor]:
    if not isinstance(data, Mapping) or any(key not in data for key in keys):
        got = list(data) if isinstance(data, Mapping) else type(data).__name__
        raise ArgumentError(f"data must be a mapping with the keys {list(keys)}; got {got}.")
    tensors = [data[key] for key in keys]
    for key, tensor in zip(keys, tensors, strict=True):
        checked_tensor(tensor, "", f"data[{key!r}]")
        if tensor.dtype != dtype or tensor.device != tensors[0].device or tensor.is_meta:
            raise ArgumentError(
                f"data must be of dtype {dtype} and on one device, not meta; data[{key!r}] is of "
                f"{tensor.dtype} on {tensor.device}."
            )
    return tensors
