"""Objects that hold state: what of it is saved, where it is loaded to, and how they take it.

Modules and optimizers name their tensors and know which are parts of what; generators have one;
any other object has ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from varcomm.checkpoint.boxes import is_whole, wrapped
from varcomm.checkpoint.kinds import PerRank
from varcomm.checkpoint.nested import Keys, at, joined, prefix_hint
from varcomm.errors import ArgumentError
from varcomm.sharding import Sharded, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)

__all__ = ["Early", "Holder", "Modules", "holder_of", "modules_in"]

# The modules in a state, by where they are.
Modules = Mapping[Keys, torch.nn.Module]


@dataclass
class Early:
    """Targets that are no part of what an object holds, and that it may refuse when it gets them.

    They are loaded first, so that nothing has been overwritten then.
    """

    value: Any


class Holder(ABC):
    """An object that holds state; made anew for each save and each load."""

    @abstractmethod
    def tree(self) -> Any:
        """Return its state: nested dicts and lists of tensors and plain values."""

    def targets(self, saved: Any) -> Any:
        """Return the tensors to be loaded into, and plain values in the places of such.

        `saved` is what was saved, with tensors on the meta device in the places of tensors.
        """
        return self.tree()

    @abstractmethod
    def take(self, tree: Any, early: bool) -> None:
        """Take targets: once those that are Early, or refuse them, and again when all are there."""


def holder_of(value: Any, modules: Modules) -> Holder | None:
    """Return how the state of an object is told, or None if it is no such object."""
    if isinstance(value, torch.nn.Module):
        return _Module(value)
    if isinstance(value, torch.Generator):
        return _Generator(value)
    if callable(getattr(value, "state_dict", None)):
        if callable(getattr(value, "state_dict_for", None)):
            return _Shaped(value)
        if isinstance(value, torch.optim.Optimizer):
            return _Optimizer(value, modules)
        if callable(getattr(value, "load_state_dict", None)):
            return _Object(value)
    return None


def modules_in(state: Any, path: Keys = ()) -> dict[Keys, torch.nn.Module]:
    """Return the modules in a nested state, by where they are."""
    if isinstance(state, torch.nn.Module):
        return {path: state}
    if isinstance(state, PerRank):
        return modules_in(state.value, path)
    if isinstance(state, Mapping):
        items = list(state.items())
    elif isinstance(state, list):
        items = list(enumerate(state))
    else:
        return {}
    return {
        where: module
        for name, value in items
        for where, module in modules_in(value, (*path, name)).items()
    }


@dataclass(frozen=True)
class _Module(Holder):
    """A module: parameters and buffers as `state_dict` names them, marked ones as parts.

    What else it tells, its extra state or copies that hooks have made, only it can put back.
    """

    module: torch.nn.Module

    @cached_property
    def _state(self) -> dict[str, Any]:
        # the parameters themselves, since copies of them would have lost their marks
        found = dict(self.module.state_dict(keep_vars=True))
        if lazy := [name for name, value in found.items() if is_lazy(value)]:
            raise ArgumentError(
                f"{lazy[0]!r} of a {type(self.module).__name__} has no shape yet. Run the module "
                "once before."
            )
        return found

    @cached_property
    def _in_place(self) -> set[str]:
        state = self._state  # first: fully_shard exchanges parameters when it is asked for it
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
            # extra state may be of any length; of anything else the module has the shape
            same = isinstance(own, torch.Tensor) and not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
            return _copied(own if same else value, own)

        return {
            name: value if name in self._in_place else Early(copy(name, value))
            for name, value in self.tree().items()
        }

    def take(self, tree: Any, early: bool) -> None:
        # where there is both, twice: hooks may make something of the parameters
        if len(self._in_place) == (len(tree) if early else 0):
            return
        told = {name: item.value for name, item in tree.items() if isinstance(item, Early)}
        self.module.load_state_dict({**self._state, **told})


@dataclass(frozen=True)
class _Optimizer(Holder):
    """An optimizer of torch's, whose states go by the names of the parameters."""

    optimizer: torch.optim.Optimizer
    modules: Modules

    def tree(self) -> dict[str, Any]:
        return optimizer_state(self.optimizer, *self._parts())

    def targets(self, saved: Any) -> dict[str, Any]:
        parts, names = self._parts()
        if not isinstance(at(saved, ("param_groups",)), list):
            raise ArgumentError("what was saved is not the state of an optimizer.")
        if "masters" in saved:
            raise ArgumentError(
                "what was saved has masters, wider than the parameters, to which its states "
                "belong, and a plain optimizer has none. Load it into a ShardedGradients with "
                "fp32_masters=False, and save that."
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
                        "of no module of the state. States of optimizers are saved by the names "
                        "of parameters: put the module there too."
                    )
        names = [[named[param] for param in group["params"]] for group in groups]
        parts = {
            param: Part(named[param], _wrap_like(param))
            for group in groups
            for param in group["params"]
        }
        return parts, names

    def _check_kind(self) -> None:
        """Raise ArgumentError if states lie elsewhere than where torch's optimizers have them."""
        kind = type(self.optimizer)
        advice = (
            "What this optimizer has cannot be saved by the names of parameters. To share states "
            "out over ranks, varcomm.data_parallel.ShardedGradients can; otherwise put an object "
            "into the state whose state_dict and load_state_dict call those of the optimizer, "
            "within PerRank where each rank has its own."
        )
        for method in ("state_dict", "load_state_dict"):
            if getattr(kind, method) is not getattr(torch.optim.Optimizer, method):
                raise ArgumentError(f"{kind.__name__} has a {method} of its own. {advice}")
        params = {param for group in self.optimizer.param_groups for param in group["params"]}
        if others := [key for key in self.optimizer.state if key not in params]:
            raise ArgumentError(
                f"the states of {kind.__name__} have a key {_short(others[0])}, which is none of "
                f"the parameters in its groups. {advice}"
            )

    def _names(self) -> dict[torch.Tensor, str]:
        """Return what parameters are called, and in which module where there are several."""
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
    """Return the options of groups as they are saved; where they are tensors, to be loaded."""

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
    """An object that is given again what its `state_dict` has told, whatever that has been."""

    held: Any

    def tree(self) -> Any:
        return self.held.state_dict()

    def targets(self, saved: Any) -> Early:
        return Early(_copied(saved, self.tree()))

    def take(self, tree: Any, early: bool) -> None:
        if early:
            self.held.load_state_dict(tree.value)


@dataclass(frozen=True)
class _Shaped(Holder):
    """An object that makes, of what was saved, what it wants to be loaded into."""

    held: Any

    def tree(self) -> Any:
        return self.held.state_dict()

    def targets(self, saved: Any) -> Any:
        return self.held.state_dict_for(saved)

    def take(self, tree: Any, early: bool) -> None:
        if not early:
            self.held.load_state_dict(tree)


def _copied(saved: Any, own: Any) -> Any:
    """Return what was saved, with tensors to load into: those that are parts are the object's."""
    if isinstance(saved, Mapping):
        return {name: _copied(value, at(own, (name,))) for name, value in saved.items()}
    if isinstance(saved, list):
        return [_copied(value, at(own, (number,))) for number, value in enumerate(saved)]
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(own, torch.Tensor) and not is_whole(own):
        return own
    return torch.empty_like(saved, device=own.device if isinstance(own, torch.Tensor) else "cpu")
