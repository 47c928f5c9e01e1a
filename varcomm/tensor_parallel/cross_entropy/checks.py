"""What one rank can check of the losses' arguments before it communicates."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Real
from typing import Any, get_args

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.batching import refuse_vmap
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import digest
from varcomm.ops.library import in_graph, refuse_linearize
from varcomm.sizes import ShardSizes, checked_sizes, exact_int
from varcomm.tensor_parallel.cross_entropy.classes import check_classes, checked_in_graph
from varcomm.tensor_parallel.cross_entropy.loss import Options, Reduction, SmoothOver
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

__all__ = [
    "checked_floats",
    "checked_head",
    "checked_options",
    "checked_targets",
    "checked_weights",
    "compared",
    "known_sizes",
]


def checked_options(
    where: str,
    label_smoothing: float,
    ignore_index: int,
    reduction: Reduction,
    z_loss: float,
    smooth_over: SmoothOver,
) -> Options:
    """Return the options that are no tensors, or raise ArgumentError."""
    if not _is_number(label_smoothing) or not 0 <= label_smoothing < 1:
        raise ArgumentError(
            f"{where}label_smoothing must be a number in [0, 1); got {label_smoothing!r}."
        )
    if not _is_number(z_loss) or not 0 <= z_loss < inf:
        raise ArgumentError(f"{where}z_loss must be a finite number of at least 0; got {z_loss!r}.")
    index = exact_int(ignore_index)
    if index is None:
        raise ArgumentError(f"{where}ignore_index must be an int; got {ignore_index!r}.")
    choices = (("reduction", reduction, Reduction), ("smooth_over", smooth_over, SmoothOver))
    for name, value, kind in choices:
        if value not in get_args(kind):
            allowed = ", ".join(map(repr, get_args(kind)))
            raise ArgumentError(f"{where}{name} must be one of {allowed}; got {value!r}.")
    return Options(float(label_smoothing), index, reduction, float(z_loss), smooth_over)


def checked_floats(x: object, where: str, name: str, least: int) -> None:
    """Raise ArgumentError if `x` is no tensor of floats of at least so many dimensions."""
    checked_tensor(x, where, name)
    assert isinstance(x, torch.Tensor)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ArgumentError(f"{where}{name} must be of floats of 2 bytes or more; got {x.dtype}.")
    if x.dim() < least:
        raise ArgumentError(
            f"{where}{name} must have at least {least} dimensions; got the shape {tuple(x.shape)}."
        )


def known_sizes(
    sizes: Sequence[int], columns: int, what: str, group: Group, where: str
) -> ShardSizes:
    """Return `sizes` if they are of classes, and this rank's are its columns."""
    known = ShardSizes(checked_sizes(sizes, "sizes", group.size, where))
    if known[group.rank] != columns:
        raise ArgumentError(
            f"{where}{what} is for {columns} classes, but sizes[{group.rank}] is "
            f"{known[group.rank]} (sizes {list(known)}). Pass the number of classes of each rank."
        )
    if known.total == 0:
        raise ArgumentError(f"{where}sizes sum to 0: there are no classes (sizes {list(known)}).")
    return known


def checked_head(hidden: torch.Tensor, weight: object, bias: object, where: str) -> None:
    """Raise ArgumentError if a head's weight and bias do not go with hidden states."""
    checked_floats(weight, where, "weight", 2)
    assert isinstance(weight, torch.Tensor)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{where}weight must have the shape (sizes[rank], {hidden.shape[-1]}), for hidden of "
            f"shape {tuple(hidden.shape)}; got {tuple(weight.shape)}."
        )
    if bias is not None:
        checked_floats(bias, where, "bias", 1)
        assert isinstance(bias, torch.Tensor)
        if bias.shape != weight.shape[:1]:
            raise ArgumentError(
                f"{where}bias must have the shape {tuple(weight.shape[:1])}, an entry for each row "
                f"of weight; got {tuple(bias.shape)}."
            )
    for name, x in (("weight", weight), ("bias", bias)):
        if isinstance(x, torch.Tensor):
            _checked_device(x, hidden.device, name, where)
            if x.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
                raise ArgumentError(
                    f"{where}{name} must have the dtype of hidden, {hidden.dtype}; got {x.dtype}."
                )


def checked_targets(
    target: object,
    shape: torch.Size,
    device: torch.device,
    sizes: ShardSizes,
    options: Options,
    name: str,
    group: Group,
) -> torch.Tensor:
    """Return targets if they are classes of tokens of this shape, or raise ArgumentError.

    In a graph their values are looked at when it runs.
    """
    where = f"{name} on {group}: "
    checked_tensor(target, where, "target")
    assert isinstance(target, torch.Tensor)
    if target.dtype != torch.int64:
        hint = " Convert: target.to(torch.int64)."
        if target.is_floating_point():
            hint = " Distributions over classes are not supported: pass the ids of classes."
        raise ArgumentError(f"{where}target must be of torch.int64; got {target.dtype}.{hint}")
    if target.shape != shape:
        raise ArgumentError(
            f"{where}target must have the shape {tuple(shape)}, an id for each token (classes are "
            f"along the last dimension of logits); got {tuple(target.shape)}."
        )
    _checked_device(target, device, "target", where)
    refuse_linearize(where, "chunks of rows")
    refuse_vmap(
        where,
        [target],
        "Targets are looked at before they are used: give logits and targets one more dimension "
        "in place of a batch, with reduction='none' for a loss of each token.",
    )
    if options.label_smoothing and options.smooth_over == "wrong" and sizes.total == 1:
        raise ArgumentError(f"{where}there is one class, and no wrong one to smooth over.")
    if in_graph(target):
        ignored = options.ignore_index
        known: torch.Tensor = checked_in_graph(
            target, sizes.total, ignored, name, group.rank, group.size
        )
        return known
    if in_graph(None):
        raise ArgumentError(
            f"{where}target must be a fake tensor, as others are inside of FakeTensorMode. Pass "
            "mode.from_tensor(target)."
        )
    check_classes(target, sizes.total, options.ignore_index, where)
    return target


def checked_weights(
    weight: object, name: str, device: torch.device, sizes: ShardSizes, where: str
) -> None:
    """Raise ArgumentError if the weights of classes are given and do not fit."""
    if weight is None:
        return
    checked_floats(weight, where, name, 1)
    assert isinstance(weight, torch.Tensor)
    if weight.shape != (sizes.total,):
        raise ArgumentError(
            f"{where}{name} must have one entry a class, {sizes.total} (sizes "
            f"{list(sizes)}); got the shape {tuple(weight.shape)}. Pass the whole one on all "
            "ranks."
        )
    if weight.requires_grad:
        raise ArgumentError(f"{where}{name} gets no gradient. Pass {name}.detach().")
    _checked_device(weight, device, name, where)


def _checked_device(x: torch.Tensor, device: torch.device, name: str, where: str) -> None:
    if x.device != device:
        raise ArgumentError(f"{where}{name} must be on {device}; it is on {x.device}.")


def compared(
    name: str,
    sizes: ShardSizes,
    options: Options,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    group: Group,
) -> None:
    """Compare between ranks, inside :func:`varcomm.debug`, what all of them must have alike."""
    if not torch.compiler.is_compiling() and debugging():
        call: dict[str, Any] = {
            "operation": name,
            "sizes": list(sizes),
            "options": repr(options),
            "shape of target": list(target.shape),
            "values of target": digest(target),
            "weights": None if weight is None else digest(weight),
        }
        compare(group, call)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
