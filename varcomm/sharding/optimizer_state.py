"""States of an optimizer by the names of parameters, for any sharding of the parameters.

torch numbers the parameters of an optimizer. Ranks with different shards have different numbers,
and the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from varcomm.errors import ArgumentError
from varcomm.sharding.sharded import Sharded

# Options of groups that torch's schedulers add; they may be missing on one side.
_OF_SCHEDULERS = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"}

_FIX = "This state was made for other shards; to load it here, use varcomm.checkpoint."


class Part(NamedTuple):
    """A parameter of an optimizer: its name, and how a tensor of its shape is sharded."""

    name: str
    wrap: Callable[[torch.Tensor], torch.Tensor]  # returns a tensor itself, or as Sharded


class OptimizerStates:
    """The states of an optimizer in the form that a checkpoint saves and loads.

    The form is ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"lr": ...,
    ...}]}`` with the optimizer's own tensors. `parts` has the parameters of this rank, and `names`
    those of each group on any rank. The fp32 masters in `masters` are saved below ``"masters"``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[torch.Tensor, Part],
        names: Sequence[Sequence[str]],
        masters: Iterable[str] = (),
    ) -> None:
        self.optimizer, self.parts = optimizer, dict(parts)
        self.names, self.masters = [list(own) for own in names], set(masters)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name, the options of the groups, and the masters."""
        states = {p: own for p in self.parts if (own := self.optimizer.state.get(p))}
        return self._tree(states, self.optimizer.param_groups)

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree to load `saved` into, with states that the optimizer has not made yet.

        The tensors of `saved` are on the meta device.
        """
        states, found = self._checked(saved), {}
        for param, part in self.parts.items():
            if (values := states.get(part.name)) is not None:
                own, whole = self.optimizer.state.get(param, {}), part.wrap(param.detach()).shape
                found[param] = {k: _target(v, own.get(k), param, whole) for k, v in values.items()}
        pairs = zip(self.optimizer.param_groups, saved["param_groups"], strict=True)
        options = [{k: _option(v, own.get(k)) for k, v in group.items()} for own, group in pairs]
        return self._tree(found, options)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check and load a tree of this form; the optimizer copies its tensors, or keeps them."""
        self.check(state)
        for group, options in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
            on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                own = self.optimizer.state.pop(param, {})
                saved = state["state"].get(self.parts[param].name) if param in self.parts else None
                if saved is not None:
                    self.optimizer.state[param] = {
                        key: _unwrapped(value, param, own.get(key), on_device)
                        for key, value in saved.items()
                    }
        for param, part in self.parts.items():
            if part.name in state.get("masters", {}):
                param.detach().copy_(_local_of(state["masters"][part.name]).view(param.shape))

    def check(self, state: Any) -> None:
        """Raise ArgumentError unless `state` has the groups, options and parts of the optimizer."""
        by_name = {part.name: (param, part) for param, part in self.parts.items()}
        states = list(self._checked(state).items())
        masters = [(name, {"master": value}) for name, value in state.get("masters", {}).items()]
        for name, values in states + masters:
            if name not in by_name:
                raise ArgumentError(
                    f"the state holds a part of parameter {name!r}, of which this rank has none. "
                    f"{_FIX}"
                )
            param, part = by_name[name]
            own = self.optimizer.state.get(param, {})
            for key, value in values.items():
                _check_part(value, param, part, f"{key} of parameter {name!r}", own.get(key))

    def _tree(
        self,
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        named = {
            self.parts[param].name: {
                key: _wrapped(key, value, param, self.parts[param]) for key, value in own.items()
            }
            for param, own in states.items()
        }
        pairs = zip(groups, self.names, strict=True)
        tree: dict[str, Any] = {"state": named}
        tree["param_groups"] = [{**group, "params": list(own)} for group, own in pairs]
        if self.masters:
            kept = [(p, part) for p, part in self.parts.items() if part.name in self.masters]
            tree["masters"] = {part.name: part.wrap(param.detach()) for param, part in kept}
        return tree

    def _checked(self, state: Any) -> Mapping[str, Mapping[str, Any]]:
        """Return the states by name, or raise ArgumentError unless the groups are the same."""
        try:
            halves = dict(state)
            groups = [dict(group) for group in halves["param_groups"]]
            given = [list(group["params"]) for group in groups]
            states = {name: dict(values) for name, values in halves["state"].items()}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                'state is not the state of an optimizer, a dict with "state", by the names '
                f'of parameters, and "param_groups"; got {type(state).__name__}.'
            ) from error
        if ("masters" in state) != bool(self.masters):
            here, there = ("", "no ") if self.masters else ("no ", "")
            raise ArgumentError(
                f"the saved optimizer has {there}fp32 masters of fp16 or bf16 parameters, and this "
                f"one has {here}masters. Load it into a varcomm.data_parallel.ShardedGradients of "
                "a model of the saved dtypes."
            )
        if given != self.names:
            theirs, ours = (set(chain.from_iterable(names)) for names in (given, self.names))
            differ = (
                f"it has {sorted(theirs - ours)[:3]}, which are not here, and lacks "
                f"{sorted(ours - theirs)[:3]}."
            )
            if theirs == ours:
                firsts = ([names[0] for names in groups if names] for groups in (given, self.names))
                differ = (
                    "they have the same parameters in other groups or in another order. The groups "
                    "begin with {} and {}. Make the groups of this optimizer in the order of the "
                    "saved one."
                ).format(*firsts)
            raise ArgumentError(
                f"the saved optimizer has groups of {[*map(len, given)]} parameters, and this one "
                f"of {[*map(len, self.names)]}; {differ}"
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            if other := (group.keys() ^ saved.keys()) - _OF_SCHEDULERS:
                raise ArgumentError(
                    f"the saved optimizer and this {type(self.optimizer).__name__} do not both "
                    f"have the options {sorted(other)}: it is another kind of optimizer. If only "
                    "versions differ, add the options to param_groups first."
                )
        return states


def _check_part(value: Any, param: torch.Tensor, part: Part, what: str, own: object) -> None:
    """Raise ArgumentError if a saved value is of another part than this rank's.

    `own` is the optimizer's present value, if any.
    """
    like, fits = part.wrap(param.detach()), True
    if isinstance(value, Sharded):
        fits = isinstance(like, Sharded) and _places(value) == _places(like)
        fits = fits and value.local is not None and value.local.shape == param.shape
    elif isinstance(value, torch.Tensor) and isinstance(like, Sharded):
        fits = value.shape not in (like.shape, param.shape)
    elif isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
        fits = value.shape == own.shape
    if not fits:
        shape = tuple(value.shape)
        raise ArgumentError(f"{what}, of shape {shape}, is another part than {like}. {_FIX}")


def _local_of(value: Any) -> Any:
    """Return the tensor of which a Sharded has the boxes; another value itself."""
    return value.local if isinstance(value, Sharded) else value


def _places(value: Sharded) -> tuple[object, ...]:
    return value.shape, [(box.offsets, box.tensor.shape) for box in value.boxes]


def _option(saved: Any, own: Any) -> Any:
    """Return the saved option of a group, or a target if it is a tensor."""
    if not isinstance(saved, torch.Tensor):
        return saved
    return own if isinstance(own, torch.Tensor) else torch.empty_like(saved, device="cpu")


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return a tree with a function applied to its leaves."""
    if isinstance(value, Mapping):
        return {key: _mapped(fn, inner) for key, inner in value.items()}
    return [_mapped(fn, inner) for inner in value] if isinstance(value, list) else fn(value)


def _wrapped(key: str, value: Any, param: torch.Tensor, part: Part) -> Any:
    is_sharded = isinstance(part.wrap(param.detach()), Sharded)

    def check(tensor: Any) -> None:
        odd = isinstance(tensor, torch.Tensor) and tensor.shape != param.shape
        if odd and is_sharded and tensor.numel() > 1:
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
        tensor = _local_of(inner)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return tensor.to(param.device) if tensor.dim() or on_device else tensor

    found = _mapped(local, value)
    both = isinstance(own, torch.Tensor) and isinstance(found, torch.Tensor)
    if both and (own.shape, own.dtype) == (found.shape, found.dtype):
        return own if own is found else own.copy_(found)
    return found
