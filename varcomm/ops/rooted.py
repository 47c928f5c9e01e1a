"""A tensor that only the root has: what the others put in its place, so that the graph is one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops import packing
from varcomm.ops.batching import wrappers
from varcomm.ops.checks import checked_tensor
from varcomm.ops.library import in_graph
from varcomm.transport.agreement import compare, debugging, share
from varcomm.transport.announce import announce
from varcomm.transport.group import Group

__all__ = ["Input", "input_of_root"]

_FORMATS = {
    str(memory_format): memory_format
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
}


@dataclass(frozen=True)
class Input:
    """What the root has, as every rank knows it.

    Attributes
    ----------
    tensor : torch.Tensor
        At the root its tensor, elsewhere an empty one of shape (0,) in its place.
    shape : tuple of int
    memory_format : torch.memory_format
        Those at the root.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    memory_format: torch.memory_format


def input_of_root(
    name: str,
    tensor: torch.Tensor | None,
    src: int,
    group: Group,
    check: Callable[[torch.Tensor], object] = lambda tensor: None,
    sizes: Sequence[int] = (),
) -> Input:
    """Learn from the root what it has; collective.

    `check` raises ArgumentError at the root if its tensor will not do; all ranks then do. `sizes`
    must be the same on all ranks, and are compared.

    The root decides dtype, device type and whether the result requires a gradient. A tensor that
    another rank passes is not read, but where it requires a gradient it gets one, of zeros.
    """
    where = f"{name} on {group.label}: "
    if in_graph(tensor):
        return _input_in_graph(tensor, src, group, check, where)
    if debugging():
        compare(group, {"operation": name, "root": src, "sizes": list(sizes)})
    digest = zlib.crc32(repr(list(sizes)).encode())
    transformed = _agreed_transforms(name, tensor, src, group)

    def describe() -> dict[str, Any]:
        checked_tensor(tensor, where)
        assert tensor is not None
        check(tensor)
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.type,
            "shape": list(tensor.shape),
            "memory_format": str(_memory_format(tensor, transformed)),
            "requires_grad": torch.is_grad_enabled() and tensor.requires_grad,
            "has_tangent": _has_tangent(tensor),
            "sizes": digest,
        }

    root = announce(name, group, src, describe)
    if root["sizes"] != digest:
        raise DisagreementError(
            f"{where}sizes {list(sizes)} are not those of the root, rank {src}."
        )
    shape, memory_format = tuple(root["shape"]), _FORMATS[root["memory_format"]]
    if group.rank == src:
        assert tensor is not None
        return Input(tensor, shape, memory_format)
    device = torch.device(root["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, root["dtype"])
    empty = torch.empty(0, dtype=dtype, device=device)
    if tensor is not None and transformed:
        empty = _nothing_of(tensor).to(device, dtype)
    elif root["requires_grad"]:
        if tensor is not None and tensor.requires_grad:
            empty = _nothing_of(tensor).to(device, dtype)
        else:
            empty.requires_grad_()
    if root["has_tangent"] and not _has_tangent(empty):
        empty = forward_ad.make_dual(empty, torch.zeros_like(empty))
    return Input(empty, shape, memory_format)


def _input_in_graph(
    tensor: torch.Tensor | None,
    src: int,
    group: Group,
    check: Callable[[torch.Tensor], object],
    where: str,
) -> Input:
    """Take from this rank's own tensor what the root cannot tell while a graph is recorded."""
    if tensor is None:
        raise ArgumentError(
            f"{where}a graph is compiled before rank {src} can tell what it will send. Pass a "
            "tensor of that shape, dtype and requires_grad on every rank; it is not read."
        )
    checked_tensor(tensor, where)
    check(tensor)
    given = Input(tensor, tuple(tensor.shape), packing.memory_format(tensor))
    if group.rank == src:
        return given
    return replace(given, tensor=_nothing_of(tensor))


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return zero elements that belong to the graph of `tensor`, and to what transforms it."""
    # through torch's own rules for views, whose gradient is zeros of the whole shape
    rows = tensor if tensor.dim() else tensor.unsqueeze(0)
    return rows.narrow(0, 0, 0).reshape(-1)


def _agreed_transforms(name: str, tensor: torch.Tensor | None, src: int, group: Group) -> list[int]:
    """Return which transforms of ``torch.func`` reach the root's tensor; collective inside of any.

    They reach those that other ranks pass as well, or the ranks would part ways in derivatives.
    """
    if not torch._C._are_functorch_transforms_active():
        return []
    with torch._C._DisableFuncTorch():
        told = share(name, lambda: wrappers(tensor), group)
    for rank, other in enumerate(told):
        if told[src] and other != told[src]:
            raise DisagreementError(
                f"{name} on {group.size} ranks: transforms of torch.func reach the tensor of the "
                f"root, rank {src}, in another way than that of rank {rank}. There, pass a tensor "
                "that depends on the arguments of the transformed function as the root's does, "
                "with the same batch inside of vmap; it is not read."
            )
    return told[src]


def _memory_format(tensor: torch.Tensor, transformed: Sequence[int]) -> torch.memory_format:
    # a batch has no format, and does not answer what it is
    batched = max(transformed, default=-1) >= 0
    return torch.contiguous_format if batched else packing.memory_format(tensor)


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Tell whether forward-mode differentiation is under way and reaches `tensor`."""
    return forward_ad.unpack_dual(tensor).tangent is not None
