"""Arguments of a ``ShardedGradients``: parameters by name, and settings; checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import dense, gradient_dtype
from varcomm.data_parallel.global_count import GlobalCount, described
from varcomm.data_parallel.owner import is_owned
from varcomm.data_parallel.sharded.reduction import Scaling, predivide_factor
from varcomm.data_parallel.sharded.split import WHOLE
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.sizes import at_least, checked_sizes
from varcomm.transport.engine import engine_for
from varcomm.transport.group import Group

__all__ = ["Given", "Settings", "read"]


@dataclass(frozen=True)
class Settings:
    """Arguments of ``ShardedGradients`` that are the same on all ranks."""

    sizes: object
    reduce: object
    fp32_reduce_scatter: bool
    gradient_predivide_factor: float | None
    fp32_masters: bool
    cpu_offload: bool
    overlap_forward: bool
    bucket_bytes: int

    @property
    def whole(self) -> bool:
        """Whether parameters have one owner."""
        return isinstance(self.sizes, str) and self.sizes == WHOLE

    def checked(self, module: torch.nn.Module | None, ranks: int) -> Settings:
        """Return the same with ints as sizes, or raise ArgumentError."""
        for name in ("fp32_reduce_scatter", "fp32_masters", "cpu_offload", "overlap_forward"):
            checked_flag(getattr(self, name), name, "")
        at_least(1, self.bucket_bytes, "bucket_bytes")
        described(self.reduce)
        factor = self.gradient_predivide_factor
        if factor is not None:
            number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not number or not isfinite(factor) or factor <= 0:
                raise ArgumentError(
                    f"gradient_predivide_factor must be a positive number; got {factor!r}."
                )
        if self.overlap_forward and module is None:
            raise ArgumentError(
                "overlap_forward=True needs the module whose forward waits for its parameters. "
                "Pass the model as params, or as module=..."
            )
        if isinstance(self.sizes, str):
            return self
        sizes = checked_sizes(self.sizes, "sizes", ranks)  # type: ignore[arg-type]
        return replace(self, sizes=sizes)

    def describe(self) -> dict[str, str]:
        """Return the words that ranks compare."""
        words = {name: repr(value) for name, value in vars(self).items()}
        if not isinstance(self.sizes, str):
            words["sizes"] = repr(list(self.sizes))  # type: ignore[call-overload]
        return words | {"reduce": described(self.reduce)}

    def scaling(self, ranks: int) -> Scaling:
        """Return the division of sums."""
        divisor = {"sum": 1.0, "mean": float(ranks)}.get(str(self.reduce))
        before = self.gradient_predivide_factor
        if before is None:
            before = predivide_factor(ranks) if self.reduce == "mean" else 1.0
        return Scaling(self.fp32_reduce_scatter, float(before), divisor)

    @property
    def count(self) -> GlobalCount | None:
        """The count by which sums are divided."""
        return self.reduce if isinstance(self.reduce, GlobalCount) else None

    def of_pieces(self, parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        """Return dtype and device of the values that the optimizer updates."""
        narrow = parameter.is_floating_point() and parameter.itemsize < 4
        dtype = torch.float32 if narrow and self.fp32_masters else parameter.dtype
        return dtype, torch.device("cpu") if self.cpu_offload else parameter.device


@dataclass(frozen=True)
class Given:
    """Parameters by name, in groups with options as torch's optimizers take them.

    Attributes
    ----------
    module : torch.nn.Module or None
    parameters, frozen : dict
        From name to parameter: the trained ones, and the others.
    others : dict
        Further parameters of the module, which are made equal and left alone; without those that
        another ShardedGradients has made equal.
    groups : list of (list of str, dict)
        Names of the trained ones in each group, and the group's options.
    """

    module: torch.nn.Module | None
    parameters: dict[str, torch.nn.Parameter]
    frozen: dict[str, torch.nn.Parameter]
    others: dict[str, torch.nn.Parameter]
    groups: list[tuple[list[str], dict[str, Any]]]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the module's buffers by name."""
        return {} if self.module is None else dict(self.module.named_buffers())

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are overwritten in place by rank 0's, each with its kind."""
        for name, value in {**self.frozen, **self.others}.items():
            yield f"parameter {name!r}", value
        for name, buffer in self.buffers().items():
            yield f"buffer {name!r}", buffer

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and no other ShardedGradients sums the gradients."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(
                "torch.inference_mode() allows no gradients of the parameters. Leave that mode."
            )
        if not self.parameters:
            frozen = f"all {len(self.frozen)} are frozen" if self.frozen else "there are none"
            raise ArgumentError(f"no parameter is trained: {frozen}.")
        trained: dict[str, torch.Tensor] = {
            f"parameter {name!r}": value for name, value in self.parameters.items()
        }
        devices = list(dict.fromkeys(str(value.device) for value in trained.values()))
        if len(devices) > 1:
            first = next(w for w, value in trained.items() if str(value.device) == devices[1])
            raise ArgumentError(
                f"parameters are on several devices, {' and '.join(devices)}: {first} is on the "
                "second. Make a ShardedGradients for those of each device."
            )
        others = dict(self.written())
        for what, value in {**trained, **others}.items():
            _check_value(value, what, group)
        for what, value in others.items():
            if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
                raise ArgumentError(
                    f"{what} is an expanded view, and cannot be written to. Register its clone()."
                )
        for what, value in trained.items():
            if is_owned(value):
                raise ArgumentError(
                    f"{what} belongs to another ShardedGradients. Call its close() first."
                )
            if value.grad is not None and bool(dense(value.grad).any()):
                raise ArgumentError(
                    f"{what} has a gradient already, which has not been summed. Call zero_grad() "
                    "of the model before, and backward() after."
                )
        _check_memory(trained, others)

    def describe(self) -> dict[str, dict[str, str]]:
        """Return the words that ranks compare."""
        values = {}
        kinds = {"trained": self.parameters, "frozen": self.frozen, "left out": self.others}
        for kind, some in kinds.items():
            for name, parameter in some.items():
                values[name] = (
                    f"a {kind} parameter of {parameter.dtype} with gradients of "
                    f"{gradient_dtype(parameter)}, shape {tuple(parameter.shape)}, on "
                    f"{parameter.device.type}"
                )
        for name, buffer in self.buffers().items():
            values[f"buffer {name}"] = f"{buffer.dtype}, shape {tuple(buffer.shape)}"
        groups = {str(number): str(names) for number, (names, _) in enumerate(self.groups)}
        return {"parameters and buffers": values, "groups of parameters": groups}


def _check_value(value: torch.Tensor, what: str, group: Group) -> None:
    if torch.nn.parameter.is_lazy(value):
        raise ArgumentError(f"{what} is not initialised yet. Call the model once before.")
    checked_tensor(value, "", what)
    if value.is_inference():
        raise ArgumentError(
            f"{what} was made in inference mode, and cannot be written to. Register its clone()."
        )
    engine_for(group, value.device)


def _check_memory(trained: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    """Raise if a parameter that is to move overlaps another tensor in one storage."""
    spans = []
    for what, value in {**others, **trained}.items():
        if value.numel() and not value.is_meta:
            width = 1 + sum(
                (n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)
            )
            begin = value.data_ptr()
            spans.append((begin, begin + width * value.element_size(), what))
    spans.sort()
    end, last = 0, ""
    for begin, stop, what in spans:
        if begin < end and (what in trained or last in trained):
            first, second = sorted((last, what), key=lambda name: name not in trained)
            raise ArgumentError(
                f"{first} and {second} share memory, and would not when the first of them has "
                "become part of a row. Register one Parameter in both places, which counts once; "
                "or clone() one of them."
            )
        if stop > end:
            end, last = stop, what


def read(params: object, module: object) -> Given:
    """Return the contents of `params`, by name, or raise ArgumentError."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
    if isinstance(params, torch.nn.Module):
        if module is not None and module is not params:
            raise ArgumentError("params is a Module, and module is another one. Leave out module.")
        module = params
        params = params.named_parameters()
    if module is not None and any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        raise ArgumentError(
            "DistributedDataParallel communicates gradients itself. Pass the module within."
        )
    _check_order(params, "params")
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ArgumentError(
            "params must be a Module, or an iterable of parameters, of (name, parameter) or of "
            f"dicts of them; got {type(params).__name__}."
        )
    known = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    trained: dict[str, torch.nn.Parameter] = {}
    frozen: dict[str, torch.nn.Parameter] = {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    seen: dict[int, str] = {}
    for number, (members, options) in enumerate(_groups(list(params))):
        names = []
        for place, member in enumerate(members):
            name, parameter = _named(member, f"{number}.{place}", module, known)
            if id(parameter) in seen:
                raise ArgumentError(
                    f"parameter {name!r} is given twice, first as {seen[id(parameter)]!r}."
                )
            if name in trained or name in frozen:
                raise ArgumentError(f"two parameters have the name {name!r}.")
            seen[id(parameter)] = name
            if parameter.requires_grad:
                trained[name] = parameter
                names.append(name)
            else:
                frozen[name] = parameter
        groups.append((names, options))
    others = {}
    if module is not None:
        others = {
            name: p
            for name, p in module.named_parameters()
            if id(p) not in seen and not is_owned(p)
        }
    return Given(module, trained, frozen, others, groups)


def _check_order(params: object, what: str) -> None:
    if isinstance(params, set | frozenset):
        raise ArgumentError(
            f"{what} is a set, whose order differs between ranks. Pass a list, in the same order "
            "on all."
        )


def _groups(items: Sequence[object]) -> list[tuple[list[object], dict[str, Any]]]:
    if not any(isinstance(item, Mapping) for item in items):
        return [(list(items), {})]
    found = []
    for number, item in enumerate(items):
        members = item.get("params") if isinstance(item, Mapping) else None
        _check_order(members, f'"params" of group {number}')
        if isinstance(members, torch.Tensor):
            members = [members]
        if not isinstance(item, Mapping) or not isinstance(members, Iterable):
            raise ArgumentError(
                'params holds dicts, and each must have its parameters under "params"; entry '
                f"{number} is {type(item).__name__}."
            )
        options = {key: value for key, value in item.items() if key != "params"}
        found.append((list(members), options))
    return found


def _named(
    member: object, name: str, module: torch.nn.Module | None, known: Mapping[int, str]
) -> tuple[str, torch.nn.Parameter]:
    """Return name and parameter; in a module, the name that it has there."""
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
        name, member = member
    if not isinstance(member, torch.Tensor) or not member.is_leaf:
        kind = "a computed tensor" if isinstance(member, torch.Tensor) else type(member).__name__
        raise ArgumentError(
            f"params must hold parameters; {name!r} is {kind}. Pass the model, or "
            "model.named_parameters()."
        )
    if module is not None:
        if id(member) not in known:
            raise ArgumentError(f"parameter {name!r} is not in the module.")
        name = known[id(member)]
    return name, member  # type: ignore[return-value]
