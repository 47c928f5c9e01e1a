"""What a user passes as parameters, read and checked, and what ranks must have alike of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from varcomm.data_parallel.buckets import dense, gradient_dtype
from varcomm.data_parallel.sharded.memory import overlapping
from varcomm.data_parallel.taken import is_taken
from varcomm.data_parallel.values import check_mode, check_module, check_value, check_writable
from varcomm.data_parallel.watching import replicas_of
from varcomm.errors import ArgumentError
from varcomm.transport.group import Group

__all__ = ["Given", "read"]


@dataclass(frozen=True)
class Given:
    """Parameters by name, in groups with options as torch's optimizers take them.

    Attributes
    ----------
    module : torch.nn.Module or None
        Whose output is tied to the sums.
    parameters : dict
        From name to parameter: those that are trained.
    frozen : dict
        The same of those that are not.
    others : dict
        The same of those that the module has besides: they are made equal, and left alone. Those
        that somebody else has made equal are not here.
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
        """Yield what is overwritten in place by the values of rank 0, and what it is."""
        for name, value in {**self.frozen, **self.others}.items():
            yield f"parameter {name!r}", value
        for name, buffer in self.buffers().items():
            yield f"buffer {name!r}", buffer

    def with_gradient(self) -> str | None:
        """Return the name of a parameter that has a gradient other than zeros, if there is one."""
        for name, value in self.parameters.items():
            grad = value.grad
            if grad is not None and bool(dense(grad).any()):
                return name
        return None

    def check(self, group: Group) -> None:
        """Raise unless all can be sent, and nobody else sums the gradients."""
        check_mode()
        if self.module is not None:
            check_module(self.module)
        trained: dict[str, torch.Tensor] = {
            f"parameter {name!r}": value for name, value in self.parameters.items()
        }
        others = dict(self.written())
        if not trained:
            frozen = f"all {len(self.frozen)} are frozen" if self.frozen else "there are none"
            raise ArgumentError(f"no parameter is trained: {frozen}.")
        devices = list(dict.fromkeys(str(value.device) for value in trained.values()))
        if len(devices) > 1:
            first = next(w for w, value in trained.items() if str(value.device) == devices[1])
            raise ArgumentError(
                f"parameters are on several devices, {' and '.join(devices)}: {first} is on the "
                "second. Make a ShardedGradients for those of each device."
            )
        for what, value in {**trained, **others}.items():
            check_value(value, what, group)
        for what, value in others.items():
            check_writable(value, what)
        for what, value in trained.items():
            if replicas_of(value):
                raise ArgumentError(
                    f"{what} is replicated: its gradients would be summed twice. Take either "
                    "replicate, with any optimizer, or ShardedGradients."
                )
            if is_taken(value):
                raise ArgumentError(
                    f"{what} belongs to another ShardedGradients. Call its close() first."
                )
        if (both := overlapping(trained, others)) is not None:
            raise ArgumentError(
                f"{both[0]} and {both[1]} share memory, and would not when the first of them has "
                "become part of a row. Register one Parameter in both places, which counts once; "
                "or clone() one of them."
            )
        if (name := self.with_gradient()) is not None:
            raise ArgumentError(
                f"parameter {name!r} has a gradient already, which nobody has summed. Call "
                "zero_grad() of the model before, and backward() after."
            )

    def describe(self) -> dict[str, dict[str, str]]:
        """Return what must be the same on all ranks."""
        values = {}
        kinds = {"trained": self.parameters, "frozen": self.frozen, "left out": self.others}
        both = ((kind, *item) for kind, some in kinds.items() for item in some.items())
        for kind, name, parameter in both:
            values[name] = (
                f"a {kind} parameter of {parameter.dtype} with gradients of "
                f"{gradient_dtype(parameter)}, shape {tuple(parameter.shape)}, on "
                f"{parameter.device.type}"
            )
        for name, buffer in self.buffers().items():
            values[f"buffer {name}"] = f"{buffer.dtype}, shape {tuple(buffer.shape)}"
        groups = {str(number): str(names) for number, (names, _) in enumerate(self.groups)}
        return {"parameters and buffers": values, "groups of parameters": groups}


def read(params: object, module: object) -> Given:
    """Return what `params` holds, by name.

    Raises
    ------
    ArgumentError
        If it holds anything else than ``ShardedGradients`` takes, or something twice.
    """
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
    others = {} if module is None else _others(module, seen)
    return Given(module, trained, frozen, others, groups)


def _others(module: torch.nn.Module, given: Mapping[int, str]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that were not given, but for those that others make equal."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) not in given
        and (is_lazy(parameter) or not (is_taken(parameter) or replicas_of(parameter)))
    }


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
    """Return the name and the parameter; in a module, the name that it has there."""
    own = isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)
    if isinstance(member, tuple) and own:
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
