"""A batch that one rank has read, for all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops import packing
from varcomm.ops.checks import checked_tensor
from varcomm.transport.agreement import agree, share
from varcomm.transport.engine import Pending, wait_for
from varcomm.transport.engines import peers_answer
from varcomm.transport.failure import explained
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["broadcast_data"]

_NAME = "broadcast_data"

# What the first rank's tensors may be on, by numbers that travel.
_KINDS = ("cpu", "cuda")


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    dtype: torch.dtype,
    group: GroupLike = None,
) -> dict[str, torch.Tensor]:
    """Give all ranks the tensors that the group's first rank has; not differentiable.

    Parameters
    ----------
    keys : sequence of str
        Which entries of `data` to send; the same on all ranks, in the same order.
    data : mapping of str to torch.Tensor, or None
        On the first rank, tensors of any shapes, scalars and dimensions of zero included, on one
        device. Elsewhere it is not read.
    dtype : torch.dtype
        That of the tensors; the same on all ranks.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    dict of str to torch.Tensor
        The entries of `keys`, in their order; on the first rank copies as well. They are on the
        device of the first rank's, or on that of the group where it does not communicate there.

    Raises
    ------
    ArgumentError
        On every rank, if `keys` or `dtype` is none on one of them, or a tensor on the first rank is
        missing, no dense one, of another dtype, or on another device.
    DisagreementError
        On every rank, if they have other keys or dtypes.
    GroupError
        If this rank is not in `group`.

    Notes
    -----
    Communication: two short messages, in which ranks compare what they ask for and the first tells
    the shapes, as integers; then all tensors in one. Nothing is pickled. All results lie in one
    piece of memory, which is free when none of them is used any more.

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
    own, (dims, kind) = _agreed(keys, data, dtype, ranks)
    if not keys:
        return {}
    shapes = _shapes(own, len(keys), dims, ranks)
    device = torch.device(_KINDS[kind])
    if own and own[0].device.type == device.type:
        device = own[0].device
    counts = [prod(shape) for shape in shapes]
    values = torch.empty(sum(counts), dtype=dtype, device=device)
    # each as a tensor of its own: to change one in place is no change of the others
    parts = (part.data for part in values.split(counts))
    got = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    for place, tensor in zip(got, own, strict=False):  # there are some on the first rank alone
        place.copy_(tensor.detach())
    _broadcast(values, ranks)
    return dict(zip(keys, got, strict=True))


def _agreed(
    keys: Sequence[str], data: object, dtype: torch.dtype, group: Group
) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Return the first rank's tensors there, and on all their dimensions and kind of device."""
    own: list[torch.Tensor] = []
    failure: ArgumentError | None = None
    said = [0, 0, 0, 0]
    try:
        asked = _checked_keys(keys, dtype)
        if group.rank == 0 or not peers_answer(group):  # which is taken to have these data
            own = _checked_data(asked, data, dtype)
        digest = blake2b(repr((asked, str(dtype))).encode(), digest_size=7).digest()
        kind = _KINDS.index(_kind(own, group))
        said = [1, int.from_bytes(digest, "little"), sum(x.dim() for x in own), kind]
    except ArgumentError as error:
        failure = error
    told = _all_gather(said, group)
    if not all(ok for ok, *_ in told):
        agree(_NAME, lambda: _raise(failure), group)
    if len({digest for _, digest, *_ in told}) > 1:
        asked_for = share(_NAME, lambda: f"{list(keys)} of {dtype}", group)
        listed = "; ".join(f"rank {rank} {what}" for rank, what in enumerate(asked_for))
        raise DisagreementError(f"{_NAME}: ranks ask for different data: {listed}.")
    return own, (told[0][2], told[0][3])


def _checked_keys(keys: Sequence[str], dtype: torch.dtype) -> list[str]:
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype must be a torch.dtype; got {dtype!r}.")
    strings = isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)
    if isinstance(keys, str) or not strings or len(set(keys)) < len(keys):
        raise ArgumentError(f"keys must be a list of different strings; got {keys!r}.")
    return list(keys)


def _checked_data(keys: list[str], data: object, dtype: torch.dtype) -> list[torch.Tensor]:
    if not isinstance(data, Mapping):
        raise ArgumentError(
            f"data must be a mapping on the group's first rank; got {type(data).__name__}."
        )
    if missing := [key for key in keys if key not in data]:
        raise ArgumentError(f"data has no {missing}; it has {list(data)}.")
    tensors: list[torch.Tensor] = []
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


def _kind(own: list[torch.Tensor], group: Group) -> str:
    """Return on what kind of device the group can pass the tensors on."""
    theirs = [tensor.device.type for tensor in own[:1] if tensor.device.type in group.backends()]
    return (theirs or [group.device().type])[0]


def _shapes(own: list[torch.Tensor], keys: int, dims: int, group: Group) -> list[list[int]]:
    """Return the shapes of the first rank's tensors, of which it knows; collective."""
    told = [x.dim() for x in own] + [n for x in own for n in x.shape]
    header = torch.tensor(told or [0] * (keys + dims), dtype=torch.int64, device=group.device())
    _broadcast(header, group)
    known = torch.tensor(told, dtype=torch.int64) if told else header.cpu()
    lengths, sizes = known[:keys].tolist(), known[keys:]
    return [shape.tolist() for shape in sizes.split(lengths)]


def _all_gather(said: list[int], group: Group) -> list[list[int]]:
    """Return a few integers of each rank."""
    if not peers_answer(group):
        return [said] * group.size
    own = torch.tensor(said, dtype=torch.int64, device=group.device())
    with explained(_NAME, group):
        works, all_said = packing.all_gather(_NAME, group, own, [len(said)] * group.size)
        values = Pending(works, lambda: all_said).wait()
    return values.view(group.size, len(said)).tolist()


def _broadcast(values: torch.Tensor, group: Group) -> None:
    """Overwrite `values` by those of the first rank."""
    with explained(_NAME, group):
        wait_for(packing.broadcast(_NAME, group, values, 0))


def _raise(failure: ArgumentError | None) -> None:
    if failure is not None:
        raise failure
