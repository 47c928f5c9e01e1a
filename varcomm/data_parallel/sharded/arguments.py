"""Parameters and buffers of a ``ShardedGradients``, by name, as ranks compare them; checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import dense, gradient_dtype, is_owned
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor
from varcomm.sharding.sharded import refuse_unwritable
from varcomm.transport.engine import engine_for
from varcomm.transport.group import Group

__all__ = ["NAME", "Given"]

NAME = "ShardedGradients"


class _Groups(torch.optim.Optimizer):
    """Torch's own reading of parameters, with names, in groups with options."""

    def __init__(self, params: Any) -> None:
        if isinstance(params, set | frozenset):
            raise ArgumentError(
                "params is a set, whose order differs between ranks. Pass a list, in the same "
                "order on all."
            )
        if not isinstance(params, torch.Tensor):  # groups are copied, because torch changes them
            params = [dict(one) if isinstance(one, Mapping) else one for one in params]
        super().__init__(params, {})


@dataclass(frozen=True)
class Given:
    """Parameters by name, in groups with options as torch's optimizers take them.

    `groups` holds for each group the names of the trained parameters, and the options. `others` are
    frozen parameters and the module's buffers, which rank 0 overwrites.
    """

    module: torch.nn.Module | None
    groups: list[tuple[list[str], dict[str, Any]]]
    trained: dict[str, torch.nn.Parameter]
    frozen: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, params: Any) -> Given:
        """Read a Module, or the parameters for an optimizer of torch's."""
        module = params if isinstance(params, torch.nn.Module) else None
        if module is not None:
            params = list(module.named_parameters())
            if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
                raise ArgumentError(
                    "DistributedDataParallel communicates gradients itself. Pass the module within."
                )
        found = cls(module, [], {}, {}, {} if module is None else dict(module.named_buffers()))
        seen: set[str | int] = set()
        for number, group in enumerate(_Groups(params).param_groups):
            options, members = dict(group), group["params"]
            del options["params"]
            names = options.pop("param_names", [f"{number}.{n}" for n in range(len(members))])
            for name, parameter in zip(names, members, strict=True):
                if not seen.isdisjoint((name, id(parameter))):
                    raise ArgumentError(f"parameter {name!r}, or its name, is given twice.")
                seen |= {name, id(parameter)}
                kind = found.trained if parameter.requires_grad else found.frozen
                kind[name] = parameter
            found.groups.append(([name for name in names if name in found.trained], options))
        return found

    @property
    def others(self) -> list[torch.Tensor]:
        """Tensors without gradients, in an order that does not depend on registration."""
        return [of[name] for of in (self.frozen, self.buffers) for name in sorted(of)]

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and no other ShardedGradients sums the gradients."""
        if not self.trained:
            raise ArgumentError(f"no parameter is trained: all {len(self.frozen)} are frozen.")
        first: dict[torch.device, str] = {}
        for name, parameter in self.trained.items():
            first.setdefault(parameter.device, name)
        if len(first) > 1:
            raise ArgumentError(
                f"parameters are on several devices, {' and '.join(map(str, first))}: parameter "
                f"{list(first.values())[1]!r} is on the second. Make a ShardedGradients for those "
                "of each device."
            )
        for what, value in self._described():
            if torch.nn.parameter.is_lazy(value):
                raise ArgumentError(f"{what} is not initialised. Call the model once before.")
            checked_tensor(value, "", what)
            refuse_unwritable(what, value)
            engine_for(group, value.device)
        for name, parameter in self.trained.items():
            if is_owned(parameter):
                raise ArgumentError(
                    f"parameter {name!r} belongs to another ShardedGradients. Call its close() "
                    "first."
                )
            if parameter.grad is not None and bool(dense(parameter.grad).any()):
                raise ArgumentError(
                    f"parameter {name!r} has a gradient already, which has not been summed. Call "
                    "zero_grad() of the model before, and backward() after."
                )
        self._check_memory()

    def _described(self) -> list[tuple[str, torch.Tensor]]:
        parameters = {**self.trained, **self.frozen}
        return [
            *((f"parameter {name!r}", value) for name, value in parameters.items()),
            *((f"buffer {name!r}", value) for name, value in self.buffers.items()),
        ]

    def _check_memory(self) -> None:
        """Raise if a parameter that is to move overlaps another tensor in one storage."""
        spans, moving = [], {id(value) for value in self.trained.values()}
        for what, value in self._described():
            if value.numel() and not value.is_meta:
                places = zip(value.shape, value.stride(), strict=True)
                width = 1 + sum((n - 1) * stride for n, stride in places)
                end = value.data_ptr() + width * value.element_size()
                spans.append((value.data_ptr(), end, id(value) in moving, what))
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
        values, buffers = {}, {f"buffer {name}": value for name, value in self.buffers.items()}
        kinds: dict[str, Mapping[str, torch.Tensor]]
        kinds = {"trained": self.trained, "frozen": self.frozen, "untrained": buffers}
        for kind, tensors in kinds.items():
            for name, value in tensors.items():
                values[name] = (
                    f"a {kind} tensor of {value.dtype} with gradients of {gradient_dtype(value)}, "
                    f"shape {tuple(value.shape)}, on {value.device.type}"
                )
        groups = {str(number): str(names) for number, (names, _) in enumerate(self.groups)}
        return {"parameters and buffers": values, "groups of parameters": groups}
