"""States of optimizers by the names of parameters, for any sharding of the parameters.

torch numbers the parameters of an optimizer. Ranks with different shards have different numbers,
and the same names. Common parameters of the functions: `parts` has the parameters of this rank,
and `names` the names of all parameters of each group, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from varcomm.errors import ArgumentError
from varcomm.sharding.sharded import Sharded

__all__ = [
    "Part",
    "check_optimizer_state",
    "check_part",
    "load_optimizer_state",
    "optimizer_state",
    "optimizer_state_for",
    "prefix_hint",
]


class Part(NamedTuple):
    """A parameter of an optimizer: its name, and how a tensor of its shape is sharded."""

    name: str
    wrap: Callable[[torch.Tensor], torch.Tensor]  # returns a tensor itself, or as Sharded


Parts = Mapping[torch.Tensor, Part]
Names = Sequence[Sequence[str]]
State = dict[str, Any]

# Options of groups that torch's schedulers add; they may be missing on one side.
_OF_SCHEDULERS = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"}

# Prefixes that wrappers of modules add to names of parameters.
_WRAPPERS = ("module", "_orig_mod")

_FIX = "This state was made for other shards; to load it here, use varcomm.checkpoint."


def optimizer_state(optimizer: Optimizer, parts: Parts, names: Names) -> State:
    """Return the states of an optimizer by name, and the options of its groups.

    The result is ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"lr": ...,
    ...}]}`` with the optimizer's own tensors. ArgumentError if a state of a sharded parameter is
    neither like the parameter nor one number.
    """
    state = {
        part.name: {key: _wrapped(key, value, param, part) for key, value in own.items()}
        for param, part in parts.items()
        if (own := optimizer.state.get(param))
    }
    return {"state": state, "param_groups": _groups(optimizer, names)}


def optimizer_state_for(
    optimizer: Optimizer, parts: Parts, names: Names, saved: Mapping[str, Any]
) -> State:
    """Return the tree of :func:`optimizer_state` with the states that are `saved`, to load into.

    States that the optimizer has not made yet are made here. `saved` is a saved tree with tensors
    on the meta device. ArgumentError if its groups have other parameters or options.
    """
    states, groups = _halves(saved)
    _check_groups(optimizer, names, groups)
    found: State = {}
    for param, (name, wrap) in parts.items():
        if name in states:
            own, whole = optimizer.state.get(param, {}), wrap(param.detach()).shape
            targets = {
                key: _target(value, own.get(key), param, whole)
                for key, value in states[name].items()
            }
            found[name] = {k: _wrapped(k, v, param, parts[param]) for k, v in targets.items()}
    return {"state": found, "param_groups": _groups(optimizer, names)}


def load_optimizer_state(
    optimizer: Optimizer, parts: Parts, names: Names, state: Mapping[str, Any]
) -> None:
    """Load a tree of :func:`optimizer_state` into an optimizer.

    Its tensors are overwritten; those of :func:`optimizer_state_for` become its own. Errors are
    those of :func:`check_optimizer_state`, and then nothing is changed.
    """
    check_optimizer_state(optimizer, parts, names, state)
    for group, options in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
        on_device = bool(group.get("capturable") or group.get("fused"))
        for param in group["params"]:
            saved = state["state"].get(parts[param].name) if param in parts else None
            own = optimizer.state.pop(param, {})
            if saved is not None:
                optimizer.state[param] = {
                    key: _unwrapped(value, param, own.get(key), on_device)
                    for key, value in saved.items()
                }


def check_optimizer_state(optimizer: Optimizer, parts: Parts, names: Names, state: object) -> None:
    """Raise ArgumentError unless `state` has the groups, options and parts of this optimizer."""
    states, groups = _halves(state)
    _check_groups(optimizer, names, groups)
    by_name = {part.name: (param, part) for param, part in parts.items()}
    for name, values in states.items():
        if name not in by_name:
            raise ArgumentError(
                f"the state holds a part of parameter {name!r}, of which this rank has none. {_FIX}"
            )
        param, part = by_name[name]
        own = optimizer.state.get(param, {})
        for key, value in values.items():
            check_part(value, param, part, f"{key} of parameter {name!r}", own.get(key))


def check_part(
    value: object, param: torch.Tensor, part: Part, what: str, own: object = None
) -> None:
    """Raise ArgumentError if a saved tensor belongs to another part or differs in shape.

    Tensors with other shapes than the part and the full parameter are not checked.
    """
    if not isinstance(value, torch.Tensor):
        return
    like = part.wrap(param.detach())
    if isinstance(value, Sharded):
        fits = isinstance(like, Sharded) and _places(value) == _places(like)
        fits = fits and value.local is not None and value.local.shape == param.shape
    elif isinstance(like, Sharded):
        fits = value.shape not in (like.shape, param.shape)
    else:
        fits = not isinstance(own, torch.Tensor) or own.shape == value.shape
    if not fits:
        raise ArgumentError(f"{what} is {_shown(value)}, and here it is {_shown(like)}. {_FIX}")


def prefix_hint(here: Iterable[str], saved: Iterable[str]) -> str:
    """Return advice if names differ only by the prefix of a wrapper."""
    ours, theirs = set(here), set(saved)
    if ours.isdisjoint(theirs) and {*map(_unprefixed, ours)} & {*map(_unprefixed, theirs)}:
        return (
            " Names differ by 'module.' or '_orig_mod.', which DistributedDataParallel and "
            "torch.compile add: save and load the inner module, such as model.module."
        )
    return ""


def _unprefixed(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _halves(state: Any) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the states and the groups of a saved tree, or raise ArgumentError."""
    halves = state if isinstance(state, Mapping) else {}
    states, groups = halves.get("state"), halves.get("param_groups")
    if isinstance(states, Mapping) and isinstance(groups, list | tuple):
        named = all(isinstance(values, Mapping) for values in states.values())
        if named and all(isinstance(group, Mapping) and "params" in group for group in groups):
            return states, groups
    raise ArgumentError(
        'state is not the state of an optimizer: it must be a dict with "state", by the names of '
        f'parameters, and "param_groups"; got {type(state).__name__} with {list(halves)[:5]}.'
    )


def _places(value: Sharded) -> tuple[object, ...]:
    return value.shape, [(box.offsets, box.tensor.shape) for box in value.boxes]


def _shown(value: torch.Tensor) -> str:
    return repr(value) if isinstance(value, Sharded) else f"a tensor of shape {tuple(value.shape)}"


def _groups(optimizer: Optimizer, names: Names) -> list[State]:
    groups = zip(optimizer.param_groups, names, strict=True)
    return [{**group, "params": list(own)} for group, own in groups]


def _check_groups(optimizer: Optimizer, names: Names, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ArgumentError if saved groups are not those of an optimizer."""
    given, own = [list(group["params"]) for group in groups], [list(group) for group in names]
    if given != own:
        theirs, ours = set(chain.from_iterable(given)), set(chain.from_iterable(own))
        raise ArgumentError(
            f"the saved optimizer has {len(given)} groups of {[*map(len, given)]} parameters, and "
            f"this one {len(own)} of {[*map(len, own)]}, or they differ in names or order: it has "
            f"{sorted(theirs - ours)[:3]}, which are not here, and lacks "
            f"{sorted(ours - theirs)[:3]}.{prefix_hint(ours, theirs)}"
        )
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        lacks = sorted(saved.keys() - group.keys() - _OF_SCHEDULERS)
        only = sorted(group.keys() - saved.keys() - _OF_SCHEDULERS)
        if lacks or only:
            raise ArgumentError(
                f"group {number} of the saved optimizer has options {lacks}, which this "
                f"{type(optimizer).__name__} has not, and lacks its {only}: it is another kind of "
                "optimizer. If only versions differ, add the options to param_groups first."
            )


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return a tree with a function applied to its leaves."""
    if isinstance(value, Mapping):
        return {key: _mapped(fn, inner) for key, inner in value.items()}
    return [_mapped(fn, inner) for inner in value] if isinstance(value, list) else fn(value)


def _wrapped(key: str, value: Any, param: torch.Tensor, part: Part) -> Any:
    like = part.wrap(param.detach())

    def check(tensor: Any) -> None:
        odd = isinstance(tensor, torch.Tensor) and tensor.shape != param.shape
        if odd and isinstance(like, Sharded) and tensor.numel() > 1:
            raise ArgumentError(
                f"the state {key!r} of {part.name!r} has shape {tuple(tensor.shape)}, and this "
                f"rank's part of the parameter {tuple(param.shape)}: such a state cannot be "
                "sharded. Use an optimizer whose states are like the parameters."
            )

    _mapped(check, value)
    same = isinstance(value, torch.Tensor) and value.shape == param.shape
    return part.wrap(value) if same and value.dim() else value


def _target(saved: Any, own: Any, param: torch.Tensor, whole: torch.Size) -> Any:
    """Return the target of a saved state: the optimizer's own tensor, or a new one."""
    if isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor):
        return own

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if value.dim() and value.shape == whole:
            return torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
        # optimizers keep step counters on the CPU
        return torch.zeros_like(value, device=param.device if value.dim() else "cpu")

    return _mapped(made, saved)


def _unwrapped(value: Any, param: torch.Tensor, own: Any, on_device: bool) -> Any:
    def local(inner: Any) -> Any:
        tensor = inner.local if isinstance(inner, Sharded) else inner
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return tensor.to(param.device) if tensor.dim() or on_device else tensor

    found = _mapped(local, value)
    both = isinstance(own, torch.Tensor) and isinstance(found, torch.Tensor)
    if both and (own.shape, own.dtype) == (found.shape, found.dtype):
        return own if own is found else own.copy_(found)
    return found
