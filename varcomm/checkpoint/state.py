"""The walk over nested states, and the objects with state in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from varcomm.checkpoint.index import Keys, at, joined
from varcomm.checkpoint.parts import PerRank, RowsById, checked_rows, is_whole, wrapped
from varcomm.errors import ArgumentError
from varcomm.sharding.optimizer_state import OptimizerStates, Part

# The modules of a state by their paths.
_Modules = Mapping[Keys, torch.nn.Module]


@dataclass(frozen=True)
class Leaf:
    """A value in a walk; at its end a tensor, RowsById, plain value, or Holder after its leaves."""

    value: Any
    path: Keys = ()
    put: Callable[[Any], None] = lambda value: None  # replaces the value in the state
    own: bool = False  # inside PerRank

    @property
    def key(self) -> str:
        """The flat key of its path."""
        return joined(self.path)


class Walk:
    """The walk over a nested state, for a save; a load asks objects for targets instead."""

    def __init__(self, state: Any, rank: int) -> None:
        self.rank, self._modules = rank, _modules_in(state)

    def opens(self, holder: Holder, path: Keys) -> bool:
        """Set the content of an object; return whether the walk continues in it."""
        holder.content = holder.tree()
        return True

    def enters(self, path: Keys) -> bool:
        """Return whether the walk continues in the PerRank at a path."""
        return True

    def leaves(self, here: Leaf) -> Iterator[Leaf]:
        """Yield the leaves of a value, or raise ArgumentError."""
        value, path = here.value, here.path
        if here.own and isinstance(value, PerRank | RowsById):
            raise ArgumentError(f"{here.key!r}: {type(value).__name__} cannot be inside PerRank.")
        if isinstance(value, PerRank):
            if self.enters(path):
                put, path = partial(setattr, value, "value"), (*path, str(self.rank))
                yield from self.leaves(Leaf(value.value, path, put, own=True))
        elif isinstance(value, RowsById):
            yield replace(here, value=checked_rows(here.key, value))
        elif isinstance(value, torch.Tensor):
            yield replace(here, value=wrapped(value))
        elif _is_stateful(value):
            if holder := self._opened(here):
                put = partial(setattr, holder, "content")
                yield from self.leaves(replace(here, value=holder.content, put=put))
                yield replace(here, value=holder)
        elif _is_container(here):
            for name, inner in _items(value):
                put = partial(value.__setitem__, name[0] if isinstance(name, tuple) else name)
                yield from self.leaves(replace(here, value=inner, path=(*path, name), put=put))
        else:
            yield here

    def _opened(self, here: Leaf) -> Holder | None:
        try:
            holder = _holder_of(here.value, self._modules)
            return holder if self.opens(holder, here.path) else None
        except ArgumentError as error:
            raise ArgumentError(f"{here.key!r}: {error}") from error


def checked_state(state: Any) -> dict[str, Any]:
    """Return a state, a dict with text keys, or raise ArgumentError."""
    if isinstance(state, dict) and all(isinstance(name, str) for name in state):
        return state
    given = f"a dict with keys {list(state)[:5]}" if isinstance(state, dict) else type(state)
    raise ArgumentError(f"state must be a dict by strings, as {{'model': model}}; got {given}.")


def is_bare(value: Any) -> bool:
    """Return whether a value has only plain values in it."""
    if isinstance(value, torch.Tensor | RowsById | PerRank) or _is_stateful(value):
        return False
    return all(is_bare(inner) for _, inner in _items(value))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the values in a container by their names in paths."""
    if isinstance(value, Mapping):
        return list(value.items())
    sequence = isinstance(value, list | tuple)
    return [((place,), inner) for place, inner in enumerate(value)] if sequence else []


def _is_container(leaf: Leaf) -> bool:
    """Return whether a value is loaded by parts; a dict with other keys than texts may be one."""
    value = leaf.value
    names = list(value) if isinstance(value, dict) else []
    if is_bare(value):
        return bool(names) and all(isinstance(name, str) for name in names)
    if not isinstance(value, dict | list):
        kind = type(value).__name__
        raise ArgumentError(f"{leaf.key!r} is a {kind} with tensors in it. Use a list or a dict.")
    if others := [name for name in names if type(name) not in (str, int)]:
        raise ArgumentError(
            f"{leaf.key!r}: {others[0]!r} is a key of a dict with tensors in it. Use texts or ints "
            "as keys of such dicts."
        )
    return True


class Holder:
    """An object with `state_dict`, in one walk."""

    content: Any = None  # its state in a save, its targets in a load

    def __init__(self, held: Any) -> None:
        self.held = held

    def tree(self) -> Any:
        """Return its state: nested dicts and lists of tensors and plain values."""
        return self.held.state_dict()

    def targets(self, saved: Any) -> Any:
        """Return the tree to load into; `saved` is the saved tree, with tensors on meta."""
        if _can(self.held, "state_dict_for"):
            return self.held.state_dict_for(saved)
        return _copied(saved, self.tree())

    def take(self, key: str) -> None:
        """Put the targets into the object, or raise ArgumentError if it refuses them."""
        try:
            self.held.load_state_dict(self.content)
        except Exception as error:
            raise ArgumentError(f"{key!r} refuses its saved state: {error}") from error


class _Module(Holder):
    """A module: its parameters and buffers in place, extra state and copies made by hooks."""

    def tree(self) -> dict[str, Any]:
        # the parameters themselves: copies lose their marks
        return dict(self.held.state_dict(keep_vars=True))

    def targets(self, saved: Any) -> dict[str, Any]:
        found = self.tree()
        # after state_dict(), in which fully_shard replaces parameters
        tensors = {id(tensor) for tensor in (*self.held.parameters(), *self.held.buffers())}
        for name, own in found.items():
            # only extra state may change its shape
            if name.endswith("_extra_state"):
                found[name] = _copied(at(saved, (name,), own), own)
            elif isinstance(own, torch.Tensor) and id(own) not in tensors:
                found[name] = _copied(own, own)
        return found


def _states_of(optimizer: torch.optim.Optimizer, modules: _Modules) -> OptimizerStates:
    """Return the states of an optimizer of torch's by the names of parameters in `modules`.

    If several modules have parameters of the optimizer, their paths are in the names.
    """
    kind, plain = type(optimizer), torch.optim.Optimizer
    groups = [group["params"] for group in optimizer.param_groups]
    params = {param for group in groups for param in group}
    usual = kind.state_dict is plain.state_dict and kind.load_state_dict is plain.load_state_dict
    if not usual or not params.issuperset(optimizer.state):
        raise ArgumentError(
            f"{kind.__name__} has a state_dict or load_state_dict of its own, or states of other "
            "keys than parameters, and they cannot be saved by the names of parameters. Use "
            "varcomm.data_parallel.ShardedGradients to shard states; else save an object whose "
            "state_dict and load_state_dict call the optimizer's, inside PerRank if ranks differ."
        )
    paths: dict[torch.Tensor, tuple[Keys, str]] = {}
    for path, module in modules.items():
        for name, param in module.named_parameters():
            if param in params:
                paths.setdefault(param, (path, name))
    several = len({path for path, _ in paths.values()}) > 1
    names = {p: f"{joined(path)}.{name}" if several else name for p, (path, name) in paths.items()}
    for param in (param for group in groups for param in group if param not in names):
        raise ArgumentError(
            f"a parameter of shape {tuple(param.shape)} is in no module of the state, and has no "
            "name. Add its module to the state."
        )
    parts = {p: Part(name, partial(wrapped, like=p)) for p, name in names.items()}
    return OptimizerStates(optimizer, parts, [[names[param] for param in own] for own in groups])


def _copied(saved: Any, own: Any) -> Any:
    """Return the saved tree with tensors to load into; sharded ones are the object's own."""
    if isinstance(saved, Mapping):
        return {name: _copied(value, at(own, (name,))) for name, value in saved.items()}
    if isinstance(saved, list):
        return [_copied(value, at(own, ((place,),))) for place, value in enumerate(saved)]
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(own, torch.Tensor) and not is_whole(own):
        return own
    return torch.empty_like(saved, device=own.device if isinstance(own, torch.Tensor) else "cpu")


def _can(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))


def _is_stateful(value: Any) -> bool:
    loads = _can(value, "state_dict_for") or _can(value, "load_state_dict")
    return isinstance(value, torch.Generator) or (_can(value, "state_dict") and loads)


def _holder_of(value: Any, modules: _Modules) -> Holder:
    if isinstance(value, torch.nn.Module):
        return _Module(value)
    if isinstance(value, torch.Generator):
        both = {"state_dict": value.get_state, "load_state_dict": value.set_state}
        return Holder(SimpleNamespace(**both))
    if isinstance(value, torch.optim.Optimizer) and not _can(value, "state_dict_for"):
        return Holder(_states_of(value, modules))
    return Holder(value)


def _modules_in(value: Any, path: Keys = ()) -> dict[Keys, torch.nn.Module]:
    """Return the modules of a nested state by their paths."""
    if isinstance(value, PerRank):
        return _modules_in(value.value, path)
    found = {path: value} if isinstance(value, torch.nn.Module) else {}
    for name, inner in _items(value):
        found |= _modules_in(inner, (*path, name))
    return found
