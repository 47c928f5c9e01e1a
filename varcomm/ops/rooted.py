"""A tensor that only the root has: what the others put in its place, so that the graph is one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops import wire
from varcomm.ops.checks import checked_tensor
from varcomm.ops.library import is_traced
from varcomm.transport.agree import compare, debugging
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
    if torch.compiler.is_compiling() or (tensor is not None and is_traced(tensor)):
        return _input_in_graph(tensor, src, group, check, where)
    if debugging():
        compare(group, {"operation": name, "root": src, "sizes": list(sizes)})
    digest = zlib.crc32(repr(list(sizes)).encode())

    def describe() -> dict[str, Any]:
        checked_tensor(tensor, where)
        assert tensor is not None
        check(tensor)
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.type,
            "shape": list(tensor.shape),
            "memory_format": str(wire.memory_format(tensor)),
            "requires_grad": torch.is_grad_enabled() and tensor.requires_grad,
            "has_tangent": _has_tangent(tensor),
            "sizes": digest,
        }

    root = announce(group, src, describe)
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
    if root["requires_grad"]:
        if tensor is not None and tensor.requires_grad:
            # through torch's own rules for views, whose gradient is zeros of the whole shape
            rows = tensor if tensor.dim() else tensor.unsqueeze(0)
            empty = rows.narrow(0, 0, 0).reshape(-1).to(device, dtype)
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
    given = Input(tensor, tuple(tensor.shape), wire.memory_format(tensor))
    if group.rank == src:
        return given
    # through torch's own rules for views, whose gradient is zeros of the whole shape
    rows = tensor if tensor.dim() else tensor.unsqueeze(0)
    return replace(given, tensor=rows.narrow(0, 0, 0).reshape(-1))


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Tell whether forward-mode differentiation is under way and reaches `tensor`."""
    return forward_ad.unpack_dual(tensor).tangent is not None
