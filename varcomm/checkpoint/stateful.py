"""Objects with state: the tree that is saved, the targets of a load, and how they take it.

Modules and optimizers name their tensors; a generator has one tensor; any other object has
``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from varcomm.checkpoint.annotations import PerRank
from varcomm.checkpoint.paths import Keys, at, joined, prefix_hint
from varcomm.checkpoint.shards import is_whole, wrapped
from varcomm.errors import ArgumentError
from varcomm.sharding import Sharded, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)

__all__ = ["Early", "Holder", "Modules", "holder_of", "is_stateful", "modules_in"]

# The modules of a state by their paths.
Modules = Mapping[Keys, torch.nn.Module]

# The last name of a module's extra state in its state_dict.
_EXTRA_STATE = "_extra_state"


@dataclass
class Early:
    """Targets that an object may refuse; they are loaded before any tensor is overwritten."""

    value: Any


class Holder(ABC):
    """An object with state, wrapped for one save or one load."""

    @abstractmethod
    def tree(self) -> Any:
        """Return its state: nested dicts and lists of tensors and plain values."""

    @abstractmethod
    def targets(self, saved: Any) -> Any:
        """Return the tree to load into; `saved` is the saved tree, with tensors on meta."""

    @abstractmethod
    def take(self, tree: Any, early: bool) -> None:
        """Take loaded targets: the Early ones first, or refuse them; the others at the end."""


def is_stateful(value: Any) -> bool:
    """Return whether a value is an object with state."""
    if isinstance(value, torch.nn.Module | torch.Generator):
        return True
    return _can(value, "state_dict") and (
        _can(value, "state_dict_for") or _can(value, "load_state_dict")
    )


def _can(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))


def holder_of(value: Any, modules: Modules) -> Holder | None:
    """Return the Holder of an object with state, or None."""
    if not is_stateful(value):
        return None
    if isinstance(value, torch.nn.Module):
        return _Module(value)
    if isinstance(value, torch.Generator):
        return _Generator(value)
    if isinstance(value, torch.optim.Optimizer) and not _can(value, "state_dict_for"):
        return _Optimizer(value, modules)
    return _Object(value)


def modules_in(state: Any, path: Keys = ()) -> dict[Keys, torch.nn.Module]:
    """Return the modules of a nested state by their paths."""
    if isinstance(state, torch.nn.Module):
        return {path: state}
    if isinstance(state, PerRank):
        return modules_in(state.value, path)
    items: list[tuple[Any, Any]] = []
    if isinstance(state, Mapping):
        items = list(state.items())
    elif isinstance(state, list):
        items = [((number,), value) for number, value in enumerate(state)]
    return {
        where: module
        for name, value in items
        for where, module in modules_in(value, (*path, name)).items()
    }


@dataclass(frozen=True)
class _Module(Holder):
    """A module: its parameters and buffers in place; extra state and copies made by hooks early."""

    module: torch.nn.Module

    @cached_property
    def _state(self) -> dict[str, Any]:
        # the parameters themselves: copies lose their marks
        found = dict(self.module.state_dict(keep_vars=True))
        if lazy := [name for name, value in found.items() if is_lazy(value)]:
            raise ArgumentError(
                f"{lazy[0]!r} of a {type(self.module).__name__} has no shape yet. Run the module "
                "once first."
            )
        return found

    @cached_property
    def _in_place(self) -> set[str]:
        state = self._state  # first: fully_shard replaces parameters in state_dict()
        held = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        return {name for name, value in state.items() if id(value) in held}

    def tree(self) -> dict[str, Any]:
        return {
            name: wrapped(value) if isinstance(value, torch.Tensor) else value
            for name, value in self._state.items()
        }

    def targets(self, saved: Any) -> dict[str, Any]:
        def copy(name: str, own: Any) -> Any:
            value = at(saved, (name,), own)
            # only extra state may change its shape
            same = isinstance(own, torch.Tensor) and not name.endswith(_EXTRA_STATE)
            return _copied(own if same else value, own)

        return {
            name: value if name in self._in_place else Early(copy(name, value))
            for name, value in self.tree().items()
        }

    def take(self, tree: Any, early: bool) -> None:
        # a module with both kinds takes them twice: hooks may derive tensors from parameters
        if len(self._in_place) == (len(tree) if early else 0):
            return
        told = {name: item.value for name, item in tree.items() if isinstance(item, Early)}
        self.module.load_state_dict({**self._state, **told})


@dataclass(frozen=True)
class _Optimizer(Holder):
    """An optimizer of torch's; its states have the names of parameters."""

    optimizer: torch.optim.Optimizer
    modules: Modules

    def tree(self) -> dict[str, Any]:
        return optimizer_state(self.optimizer, *self._parts())

    def targets(self, saved: Any) -> dict[str, Any]:
        parts, names = self._parts()
        if not isinstance(at(saved, ("param_groups",)), list):
            raise ArgumentError("the saved value is not the state of an optimizer.")
        if "masters" in saved:
            raise ArgumentError(
                "the saved optimizer has fp32 masters of the parameters, and a plain optimizer "
                "has none. Load it into a ShardedGradients with fp32_masters=False, and save that."
            )
        groups = [list(group.get("params", [])) for group in saved["param_groups"]]
        if groups != names:
            hint = prefix_hint((n for g in names for n in g), (n for g in groups for n in g))
            raise ArgumentError(
                f"the saved optimizer has groups of parameters {_short(groups)}, and this one "
                f"{_short(names)}.{hint}"
            )
        found = optimizer_state_for(self.optimizer, parts, names, saved)
        return {"state": found["state"], "param_groups": _filled(found, saved)}

    def take(self, tree: Any, early: bool) -> None:
        if not early:
            load_optimizer_state(self.optimizer, *self._parts(), tree)

    def _parts(self) -> tuple[dict[torch.Tensor, Part], list[list[str]]]:
        self._check_kind()
        named = self._names()
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                if param not in named:
                    raise ArgumentError(
                        f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is "
                        "in no module of the state. Optimizers are saved by the names of "
                        "parameters: add the module to the state."
                    )
        names = [[named[param] for param in group["params"]] for group in groups]
        parts = {
            param: Part(named[param], _wrap_like(param))
            for group in groups
            for param in group["params"]
        }
        return parts, names

    def _check_kind(self) -> None:
        """Raise ArgumentError if an optimizer keeps states elsewhere than torch's optimizers."""
        kind = type(self.optimizer)
        advice = (
            "Its states cannot be saved by the names of parameters. To shard states over ranks, "
            "use varcomm.data_parallel.ShardedGradients; otherwise save an object whose "
            "state_dict and load_state_dict call those of the optimizer, inside PerRank if each "
            "rank has its own."
        )
        for method in ("state_dict", "load_state_dict"):
            if getattr(kind, method) is not getattr(torch.optim.Optimizer, method):
                raise ArgumentError(f"{kind.__name__} has a {method} of its own. {advice}")
        params = {param for group in self.optimizer.param_groups for param in group["params"]}
        if others := [key for key in self.optimizer.state if key not in params]:
            raise ArgumentError(
                f"the states of {kind.__name__} have a key {_short(others[0])}, which is not a "
                f"parameter of its groups. {advice}"
            )

    def _names(self) -> dict[torch.Tensor, str]:
        """Return the names of parameters, with the path of the module if there are several."""
        left = {param for group in self.optimizer.param_groups for param in group["params"]}
        found: dict[Keys, dict[torch.nn.Parameter, str]] = {}
        for path, module in self.modules.items():
            named = {param: name for name, param in module.named_parameters() if param in left}
            left -= named.keys()
            if named:
                found[path] = named
        return {
            param: name if len(found) == 1 else f"{joined(path)}.{name}"
            for path, named in found.items()
            for param, name in named.items()
        }


def _wrap_like(param: torch.Tensor) -> Any:
    spec = shard_spec(param)
    return (lambda tensor: tensor) if spec is None else (lambda tensor: Sharded.of(tensor, spec))


def _filled(found: Mapping[str, Any], saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved options of groups; those that are tensors as targets."""

    def target(value: Any, own: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(own, torch.Tensor):
            return own if isinstance(value, torch.Tensor) else value
        return torch.empty_like(value, device="cpu")

    return [
        {key: target(value, own.get(key)) for key, value in group.items()}
        for own, group in zip(found["param_groups"], saved["param_groups"], strict=True)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


@dataclass(frozen=True)
class _Generator(Holder):
    """A generator of random numbers."""

    generator: torch.Generator

    def tree(self) -> torch.Tensor:
        return self.generator.get_state()

    def targets(self, saved: Any) -> Early:
        return Early(self.tree())

    def take(self, tree: Any, early: bool) -> None:
        if early:
            self.generator.set_state(tree.value)


@dataclass(frozen=True)
class _Object(Holder):
    """An object with `state_dict`; it may refuse its state unless it makes its own targets."""

    held: Any

    def tree(self) -> Any:
        return self.held.state_dict()

    def targets(self, saved: Any) -> Any:
        if _can(self.held, "state_dict_for"):
            return self.held.state_dict_for(saved)
        return Early(_copied(saved, self.tree()))

    def take(self, tree: Any, early: bool) -> None:
        if isinstance(tree, Early) == early:
            self.held.load_state_dict(tree.value if early else tree)


def _copied(saved: Any, own: Any) -> Any:
    """Return the saved tree with tensors to load into; sharded ones are the object's own."""
    if isinstance(saved, Mapping):
        return {name: _copied(value, at(own, (name,))) for name, value in saved.items()}
    if isinstance(saved, list):
        return [_copied(value, at(own, ((number,),))) for number, value in enumerate(saved)]
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(own, torch.Tensor) and not is_whole(own):
        return own
    return torch.empty_like(saved, device=own.device if isinstance(own, torch.Tensor) else "cpu")
