"""Nested states: annotated values, objects with state, and the walk that finds their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from varcomm.checkpoint.index import Keys, at, joined, prefix_hint
from varcomm.errors import ArgumentError
from varcomm.sharding import Box, Sharded, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)

__all__ = [
    "EARLY",
    "LATE",
    "Holder",
    "Leaf",
    "PerRank",
    "Rows",
    "Walk",
    "boxes_of",
    "check_parts",
    "checked_state",
    "is_bare",
    "is_whole",
    "shown",
]

# When a target is loaded: before an object may refuse it, or after all objects have taken theirs.
EARLY, LATE = 0, 1

# The modules of a state by their paths.
_Modules: TypeAlias = Mapping[Keys, torch.nn.Module]

# The last name of a module's extra state in its state_dict.
_EXTRA_STATE = "_extra_state"


@dataclass(eq=False)
class Rows:
    r"""Rows of a larger tensor by their ids, such as a field on the nodes of a partitioned graph.

    A checkpoint holds the full tensor in the order of ids, so that ranks with other rows load it.

    Attributes
    ----------
    tensor : torch.Tensor
        Shape (n, \*F): the rank's rows. Loading overwrites them.
    ids : torch.Tensor
        Shape (n,), integers in any order, such as ``graph.owned_ids``. A save needs every row on
        exactly one rank. A load accepts rows on several ranks or on none.
    total : int
        N, the rows of the full tensor.

    Examples
    --------
    >>> import tempfile, torch, varcomm
    >>> from varcomm.checkpoint import Rows, read, save
    >>> def fn(rank, folder):
    ...     ids = torch.tensor([2, 0] if rank == 0 else [1])
    ...     save({"u": Rows(10 * ids, ids, 3)}, folder)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = varcomm.launch(fn, 2, folder)
    ...     read(folder)
    {'u': tensor([ 0, 10, 20])}
    """

    tensor: torch.Tensor
    ids: torch.Tensor
    total: int


@dataclass(eq=False)
class PerRank:
    """A value of each rank's own, such as a generator of random numbers.

    Rank r loads the value that rank r saved. If more ranks load than saved, the additional ranks
    keep their values, so that no two ranks draw the same random numbers. If fewer ranks load, the
    remaining values are not read.

    Attributes
    ----------
    value : object
        Any value of a state. Loading replaces a plain value.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import PerRank, load, save
    >>> generator = torch.Generator().manual_seed(5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"noise": PerRank(generator)}, folder)
    ...     drawn = torch.rand(3, generator=generator)
    ...     load({"noise": PerRank(generator)}, folder)
    >>> torch.equal(drawn, torch.rand(3, generator=generator))
    True
    """

    value: Any


class Leaf(NamedTuple):
    """One value at the end of a walk."""

    path: Keys
    value: Any  # a tensor, Rows, a plain value, or a Holder after its own leaves
    put: Callable[[Any], None]  # replaces a plain value in the state
    own: bool  # inside PerRank
    phase: int  # EARLY or LATE


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

    def leaves(
        self,
        value: Any,
        path: Keys = (),
        put: Callable[[Any], None] = lambda value: None,
        own: bool = False,
        phase: int = LATE,
    ) -> Iterator[Leaf]:
        """Yield the leaves of a value, or raise ArgumentError."""
        key = joined(path)
        if isinstance(value, PerRank | Rows) and own:
            raise ArgumentError(f"{key!r}: {type(value).__name__} cannot be inside PerRank.")
        if isinstance(value, PerRank):
            if self.enters(path):
                put = partial(setattr, value, "value")
                yield from self.leaves(value.value, (*path, str(self.rank)), put, True, phase)
        elif isinstance(value, _Early):
            put = partial(setattr, value, "value")
            yield from self.leaves(value.value, path, put, own, EARLY)
        elif isinstance(value, Rows):
            yield Leaf(path, _checked_rows(key, value), put, own, phase)
        elif isinstance(value, torch.Tensor):
            yield Leaf(path, _wrapped(value), put, own, phase)
        elif _is_stateful(value):
            if holder := self._opened(value, path):
                content = partial(setattr, holder, "content")
                yield from self.leaves(holder.content, path, content, own, phase)
                yield Leaf(path, holder, put, own, phase)
        elif not (names := _names(key, value)):
            yield Leaf(path, value, put, own, phase)
        else:
            for name in names:
                place = name[0] if isinstance(name, tuple) else name
                inner = (*path, str(name) if isinstance(name, str) else name)
                put = partial(value.__setitem__, place)
                yield from self.leaves(value[place], inner, put, own, phase)

    def _opened(self, value: Any, path: Keys) -> Holder | None:
        try:
            holder = _holder_of(value, self._modules)
            return holder if self.opens(holder, path) else None
        except ArgumentError as error:
            raise ArgumentError(f"{joined(path)!r}: {error}") from error


def checked_state(state: Any) -> dict[str, Any]:
    """Return a state, a dict with text keys, or raise ArgumentError."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        keys = f" with keys {list(state)[:5]}" if isinstance(state, dict) else ""
        raise ArgumentError(
            "state must be a dict whose keys are strings, such as {'model': model, 'step': 5}; got "
            f"{type(state).__name__}{keys}."
        )
    try:
        _modules_in(state)
    except RecursionError as error:
        raise ArgumentError("the state contains itself or is nested too deeply.") from error
    return state


def is_bare(value: Any) -> bool:
    """Return whether a value has only plain values in it."""
    if isinstance(value, Mapping):
        return all(map(is_bare, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_bare, value))
    return not (isinstance(value, torch.Tensor | Rows | PerRank) or _is_stateful(value))


def _names(key: str, value: Any) -> Keys:
    """Return the names in a container; () for a plain value."""
    bare = is_bare(value)
    if isinstance(value, dict) and not (bare and not all(isinstance(name, str) for name in value)):
        for name in value:
            if not isinstance(name, str) and type(name) is not int:
                raise ArgumentError(
                    f"{key!r}: {name!r} is a key of a dict with tensors or objects in it, and has "
                    f"type {type(name).__name__}. Use texts or ints as keys of such dicts."
                )
        return tuple(value)
    if bare:
        return ()
    if isinstance(value, list):
        return tuple((number,) for number in range(len(value)))
    raise ArgumentError(
        f"{key!r} is a {type(value).__name__} with tensors in it, which cannot be loaded into. "
        "Use a list or a dict."
    )


def _checked_rows(key: str, rows: Rows) -> Rows:
    """Return Rows with int64 ids on the device of their tensor, or raise ArgumentError."""
    tensor, ids, total = rows.tensor, rows.ids, rows.total
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not is_whole(tensor):
        raise ArgumentError(f"{key!r}: tensor of Rows must have rows; got {shown(tensor)}.")
    integers = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not integers or ids.shape != tensor.shape[:1]:
        raise ArgumentError(
            f"{key!r}: ids of Rows must be {len(tensor)} integers, one per row; got {shown(ids)}."
        )
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ArgumentError(f"{key!r}: total of Rows must be a number of rows; got {total!r}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < total:
        raise ArgumentError(
            f"{key!r}: ids of Rows must be below total, {total}; got {int(ids.min())}..."
            f"{int(ids.max())}."
        )
    return Rows(tensor.detach(), ids.to(tensor.device, torch.int64), total)


def shown(value: Any) -> str:
    """Return a value for a message."""
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return text if len(text) < 200 else f"{text[:200]}..."
    shape = "" if value.is_nested else f" of shape {tuple(value.shape)}"
    return f"a tensor{shape}, {value.dtype}, {value.layout}, {value.device}"


# ---- tensors of which a rank has boxes ---------------------------------------------------------


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of itself: neither Sharded nor DTensor."""
    return not hasattr(tensor, "__create_chunk_list__")


def _wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, as Sharded if it carries a mark."""
    if not is_whole(tensor):
        return tensor
    spec = shard_spec(tensor)
    return tensor.detach() if spec is None else Sharded.of(tensor.detach(), spec)


def boxes_of(key: str, tensor: torch.Tensor) -> list[Box]:
    """Return the boxes of a tensor on this rank that are not empty."""
    return [box for _, box in _declared(key, tensor) if box.tensor.numel()]


def check_parts(key: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a DTensor has other shards than it declares."""
    declared = _declared(key, tensor)
    sizes = [shape for shape, _ in declared]
    found = [tuple(box.tensor.shape) for _, box in declared]
    if sizes != found:
        raise ArgumentError(
            f"{key!r}, a tensor of shape {tuple(tensor.shape)}, declares boxes of shapes {sizes} "
            f"on this rank, and has {found}. A DTensor has only torch's even shards; use "
            "varcomm.sharding.Sharded for others."
        )


def _declared(key: str, tensor: Any) -> list[tuple[tuple[int, ...], Box]]:
    """Return each box with the shape that the tensor declares for it."""
    if is_whole(tensor):
        return [(tuple(tensor.shape), Box((0,) * tensor.dim(), tensor.detach()))]
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    found = []
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        part = tensor.__get_tensor_shard__(MetadataIndex(key, chunk.offsets))  # type: ignore[attr-defined]
        found.append((tuple(chunk.sizes), Box(tuple(chunk.offsets), part.detach())))
    return found


# ---- objects with state --------------------------------------------------------------------------


@dataclass
class _Early:
    """Targets that an object may refuse; they are loaded before any tensor is overwritten."""

    value: Any


class Holder:
    """An object with `state_dict`, in one walk; it may refuse unless it makes its own targets."""

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
        return _Early(_copied(saved, self.tree()))

    def take(self, phase: int) -> None:
        """Take the targets of a phase, or refuse them."""
        if isinstance(self.content, _Early):
            if phase == EARLY:
                self.held.load_state_dict(self.content.value)
        elif phase == LATE:
            self.held.load_state_dict(self.content)


class _Module(Holder):
    """A module: its parameters and buffers in place; extra state and copies made by hooks early."""

    def __init__(self, held: torch.nn.Module) -> None:
        super().__init__(held)
        # the parameters themselves: copies lose their marks
        self._state = dict(held.state_dict(keep_vars=True))
        if lazy := [name for name, value in self._state.items() if is_lazy(value)]:
            raise ArgumentError(
                f"{lazy[0]!r} of a {type(held).__name__} has no shape yet. Run the module once "
                "first."
            )
        # after state_dict(), in which fully_shard replaces parameters
        tensors = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
        self._in_place = {name for name, value in self._state.items() if id(value) in tensors}

    def tree(self) -> dict[str, Any]:
        return self._state

    def targets(self, saved: Any) -> dict[str, Any]:
        found = dict(self._state)
        for name in found.keys() - self._in_place:
            own = found[name]
            # only extra state may change its shape
            fixed = isinstance(own, torch.Tensor) and not name.endswith(_EXTRA_STATE)
            found[name] = _Early(_copied(own if fixed else at(saved, (name,), own), own))
        return found

    def take(self, phase: int) -> None:
        # a module with both kinds takes them twice: hooks may derive tensors from parameters
        if phase == LATE and not self._in_place:
            return
        early = {n: item.value for n, item in self.content.items() if isinstance(item, _Early)}
        if early or phase == LATE:
            self.held.load_state_dict({**self._state, **early})


class _Optimizer:
    """An optimizer of torch's; its states have the names of parameters, as in `modules`."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: _Modules) -> None:
        self._optimizer, groups = optimizer, optimizer.param_groups
        self._check_kind()
        named = _parameter_names(modules, {param for group in groups for param in group["params"]})
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                if param not in named:
                    raise ArgumentError(
                        f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is "
                        "in no module of the state. Optimizers are saved by the names of "
                        "parameters: add the module to the state."
                    )
        self._names = [[named[param] for param in group["params"]] for group in groups]
        self._parts = {
            param: Part(named[param], partial(_wrapped_like, param))
            for group in groups
            for param in group["params"]
        }

    def state_dict(self) -> dict[str, Any]:
        return optimizer_state(self._optimizer, self._parts, self._names)

    def state_dict_for(self, saved: Any) -> dict[str, Any]:
        if not isinstance(at(saved, ("param_groups",)), list):
            raise ArgumentError("the saved value is not the state of an optimizer.")
        if "masters" in saved:
            raise ArgumentError(
                "the saved optimizer has fp32 masters of the parameters, and a plain optimizer "
                "has none. Load it into a ShardedGradients with fp32_masters=False, and save that."
            )
        groups = [list(group.get("params", [])) for group in saved["param_groups"]]
        if groups != self._names:
            hint = prefix_hint(chain.from_iterable(self._names), chain.from_iterable(groups))
            raise ArgumentError(
                f"the saved optimizer has groups of parameters {shown(groups)}, and this one "
                f"{shown(self._names)}.{hint}"
            )
        found = optimizer_state_for(self._optimizer, self._parts, self._names, saved)
        found["param_groups"] = [
            {key: _option(value, own.get(key)) for key, value in group.items()}
            for own, group in zip(found["param_groups"], saved["param_groups"], strict=True)
        ]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer_state(self._optimizer, self._parts, self._names, state)

    def _check_kind(self) -> None:
        """Raise ArgumentError if an optimizer keeps states elsewhere than torch's optimizers."""
        kind = type(self._optimizer)
        advice = (
            "Its states cannot be saved by the names of parameters. To shard states over ranks, "
            "use varcomm.data_parallel.ShardedGradients; otherwise save an object whose "
            "state_dict and load_state_dict call those of the optimizer, inside PerRank if each "
            "rank has its own."
        )
        for method in ("state_dict", "load_state_dict"):
            if getattr(kind, method) is not getattr(torch.optim.Optimizer, method):
                raise ArgumentError(f"{kind.__name__} has a {method} of its own. {advice}")
        params = {param for group in self._optimizer.param_groups for param in group["params"]}
        if others := [key for key in self._optimizer.state if key not in params]:
            raise ArgumentError(
                f"the states of {kind.__name__} have a key {shown(others[0])}, which is not a "
                f"parameter of its groups. {advice}"
            )


def _parameter_names(modules: _Modules, left: set[torch.Tensor]) -> dict[torch.Tensor, str]:
    """Return the names of parameters, with the path of the module if there are several."""
    found: dict[Keys, dict[torch.nn.Parameter, str]] = {}
    for path, module in modules.items():
        named = {param: name for name, param in module.named_parameters() if param in left}
        left -= named.keys()
        if named:
            found[path] = named
    return {
        param: name if len(found) == 1 else f"{joined(path)}.{name}"
        for path, named in found.items()
        for param, name in named.items()
    }


def _wrapped_like(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    spec = shard_spec(param)
    return tensor if spec is None else Sharded.of(tensor, spec)


def _option(saved: Any, own: Any) -> Any:
    """Return the saved option of a group, or a target if it is a tensor."""
    if not isinstance(saved, torch.Tensor):
        return own if isinstance(own, torch.Tensor) else saved
    return own if isinstance(own, torch.Tensor) else torch.empty_like(saved, device="cpu")


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


def _can(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))


def _is_stateful(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | torch.Generator):
        return True
    return _can(value, "state_dict") and (
        _can(value, "state_dict_for") or _can(value, "load_state_dict")
    )


def _holder_of(value: Any, modules: _Modules) -> Holder:
    if isinstance(value, torch.nn.Module):
        return _Module(value)
    if isinstance(value, torch.Generator):
        functions = {"state_dict": value.get_state, "load_state_dict": value.set_state}
        return Holder(SimpleNamespace(**functions))
    if isinstance(value, torch.optim.Optimizer) and not _can(value, "state_dict_for"):
        return Holder(_Optimizer(value, modules))
    return Holder(value)


def _modules_in(value: Any, path: Keys = ()) -> dict[Keys, torch.nn.Module]:
    """Return the modules of a nested state by their paths."""
    if isinstance(value, PerRank):
        return _modules_in(value.value, path)
    if isinstance(value, torch.nn.Module):
        return {path: value}
    items: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list):
        items = (((number,), inner) for number, inner in enumerate(value))
    found = {}
    for name, inner in items:
        found |= _modules_in(inner, (*path, name))
    return found
