"""Parameters and buffers of a ``ShardedGradients``, by name, as ranks compare them; checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import IS_SHARDED, gradient_dtype, is_owned
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor, is_sharded_over
from varcomm.sharding.sharded import refuse_unwritable
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Group

NAME = "ShardedGradients"
ANOTHER = "Call close() and make another, on all ranks."


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
    """Parameters by name, in groups with options as torch's optimizers take them."""

    module: torch.nn.Module | None
    groups: list[tuple[list[str], dict[str, Any]]]  # names of trained parameters, and options
    trained: dict[str, torch.nn.Parameter]
    others: dict[str, torch.Tensor]  # frozen parameters and buffers, which rank 0 overwrites

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
        buffers = {} if module is None else dict(module.named_buffers())
        found = cls(module, [], {}, {f"buffer {name!r}": b for name, b in buffers.items()})
        seen: set[str | int] = set()
        for number, group in enumerate(_Groups(params).param_groups):
            options, members = dict(group), group["params"]
            del options["params"]
            names = options.pop("param_names", [f"{number}.{n}" for n in range(len(members))])
            for name, parameter in zip(names, members, strict=True):
                if not seen.isdisjoint((name, id(parameter))):
                    raise ArgumentError(f"parameter {name!r}, or its name, is given twice.")
                seen |= {name, id(parameter)}
                if parameter.requires_grad:
                    found.trained[name] = parameter
                else:
                    found.others[f"parameter {name!r}"] = parameter
            found.groups.append(([name for name in names if name in found.trained], options))
        return found

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and no other ShardedGradients sums the gradients."""
        if not self.trained:
            raise ArgumentError("no parameter is trained: all are frozen.")
        for what, value in self._described().items():
            if torch.nn.parameter.is_lazy(value):
                raise ArgumentError(f"{what} is not initialised. Call the model once before.")
            checked_tensor(value, "", what)
            refuse_unwritable(what, value)
            engine_for(group, value.device)
            if is_sharded_over(value, group):
                raise ArgumentError(f"{what} {IS_SHARDED}")
            if is_owned(value):
                raise ArgumentError(
                    f"{what} belongs to another ShardedGradients. Call its close() first."
                )
        self._check_memory()

    def _described(self) -> dict[str, torch.Tensor]:
        return {f"parameter {name!r}": p for name, p in self.trained.items()} | self.others

    def _check_memory(self) -> None:
        """Raise if a parameter that is to move overlaps another tensor in one storage."""
        spans, moving = [], {id(value) for value in self.trained.values()}
        for what, value in self._described().items():
            if value.numel() and not value.is_meta:
                places = zip(value.shape, value.stride(), strict=True)
                width = 1 + sum((n - 1) * stride for n, stride in places)
                end = value.data_ptr() + width * value.element_size()
                spans.append((value.data_ptr(), end, id(value) in moving, what))
        end, moves, last = 0, False, ""
        for start, stop, is_moving, what in sorted(spans):
            if start < end and (moves or is_moving):
                raise ArgumentError(
                    f"{last} and {what} share memory, and would not when one of them has become "
                    "part of a row. Register one Parameter in both places, which counts once; or "
                    "clone() one of them."
                )
            if stop > end:
                end, moves, last = stop, is_moving, what

    def describe(self) -> dict[str, str]:
        """Return the words that ranks compare."""
        words = {
            what: f"{value.dtype} with gradients of {gradient_dtype(value)}, "
            f"{'trained' if value.requires_grad else 'frozen'}, shape {tuple(value.shape)}, "
            f"on {value.device.type}"
            for what, value in self._described().items()
        }
        groups = {f"group {number}": str(names) for number, (names, _) in enumerate(self.groups)}
        return words | groups
