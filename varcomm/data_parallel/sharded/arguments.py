"""Arguments of a ``ShardedGradients``: parameters by name, and settings; checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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

__all__ = ["NAME", "Given", "Settings", "checked_number", "read"]

NAME = "ShardedGradients"


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
    factor = 1
    while factor * factor < ranks:
        factor *= 2
    return float(factor)


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

    `others` are further parameters of the module, which are made equal and left alone; without
    those that another ShardedGradients has made equal. `groups` holds for each group the names of
    the trained parameters, and the options.
    """

    module: torch.nn.Module | None
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # trained
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    others: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the module's buffers by name."""
        return {} if self.module is None else dict(self.module.named_buffers())

    def written(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are overwritten in place by rank 0's, by kind and name."""
        left = {f"parameter {name!r}": p for name, p in (self.frozen | self.others).items()}
        return {**left, **{f"buffer {name!r}": b for name, b in self.buffers().items()}}

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and no other ShardedGradients sums the gradients."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(
                "torch.inference_mode() allows no gradients of the parameters. Leave that mode."
            )
        if not self.parameters:
            frozen = f"all {len(self.frozen)} are frozen" if self.frozen else "there are none"
            raise ArgumentError(f"no parameter is trained: {frozen}.")
        trained = {f"parameter {name!r}": value for name, value in self.parameters.items()}
        written = self.written()
        first: dict[torch.device, str] = {}
        for what, value in trained.items():
            first.setdefault(value.device, what)
        if len(first) > 1:
            raise ArgumentError(
                f"parameters are on several devices, {' and '.join(map(str, first))}: "
                f"{list(first.values())[1]} is on the second. Make a ShardedGradients for those of "
                "each device."
            )
        for what, value in (*trained.items(), *written.items()):
            checked_tensor(value, "", what)
            if wrong := _wrong(value, what in trained):
                raise ArgumentError(f"{what} {wrong}")
            engine_for(group, value.device)
        _check_memory(trained, written)

    def describe(self) -> dict[str, dict[str, str]]:
        """Return the words that ranks compare."""
        kinds = {"trained": self.parameters, "frozen": self.frozen, "left out": self.others}
        values = {
            name: f"a {kind} parameter of {parameter.dtype} with gradients of "
            f"{gradient_dtype(parameter)}, shape {tuple(parameter.shape)}, on "
            f"{parameter.device.type}"
            for kind, some in kinds.items()
            for name, parameter in some.items()
        }
        for name, buffer in self.buffers().items():
            values[f"buffer {name}"] = f"{buffer.dtype}, shape {tuple(buffer.shape)}"
        groups = {str(number): str(names) for number, (names, _) in enumerate(self.groups)}
        return {"parameters and buffers": values, "groups of parameters": groups}


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


def _check_memory(trained: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
    """Raise if a parameter that is to move overlaps another tensor in one storage."""
    spans = []
    for what, value in {**written, **trained}.items():
        if value.numel() and not value.is_meta:
            places = zip(value.shape, value.stride(), strict=True)
            width = 1 + sum((n - 1) * stride for n, stride in places)
            begin = value.data_ptr()
            spans.append((begin, begin + width * value.element_size(), what))
    end, last = 0, ""
    for begin, stop, what in sorted(spans):
        if begin < end and (what in trained or last in trained):
            first, second = sorted((last, what), key=lambda name: name not in trained)
            raise ArgumentError(
                f"{first} and {second} share memory, and would not when the first of them has "
                "become part of a row. Register one Parameter in both places, which counts once; "
                "or clone() one of them."
            )
        if stop > end:
            end, last = stop, what


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
    items = _listed(
        params,
        "params",
        "a Module, or an iterable of parameters, of (name, parameter) or of dicts of them",
    )
    given = Given(module)
    seen: dict[int, str] = {}
    for number, (members, options) in enumerate(_groups(items)):
        names = []
        for place, member in enumerate(members):
            name, parameter = _named(member, f"{number}.{place}")
            if module is not None and id(parameter) not in known:
                raise ArgumentError(f"parameter {name!r} is not in the module.")
            name = known.get(id(parameter), name)
            if id(parameter) in seen:
                raise ArgumentError(
                    f"parameter {name!r} is given twice, first as {seen[id(parameter)]!r}."
                )
            if name in seen.values():
                raise ArgumentError(f"two parameters have the name {name!r}.")
            seen[id(parameter)] = name
            if parameter.requires_grad:
                names.append(name)
            (given.parameters if parameter.requires_grad else given.frozen)[name] = parameter
        given.groups.append((names, options))
    left = () if module is None else module.named_parameters()
    given.others.update({n: p for n, p in left if id(p) not in seen and not is_owned(p)})
    return given


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
