"""The input of a collective that only the root has, and its stand-ins on the other ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_tensor, checking, has_tangent
from varcomm.ops.graph_operator import in_graph
from varcomm.transport.agreement import announce, compare, debugging
from varcomm.transport.group import Group


def root_input(
    name: str,
    tensor: torch.Tensor | None,
    src: int,
    group: Group,
    check: Callable[[torch.Tensor], object] = lambda tensor: None,
    sizes: Sequence[int] = (),
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the root's tensor and its shape; collective.

    Other ranks get an empty tensor in its place, with the dtype, device type and ``requires_grad``
    of the root's. A tensor that they pass is not read; its gradient is zeros. `check` raises
    ArgumentError at the root if its tensor cannot be used; then all ranks raise.
    """
    where = f"{name} on {group.label}: "

    def checked() -> torch.Tensor:
        checked_tensor(tensor, where)
        assert tensor is not None
        check(tensor)
        return tensor

    if in_graph(tensor):  # the root cannot describe its tensor while a graph is recorded
        if tensor is None:
            raise ArgumentError(
                f"{where}a graph is compiled before rank {src} can describe its tensor. Pass a "
                "tensor of that shape, dtype and requires_grad on every rank; it is not read."
            )
        x = checked()
        return x if group.rank == src else _nothing_of(x), tuple(x.shape)

    digest, transforms = zlib.crc32(repr(list(sizes)).encode()), transforms_of(tensor)
    compare_like(name, src, group, sizes, like="not given")

    def describe() -> dict[str, Any]:
        x = checked()
        return _facts(x) | {"shape": list(x.shape), "sizes": digest}

    root = announce(name, group, src, describe)
    if root["sizes"] != digest:
        raise DisagreementError(
            f"{where}sizes {list(sizes)} are not those of the root, rank {src}."
        )
    transformed = root["transforms"]
    if transformed and transforms != transformed:  # ranks would differ in derivatives
        raise DisagreementError(
            f"{where}transforms of torch.func reach the tensor of the root, rank {src}, in another "
            "way than this rank's. Pass a tensor that depends on the arguments of the transformed "
            "function as the root's does; it is not read."
        )
    shape = tuple(root["shape"])
    if group.rank == src:
        assert tensor is not None
        return tensor, shape
    device, dtype = torch.device(root["device"]), root["dtype"].removeprefix("torch.")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    empty = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    if tensor is not None and (transformed or (root["requires_grad"] and tensor.requires_grad)):
        empty = _nothing_of(tensor).to(empty)
    elif root["requires_grad"] and not transformed:
        empty.requires_grad_()
    if root["tangent"] and not has_tangent(empty):
        empty = forward_ad.make_dual(empty, torch.zeros_like(empty))
    return empty, shape


def known_input(
    name: str, tensor: torch.Tensor | None, like: torch.Tensor, src: object, group: Group
) -> tuple[torch.Tensor, torch.Size]:
    """Return the root's tensor, elsewhere `like`; and the shape of `like`.

    The root checks that its tensor is as `like`, but for the shape.
    """
    x = tensor if group.rank == src else like
    if not _match(x, like):
        with checking(name, group) as where:
            checked_tensor(like, where, "like")
            checked_tensor(x, where)
            assert x is not None
            own, other = _facts(x), _facts(like)
            if differing := [word for word in own if own[word] != other[word]]:
                words = (f"{word} is {other[word]}, not {own[word]}" for word in differing)
                raise ArgumentError(f"{where}like must match the tensor: its {'; '.join(words)}.")
    assert x is not None
    return x, like.shape


def _match(x: object, like: object) -> bool:
    """Return whether a tensor is as `like`, if few words are enough to see it."""
    if type(x) is not torch.Tensor or type(like) is not torch.Tensor:
        return False
    return x is like or (
        (x.dtype, x.device, x.layout) == (like.dtype, like.device, like.layout)
        and x.requires_grad == like.requires_grad
        and not transforms_active()
        and has_tangent(x) == has_tangent(like)
    )


def compare_like(name: str, src: int, group: Group, sizes: Sequence[int], **like: Any) -> None:
    """Compare, inside debug(), whether ranks have `like`; their calls compare the rest."""
    if debugging():
        compare(group, {"operation": name, "root": src, "sizes": list(sizes), **like})


def _facts(x: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(x.dtype),
        "device": x.device.type,
        "requires_grad": torch.is_grad_enabled() and x.requires_grad,
        "tangent": has_tangent(x),
        "transforms": transforms_of(x),
    }


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return zero elements that belong to the graph of `tensor`, and to its transforms."""
    # by torch's own rules for views, whose gradient is zeros of the full shape
    rows = tensor if tensor.dim() else tensor.unsqueeze(0)
    return rows.narrow(0, 0, 0).reshape(-1)


def transforms_of(tensor: torch.Tensor | None) -> int:
    """Return the number of transforms of ``torch.func`` that reach a tensor."""
    if tensor is None or not transforms_active():
        return 0
    inner = torch.func.debug_unwrap(tensor, recurse=False)
    return 0 if inner is tensor else 1 + transforms_of(inner)
