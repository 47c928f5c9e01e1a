"""Checks of one rank's arguments, before it communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import GEN_CLOSED, getgeneratorstate, isgenerator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError, CommunicationError, DisagreementError
from varcomm.sizes import checked_dim, checked_sizes
from varcomm.transport.debug import debugging
from varcomm.transport.group import Group

TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_EMPTY = torch.empty(0)

# Attribute of a parameter that is this rank's part of a sharded one; varcomm.sharding sets it.
SHARD_MARK = "_varcomm_shard_spec"


class checking:
    """Surround the checks of a call's arguments; returns the beginning of their messages.

    `flags` must be bools. Inside debug(), a wrong argument on one rank is an error on all ranks.
    """

    def __init__(self, name: str, group: Group, **flags: bool) -> None:
        self.name, self.group, self.flags = name, group, flags

    def __enter__(self) -> str:
        where = f"{self.name} on {self.group.label}: "
        try:
            # torch.jit.trace alone has tensors in place of numbers
            if not torch.compiler.is_compiling() and isinstance(_EMPTY.numel(), torch.Tensor):
                raise ArgumentError(
                    f"{where}torch.jit.trace would record this rank's messages as constants. Use "
                    "torch.compile, torch.export or make_fx, which record an operator."
                )
            for flag, value in self.flags.items():
                checked_flag(value, flag, where)
        except ArgumentError as error:
            self.__exit__(None, error, None)
            raise
        return where

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        agreed = isinstance(error, DisagreementError | CommunicationError)  # all ranks raise these
        if isinstance(error, Exception) and not agreed and debugging():
            from varcomm.transport.agreement import fail

            fail(self.group, self.name, error)


def checked_flag(value: object, name: str, where: str) -> None:
    """Raise ArgumentError if `value` is not a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(
            f"{where}{name} must be True or False; got {value!r}. Pass a group as group=...; for "
            "other reductions than sums call torch.distributed.all_reduce."
        )


def checked_tensor(tensor: object, where: str, name: str = "tensor") -> None:
    """Raise ArgumentError unless `tensor` is a plain dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{where}{name} must be a torch.Tensor; got {type(tensor).__name__}.")
    is_subclass = type(tensor) not in TENSORS
    if is_subclass and hasattr(tensor, "to_local"):  # DTensor, which has ranks of its own
        raise ArgumentError(
            f"{where}{name} must be this rank's own; got {type(tensor).__name__}. Pass to_local()."
        )
    if is_subclass and getattr(type(tensor), "is_placeholder", False):
        raise ArgumentError(
            f"{where}{name} must hold values of its own; got {type(tensor).__name__}. "
            + getattr(type(tensor), "instead", "Pass an ordinary tensor.")
        )
    two_per_byte = tensor.dtype == torch.float4_e2m1fn_x2
    special = tensor.is_quantized or tensor.is_nested or two_per_byte
    if tensor.layout != torch.strided or special:
        raise ArgumentError(
            f"{where}{name} must be dense; got {tensor.dtype}, {tensor.layout}. Convert it: "
            "to_dense(), dequantize(), to_padded_tensor(), view(torch.uint8) of float4."
        )
    # compilers' tensors are recorded; torch waits for a functional collective in the next operation
    is_known = not is_subclass or is_compilers(tensor) or hasattr(tensor, "trigger_wait")
    if not is_known and _is_wrapper(tensor):
        raise ArgumentError(
            f"{where}{name} must be dense; got {type(tensor).__name__}, which wraps other tensors. "
            "Pass these."
        )


def shard_of(tensor: torch.Tensor) -> Any:
    """Return the ShardSpec of a parameter that is this rank's part of a sharded one, or None."""
    return getattr(getattr(tensor, SHARD_MARK, None), "spec", None)  # a pickled mark has none


def is_sharded_over(tensor: torch.Tensor, group: Group) -> bool:
    """Return whether ranks of the group have different shards of a parameter."""
    spec = shard_of(tensor)
    return spec is not None and len({*spec.group.ranks} & {*group.ranks}) > 1


def refuse_exhausted(parameters: object, where: str) -> None:
    """Raise ArgumentError for a generator that has been read: it would stand for no parameter."""
    if isgenerator(parameters) and getgeneratorstate(parameters) == GEN_CLOSED:
        raise ArgumentError(
            f"{where}parameters is a generator that has been read before, and nothing is left. "
            "Pass the model, or call model.parameters() each time."
        )


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent of forward mode."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def holds_values(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor has its values in its own memory, as most subclasses have.

    DTensors and other wrappers hold them in further tensors, fake tensors and placeholders nowhere.
    """
    is_placeholder = getattr(type(tensor), "is_placeholder", False)  # of subclasses of varcomm's
    return not (is_placeholder or is_fake(tensor) or _is_wrapper(tensor))


def is_fake(tensor: object) -> bool:
    """Return whether a tensor names a device but has no memory there, as those of compilers."""
    plain: Any = torch.Tensor
    if not isinstance(tensor, plain):
        return False
    try:  # no rule of a subclass runs
        storage = plain.__torch_function__(plain.untyped_storage, (), (tensor,))
    except RuntimeError:  # sparse, or in a transform of torch.func
        return False
    result: bool = storage.device.type == "meta" != tensor.device.type
    return result


def is_compilers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor without values comes from a compiler, which records calls on it."""
    kind = type(tensor)
    if kind in TENSORS or hasattr(kind, "__tensor_flatten__") or torch.compiler.is_compiling():
        return False
    return is_fake(tensor)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class that computes with other tensors; it has no memory."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or torch.compiler.is_compiling():
        return False
    if hasattr(kind, "__tensor_flatten__"):
        return True
    return tensor.numel() > 0 and tensor.data_ptr() == 0


def check_on_device(index: torch.Tensor, stop: int, message: Callable[[], str]) -> None:
    """Raise ArgumentError unless entries are in 0...stop - 1, without a wait for a GPU.

    On a GPU a kernel fails, as for any index that is out of range.
    """
    entry = index.new_zeros(1, dtype=torch.uint8)
    try:
        entry.expand(stop).index_select(0, index)
    except IndexError:
        raise ArgumentError(message()) from None


def checked_shard(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str = "sizes"
) -> tuple[tuple[int, ...], int]:
    """Return plain `sizes` and `dim` if `x` has this rank's rows."""
    checked, dim = _checked(x, sizes, dim, group, where, name)
    if x.shape[dim] != checked[group.rank]:
        raise ArgumentError(
            f"{where}{_has(x, dim)}, but {name}[{group.rank}] is {checked[group.rank]} "
            f"({name} {list(checked)}). Pass this rank's own rows, or the sizes of "
            "ShardSizes.from_local."
        )
    return checked, dim


def checked_whole(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str = "sizes"
) -> tuple[tuple[int, ...], int]:
    """Return plain `sizes` and `dim` if `x` has the rows of all ranks."""
    checked, dim = _checked(x, sizes, dim, group, where, name)
    if x.shape[dim] != sum(checked):
        raise ArgumentError(
            f"{where}{_has(x, dim)}, but {name} sum to {sum(checked)} ({name} {list(checked)})."
        )
    return checked, dim


def _checked(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str, name: str
) -> tuple[tuple[int, ...], int]:
    checked_tensor(x, where)
    dim = checked_dim(dim, x.shape, where)
    return checked_sizes(sizes, name, group.size, where), dim


def _has(x: torch.Tensor, dim: int) -> str:
    return f"the tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows along dim {dim}"
