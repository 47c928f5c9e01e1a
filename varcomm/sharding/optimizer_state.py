"""States of optimizers by the names of parameters, for any sharding of the parameters.

torch numbers the parameters of an optimizer. Ranks with different shards have different numbers,
and the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.sharding.sharded import Sharded

__all__ = [
    "Part",
    "check_optimizer_state",
    "check_part",
    "load_optimizer_state",
    "optimizer_state",
    "optimizer_state_for",
]


@dataclass(frozen=True)
class Part:
    """A parameter of an optimizer: its name, and how a tensor of its shape is sharded."""

    name: str
    wrap: Callable[[torch.Tensor], torch.Tensor]  # returns a tensor itself, or as Sharded


Parts = Mapping[torch.Tensor, Part]

# Options of groups that torch's schedulers add; they may be missing on one side.
_OF_SCHEDULERS = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"}


def optimizer_state(
    optimizer: torch.optim.Optimizer, parts: Parts, names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the states of an optimizer by name, and the options of its groups.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    parts : mapping of Parameter to Part
    names : sequence of sequence of str
        Names of all parameters of each group, on any rank.

    Returns
    -------
    dict
        ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"lr": ..., ...}]}``,
        with the optimizer's own tensors.

    Raises
    ------
    ArgumentError
        If a state of a sharded parameter is neither like the parameter nor one number.
    """
    state = {
        part.name: {key: _wrapped(key, value, param, part) for key, value in own.items()}
        for param, part in parts.items()
        if (own := optimizer.state.get(param))
    }
    return {"state": state, "param_groups": _groups(optimizer, names)}


def optimizer_state_for(
    optimizer: torch.optim.Optimizer,
    parts: Parts,
    names: Sequence[Sequence[str]],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the tree of :func:`optimizer_state` with the states that are `saved`, to load into.

    States that the optimizer has not made yet are made here. `saved` is a saved tree with tensors
    on the meta device.

    Raises
    ------
    ArgumentError
        If saved groups have other parameters or options; or as of :func:`optimizer_state`.
    """
    if "param_groups" in saved:
        _check_groups(optimizer, names, saved["param_groups"])
    found: dict[str, Any] = {}
    states = saved.get("state", {})
    for param, part in parts.items():
        if part.name not in states:
            continue
        own = optimizer.state.get(param, {})
        whole = part.wrap(param.detach()).shape
        found[part.name] = {
            key: _wrapped(key, _target(value, own.get(key), param, whole), param, part)
            for key, value in states[part.name].items()
        }
    return {"state": found, "param_groups": _groups(optimizer, names)}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parts: Parts,
    names: Sequence[Sequence[str]],
    state: Mapping[str, Any],
) -> None:
    """Load a tree of :func:`optimizer_state` into an optimizer.

    Its tensors are overwritten; those of :func:`optimizer_state_for` become its own. Errors are
    those of :func:`check_optimizer_state`, and then nothing is changed.
    """
    check_optimizer_state(optimizer, parts, names, state)
    groups = state["param_groups"]
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for param in group["params"]:
            part = parts.get(param)
            own = state["state"].get(part.name) if part is not None else None
            if own is None:
                optimizer.state.pop(param, None)
                continue
            optimizer.state[param] = {
                key: _unwrapped(value, param, optimizer.state.get(param, {}).get(key), on_device)
                for key, value in own.items()
            }


def check_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parts: Parts,
    names: Sequence[Sequence[str]],
    state: object,
) -> None:
    """Raise ArgumentError unless `state` has the groups, options and parts of this optimizer."""
    states, groups = _halves(state)
    _check_groups(optimizer, names, groups)
    by_name = {part.name: (param, part) for param, part in parts.items()}
    for name, values in states.items():
        if name not in by_name:
            raise ArgumentError(
                f"the state holds a part of parameter {name!r}, of which this rank has none. "
                + _MEND
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
        raise ArgumentError(f"{what} is {_told(value)}, and here it is {_told(like)}. {_MEND}")


_MEND = "This state was made for other shards; to load it here, use varcomm.checkpoint."


def _halves(state: object) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the states and the groups of a saved tree."""
    if isinstance(state, Mapping):
        states, groups = state.get("state"), state.get("param_groups")
        if (
            isinstance(states, Mapping)
            and isinstance(groups, list | tuple)
            and all(isinstance(values, Mapping) for values in states.values())
            and all(isinstance(group, Mapping) and "params" in group for group in groups)
        ):
            return states, groups
    raise ArgumentError(
        'state must be a dict with "state", by the names of parameters, and "param_groups"; got '
        f"{type(state).__name__}"
        + (f" with {list(state)[:5]}." if isinstance(state, Mapping) else ".")
    )


def _places(value: Sharded) -> tuple[object, ...]:
    return value.shape, [(box.offsets, box.tensor.shape) for box in value.boxes]


def _told(value: torch.Tensor) -> str:
    return repr(value) if isinstance(value, Sharded) else f"a tensor of shape {tuple(value.shape)}"


def _groups(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(own)}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]


def _check_groups(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ArgumentError if saved groups are not those of an optimizer."""
    given = [list(group["params"]) for group in groups]
    if given != [list(group) for group in names]:
        raise ArgumentError(
            f"the saved optimizer has {len(given)} groups of {[len(group) for group in given]} "
            f"parameters, and this one {len(names)} of {[len(group) for group in names]}, or they "
            f"differ in names: {_first_difference(given, names)}."
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


def _wrapped(key: str, value: Any, param: torch.Tensor, part: Part) -> Any:
    for tensor in _tensors(value):
        wrapped = part.wrap(param.detach())
        if isinstance(wrapped, Sharded) and tensor.shape != param.shape and tensor.numel() > 1:
            raise ArgumentError(
                f"the state {key!r} of {part.name!r} has shape {tuple(tensor.shape)}, and this "
                f"rank has a part of shape {tuple(param.shape)} of the parameter, of shape "
                f"{tuple(wrapped.shape)}: such a state cannot be sharded. Use an optimizer whose "
                "states are like the parameters."
            )
    same = isinstance(value, torch.Tensor) and value.shape == param.shape
    return part.wrap(value) if same and value.dim() else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    return (
        [t for item in inner for t in _tensors(item)] if isinstance(value, Mapping | list) else []
    )


def _target(saved: Any, own: Any, param: torch.Tensor, whole: torch.Size) -> Any:
    """Return the target of a saved state: the optimizer's own tensor, or a new one."""
    if isinstance(saved, Mapping):
        return {key: _target(value, None, param, whole) for key, value in saved.items()}
    if isinstance(saved, list):
        return [_target(value, None, param, whole) for value in saved]
    if not isinstance(saved, torch.Tensor):
        return None if isinstance(own, torch.Tensor) else own
    return own if isinstance(own, torch.Tensor) else _made(saved, param, whole)


def _made(saved: torch.Tensor, param: torch.Tensor, whole: torch.Size) -> torch.Tensor:
    if saved.dim() and saved.shape == whole:
        return torch.zeros_like(param, dtype=saved.dtype, requires_grad=False)
    # optimizers keep step counters on the CPU
    return torch.zeros(
        saved.shape, dtype=saved.dtype, device=param.device if saved.dim() else "cpu"
    )


def _unwrapped(value: Any, param: torch.Tensor, own: Any, on_device: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unwrapped(item, param, None, on_device) for key, item in value.items()}
    if isinstance(value, list):
        return [_unwrapped(item, param, None, on_device) for item in value]
    local = value.local if isinstance(value, Sharded) else value
    if not isinstance(local, torch.Tensor):
        return local
    if isinstance(own, torch.Tensor) and own.shape == local.shape and own.dtype == local.dtype:
        return own if own is local else own.copy_(local)
    return local.to(param.device) if local.dim() or on_device else local


def _first_difference(given: list[list[str]], names: Sequence[Sequence[str]]) -> str:
    for number, (theirs, ours) in enumerate(zip(given, names, strict=False)):
        only = [name for name in theirs if name not in ours]
        lacks = [name for name in ours if name not in theirs]
        if only or lacks:
            return f"in group {number} it has {only[:3]}, which are not here, and lacks {lacks[:3]}"
    return "the same names in another order or other groups"
