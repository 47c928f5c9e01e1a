"""Arguments of a ``ShardedGradients``: parameters by name, and settings; checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import dense, gradient_dtype, is_owned
from varcomm.data_parallel.global_count import GlobalCount, described
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.sizes import at_least, checked_sizes
from varcomm.transport.engine import engine_for
from varcomm.transport.group import Group

__all__ = ["NAME", "OTHERS", "Given", "Settings", "checked_number", "read"]

NAME = "ShardedGradients"

# Kinds of tensors that are overwritten in place by those of rank 0.
OTHERS = ("frozen", "left out", "buffer")


class Settings:
    """Arguments of ``ShardedGradients`` that are the same on all ranks, checked.

    `words` are compared by ranks. Sums are divided by `divisor` in total, or by `count`: each part
    by `before`, and the sum by the rest. Narrow floats are divided and summed `in_fp32`, or else
    divided before they are sent, and the sum is rounded before it is divided by the rest.
    """

    def __init__(
        self, given: Mapping[str, Any], module: torch.nn.Module | None, ranks: int
    ) -> None:
        for name in ("fp32_reduce_scatter", "fp32_masters", "cpu_offload", "overlap_forward"):
            checked_flag(given[name], name, "")
        self.in_fp32: bool = given["fp32_reduce_scatter"]
        self.fp32_masters: bool = given["fp32_masters"]
        self.cpu_offload: bool = given["cpu_offload"]
        self.overlap_forward: bool = given["overlap_forward"]
        self.bucket_bytes = at_least(1, given["bucket_bytes"], "bucket_bytes")
        reduce, self.sizes = given["reduce"], given["sizes"]
        self.words = {name: repr(value) for name, value in given.items()}
        self.words["reduce"] = described(reduce)
        self.count = reduce if isinstance(reduce, GlobalCount) else None
        self.divisor = {"sum": 1.0, "mean": float(ranks)}.get(str(reduce))
        name, self.before = "gradient_predivide_factor", 1.0
        if given[name] is not None:
            kind, fits = "a positive number", lambda x: isfinite(x) and x > 0
            self.before = checked_number(given[name], name, kind, fits)
        elif reduce == "mean":
            self.before = _predivide_factor(ranks)
        if self.overlap_forward and module is None:
            raise ArgumentError(
                "overlap_forward=True needs the module whose forward waits for its parameters. "
                "Pass the model as params, or as module=..."
            )
        if not isinstance(self.sizes, str):
            self.sizes = checked_sizes(self.sizes, "sizes", ranks)
            self.words["sizes"] = repr(list(self.sizes))

    def of_pieces(self, parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        """Return dtype and device of the values that the optimizer updates."""
        narrow = parameter.is_floating_point() and parameter.itemsize < 4
        dtype = torch.float32 if narrow and self.fp32_masters else parameter.dtype
        return dtype, torch.device("cpu") if self.cpu_offload else parameter.device


def _predivide_factor(ranks: int) -> float:
    """Return the power of two near ``sqrt(P)`` by which FSDP divides before it sums.

    It is as large as the rest of the divisor, so neither parts nor sums leave the range of fp16.

    >>> [_predivide_factor(ranks) for ranks in (1, 2, 3, 4, 5, 8, 16, 64)]
    [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]
    """
    return 2.0 ** (((ranks - 1).bit_length() + 1) // 2)


def checked_number(
    value: Any, name: str, kind: str, fits: Callable[[float], bool], where: str = ""
) -> float:
    """Return `value` as a float if it is a number that fits, or raise ArgumentError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not fits(value):
        raise ArgumentError(f"{where}{name} must be {kind}; got {value!r}.")
    return float(value)


@dataclass(frozen=True)
class Given:
    """Parameters by name, in groups with options as torch's optimizers take them.

    `groups` holds for each group the names of the trained parameters, and the options. `tensors`
    are of a kind each: "trained"; "frozen"; a "left out" parameter of the module, which is made
    equal and left alone; or a "buffer". Parameters that another ShardedGradients has made equal
    are absent.
    """

    module: torch.nn.Module | None
    groups: list[tuple[list[str], dict[str, Any]]]
    tensors: dict[str, tuple[str, torch.Tensor]]

    def of(self, *kinds: str) -> dict[str, Any]:
        """Return the tensors of some kinds, by name."""
        return {name: value for name, (kind, value) in self.tensors.items() if kind in kinds}

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and no other ShardedGradients sums the gradients."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(
                "torch.inference_mode() allows no gradients of the parameters. Leave that mode."
            )
        trained, frozen = self.of("trained"), len(self.of("frozen"))
        if not trained:
            found = f"all {frozen} are frozen" if frozen else "there are none"
            raise ArgumentError(f"no parameter is trained: {found}.")
        first: dict[torch.device, str] = {}
        for name, value in trained.items():
            first.setdefault(value.device, name)
        if len(first) > 1:
            raise ArgumentError(
                f"parameters are on several devices, {' and '.join(map(str, first))}: parameter "
                f"{list(first.values())[1]!r} is on the second. Make a ShardedGradients for those "
                "of each device."
            )
        for name, (kind, value) in self.tensors.items():
            what = _called(kind, name)
            checked_tensor(value, "", what)
            if wrong := _wrong(value, kind == "trained"):
                raise ArgumentError(f"{what} {wrong}")
            engine_for(group, value.device)
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise if a parameter that is to move overlaps another tensor in one storage."""
        spans = []
        for name, (kind, value) in self.tensors.items():
            if value.numel() and not value.is_meta:
                places = zip(value.shape, value.stride(), strict=True)
                width = 1 + sum((n - 1) * stride for n, stride in places)
                end = value.data_ptr() + width * value.element_size()
                spans.append((value.data_ptr(), end, kind == "trained", _called(kind, name)))
        before = 0, 0, False, ""
        for span in sorted(spans):
            if span[0] < before[1] and (span[2] or before[2]):
                first, second = sorted((before, span), key=lambda one: not one[2])
                raise ArgumentError(
                    f"{first[3]} and {second[3]} share memory, and would not when the first of "
                    "them has become part of a row. Register one Parameter in both places, which "
                    "counts once; or clone() one of them."
                )
            before = max(before, span, key=lambda one: one[1])

    def describe(self) -> dict[str, dict[str, str]]:
        """Return the words that ranks compare."""
        values = {}
        for name, (kind, value) in self.tensors.items():
            shape = tuple(value.shape)
            if kind == "buffer":
                values[f"buffer {name}"] = f"{value.dtype}, shape {shape}"
            else:
                values[name] = (
                    f"a {kind} parameter of {value.dtype} with gradients of "
                    f"{gradient_dtype(value)}, shape {shape}, on {value.device.type}"
                )
        groups = {str(number): str(names) for number, (names, _) in enumerate(self.groups)}
        return {"parameters and buffers": values, "groups of parameters": groups}


def _called(kind: str, name: str) -> str:
    return f"{'buffer' if kind == 'buffer' else 'parameter'} {name!r}"


def _wrong(value: torch.Tensor, trained: bool) -> str:
    """Return a reason to refuse a parameter or buffer, or an empty string."""
    if torch.nn.parameter.is_lazy(value):
        return "is not initialised yet. Call the model once before."
    if value.is_inference():
        return "was made in inference mode, and cannot be written to. Register its clone()."
    strides = zip(value.shape, value.stride(), strict=True)
    if not trained and any(stride == 0 and n > 1 for n, stride in strides):
        return "is an expanded view, and cannot be written to. Register its clone()."
    if trained and is_owned(value):
        return "belongs to another ShardedGradients. Call its close() first."
    if trained and value.grad is not None and bool(dense(value.grad).any()):
        return (
            "has a gradient already, which has not been summed. Call zero_grad() of the model "
            "before, and backward() after."
        )
    return ""


def read(params: Any, module: Any) -> Given:
    """Return the contents of `params`, by name, or raise ArgumentError."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
    if isinstance(params, torch.nn.Module):
        if module is not None and module is not params:
            raise ArgumentError("params is a Module, and module is another one. Leave out module.")
        module, params = params, params.named_parameters()
    known = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    if module is not None and any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        raise ArgumentError(
            "DistributedDataParallel communicates gradients itself. Pass the module within."
        )
    wanted = "a Module, or an iterable of parameters, of (name, parameter) or of dicts of them"
    items = _listed(params, "params", wanted)
    groups: list[tuple[list[str], dict[str, Any]]] = []
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    seen: dict[int, str] = {}
    for number, (members, options) in enumerate(_groups(items)):
        groups.append(([], options))
        for place, member in enumerate(members):
            name, parameter = _named(member, f"{number}.{place}")
            if module is not None and id(parameter) not in known:
                raise ArgumentError(f"parameter {name!r} is not in the module.")
            name = known.get(id(parameter), name)
            if id(parameter) in seen:
                first = seen[id(parameter)]
                raise ArgumentError(f"parameter {name!r} is given twice, first as {first!r}.")
            if name in tensors:
                raise ArgumentError(f"two parameters have the name {name!r}.")
            seen[id(parameter)] = name
            tensors[name] = "trained" if parameter.requires_grad else "frozen", parameter
            if parameter.requires_grad:
                groups[-1][0].append(name)
    for name, parameter in () if module is None else module.named_parameters():
        if id(parameter) not in seen and not is_owned(parameter):
            tensors[name] = "left out", parameter
    for name, buffer in () if module is None else module.named_buffers():
        tensors[name] = "buffer", buffer
    return Given(module, groups, tensors)


def _listed(params: Any, what: str, wanted: str) -> list[Any]:
    if isinstance(params, set | frozenset):
        raise ArgumentError(
            f"{what} is a set, whose order differs between ranks. Pass a list, in the same order "
            "on all."
        )
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ArgumentError(f"{what} must be {wanted}; got {type(params).__name__}.")
    return list(params)


def _groups(items: list[Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the members and the options of each group."""
    if not any(isinstance(item, Mapping) for item in items):
        return [(items, {})]
    found = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or "params" not in item:
            raise ArgumentError(
                'params holds dicts, and each must have its parameters under "params"; entry '
                f"{number} is {type(item).__name__}."
            )
        options = dict(item)
        members = options.pop("params")
        if isinstance(members, torch.Tensor):
            members = [members]
        what = f'"params" of group {number}'
        found.append((_listed(members, what, "an iterable of parameters"), options))
    return found


def _named(member: Any, name: str) -> tuple[str, torch.nn.Parameter]:
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
        name, member = member
    if not isinstance(member, torch.Tensor) or not member.is_leaf:
        kind = "a computed tensor" if isinstance(member, torch.Tensor) else type(member).__name__
        raise ArgumentError(
            f"params must hold parameters; {name!r} is {kind}. Pass the model, or "
            "model.named_parameters()."
        )
    return name, member  # type: ignore[return-value]
