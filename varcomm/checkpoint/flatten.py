"""Nested states as flat leaves: a tensor, Rows or a plain value per key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from varcomm.checkpoint.annotations import PerRank, Rows
from varcomm.checkpoint.paths import Keys, encode, joined
from varcomm.checkpoint.shards import check_parts, is_whole, wrapped
from varcomm.checkpoint.stateful import Modules, holder_of, is_stateful, modules_in
from varcomm.errors import ArgumentError

__all__ = ["Leaf", "checked_key", "checked_rows", "checked_state", "flatten", "is_bare"]


class Leaf(NamedTuple):
    """A value of a state that is saved under one key."""

    path: Keys
    value: torch.Tensor | Rows | str  # a plain value is JSON
    own: bool  # inside PerRank


def checked_state(state: Any) -> dict[str, Any]:
    """Return a state, a dict with text keys, or raise ArgumentError."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        keys = f" with keys {list(state)[:5]}" if isinstance(state, dict) else ""
        raise ArgumentError(
            "state must be a dict whose keys are strings, such as {'model': model, 'step': 5}; got "
            f"{type(state).__name__}{keys}."
        )
    try:
        modules_in(state)
    except RecursionError as error:
        raise ArgumentError("the state contains itself or is nested too deeply.") from error
    return state


def flatten(state: dict[str, Any], rank: int) -> dict[str, Leaf]:
    """Return the values of a state on this rank by their keys, or raise ArgumentError."""
    flat: dict[str, Leaf] = {}
    _walk(checked_state(state), (), False, flat, modules_in(state), rank)
    return flat


def is_bare(value: Any) -> bool:
    """Return whether a value has only plain values in it."""
    if isinstance(value, Mapping):
        return all(map(is_bare, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_bare, value))
    return not (isinstance(value, torch.Tensor | Rows | PerRank) or is_stateful(value))


def checked_key(name: Any) -> str | int:
    """Return a key of a dict with tensors in it, or raise ArgumentError."""
    if not isinstance(name, str) and type(name) is not int:
        raise ArgumentError(
            f"{name!r} is a key of a dict with tensors or objects in it, and has type "
            f"{type(name).__name__}. Use texts or ints as keys of such dicts."
        )
    return str(name) if isinstance(name, str) else name


def _walk(
    value: Any, path: Keys, own: bool, flat: dict[str, Leaf], modules: Modules, rank: int
) -> None:
    def further(inner: Any, *names: Any, own: bool = own) -> None:
        _walk(inner, (*path, *names), own, flat, modules, rank)

    def add(leaf: torch.Tensor | Rows | str) -> None:
        if key in flat:
            raise ArgumentError(
                f"two parts of the state would be saved as {key!r}: {flat[key].path} and {path}. "
                "Rename one of them."
            )
        flat[key] = Leaf(path, leaf, own)

    key = joined(path)
    if isinstance(value, PerRank | Rows) and own:
        raise ArgumentError(f"{key!r}: {type(value).__name__} cannot be inside PerRank.")
    if isinstance(value, PerRank):
        further(value.value, str(rank), own=True)
    elif isinstance(value, Rows):
        add(checked_rows(key, value))
    elif isinstance(value, torch.Tensor):
        add(_checked_tensor(key, wrapped(value), own))
    elif holder := holder_of(value, modules):
        further(_named(key, holder.tree))
    elif isinstance(value, dict) and value and (_has_names(value) or not is_bare(value)):
        for name in value:
            further(value[name], _named(key, partial(checked_key, name)))
    elif isinstance(value, list) and not is_bare(value):
        for number, inner in enumerate(value):
            further(inner, (number,))
    elif not is_bare(value):
        raise ArgumentError(
            f"{key!r} is a {type(value).__name__} with tensors in it, which cannot be loaded into. "
            "Use a list or a dict."
        )
    else:
        add(_checked_value(key, value))


def _has_names(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in value)


def _named(key: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ArgumentError as error:
        raise ArgumentError(f"{key!r}: {error}") from error


def checked_rows(key: str, rows: Rows) -> Rows:
    """Return Rows with int64 ids on the device of their tensor, or raise ArgumentError."""
    tensor, ids, total = rows.tensor, rows.ids, rows.total
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not is_whole(tensor):
        raise ArgumentError(f"{key!r}: tensor of Rows must have rows; got {_short(tensor)}.")
    integers = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not integers or ids.shape != tensor.shape[:1]:
        raise ArgumentError(
            f"{key!r}: ids of Rows must be {len(tensor)} integers, one per row; got {_short(ids)}."
        )
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ArgumentError(f"{key!r}: total of Rows must be a number of rows; got {total!r}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < total:
        raise ArgumentError(
            f"{key!r}: ids of Rows must be below total, {total}; got {int(ids.min())}..."
            f"{int(ids.max())}."
        )
    return Rows(tensor.detach(), ids.to(tensor.device, torch.int64), total)


def _checked_tensor(key: str, tensor: torch.Tensor, own: bool) -> torch.Tensor:
    ragged = tensor.is_nested
    if ragged or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ArgumentError(f"{key!r} must be a dense tensor with values; got {_short(tensor)}.")
    if is_whole(tensor) and type(tensor) is not torch.Tensor:
        raise ArgumentError(
            f"{key!r} is a {type(tensor).__name__}, which could not be loaded as such. Save a "
            "plain tensor."
        )
    if own and not is_whole(tensor):
        raise ArgumentError(f"{key!r} is sharded over ranks and cannot be inside PerRank.")
    if not is_whole(tensor):
        check_parts(key, tensor)
    return tensor


def _checked_value(key: str, value: Any) -> str:
    try:
        return json.dumps(encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise ArgumentError(
            f"{key!r} has type {kind} and cannot be saved ({error}). Save tensors, texts, numbers "
            "of Python's own types, and lists and dicts of them."
        ) from error


def _short(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.is_nested:
        return f"a nested tensor, {value.dtype}, {value.layout}"
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}, {value.device}"
