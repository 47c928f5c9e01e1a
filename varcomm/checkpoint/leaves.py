"""What is to be saved of a state, one by one."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch

from varcomm.checkpoint.boxes import check_parts, is_whole, wrapped
from varcomm.checkpoint.holders import Modules, holder_of, modules_in
from varcomm.checkpoint.kinds import PerRank, Rows
from varcomm.checkpoint.nested import Keys, joined, spelled
from varcomm.errors import ArgumentError

__all__ = ["Leaves", "Value", "checked_rows", "checked_state", "is_bare", "leaves_of"]


@dataclass(frozen=True)
class Value:
    """A plain value, as it is written, and what tells it apart."""

    content: io.BytesIO
    digest: int
    is_empty: bool  # a container without anything in it


@dataclass
class Leaves:
    """What this rank has of a state, by key.

    Attributes
    ----------
    paths : dict
        Where in the state each key is.
    found : dict of str to torch.Tensor or Value
        Of all but rows.
    own : set of str
        Those that are of this rank alone.
    rows : dict of str to Rows
    """

    paths: dict[str, Keys] = field(default_factory=dict)
    found: dict[str, torch.Tensor | Value] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    rows: dict[str, Rows] = field(default_factory=dict)


def checked_state(state: Any) -> dict[str, Any]:
    """Return a state, which has names at least at its first level, or raise ArgumentError."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ArgumentError(
            "state must be a dict whose keys are strings, such as {'model': model, 'step': 5}; got "
            f"{type(state).__name__}"
            + (f" with keys {list(state)[:5]}." if isinstance(state, dict) else ".")
        )
    try:
        modules_in(state)  # goes wherever a state can
    except RecursionError as error:
        raise ArgumentError("the state has itself in it, or is nested too deep.") from error
    return state


def leaves_of(state: dict[str, Any], rank: int) -> Leaves:
    """Return what this rank has of a state.

    Raises
    ------
    ArgumentError
        If something can be neither saved nor loaded again without pickle, or two have one key.
    """
    leaves = Leaves()
    _walk(checked_state(state), (), False, leaves, modules_in(state), rank)
    return leaves


def is_bare(value: Any, modules: Modules) -> bool:
    """Tell whether in a list or dict, however nested, there is nothing but plain values."""
    if isinstance(value, Mapping):
        return all(is_bare(item, modules) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_bare(item, modules) for item in value)
    return not isinstance(value, torch.Tensor | Rows | PerRank) and not holder_of(value, modules)


def _walk(value: Any, path: Keys, own: bool, leaves: Leaves, modules: Modules, rank: int) -> None:
    def further(inner: Any, *names: str | int, own: bool = own) -> None:
        _walk(inner, (*path, *names), own, leaves, modules, rank)

    if isinstance(value, PerRank | Rows) and own:
        raise ArgumentError(
            f"{joined(path)!r}: within PerRank there can be no {type(value).__name__}."
        )
    if isinstance(value, PerRank):
        further(value.value, str(rank), own=True)
    elif isinstance(value, Rows):
        _put(leaves, path, False)
        leaves.rows[joined(path)] = checked_rows(joined(path), value)
    elif isinstance(value, torch.Tensor):
        _put(leaves, path, own)
        leaves.found[joined(path)] = _checked_tensor(joined(path), wrapped(value), own)
    elif holder := holder_of(value, modules):
        further(_told(path, holder.tree))
    elif isinstance(value, dict) and value and _has_names(value, modules):
        for name, text in [(name, _told(path, partial(spelled, name))) for name in value]:
            further(value[name], text)
    elif isinstance(value, list) and not _is_terminal(value, modules):
        for number, inner in enumerate(value):
            further(inner, number)
    elif not is_bare(value, modules):
        raise ArgumentError(
            f"{joined(path)!r} is a {type(value).__name__} with tensors in it, into which nothing "
            "could be loaded. Make it a list or a dict."
        )
    else:
        _put(leaves, path, own)
        leaves.found[joined(path)] = _checked_value(joined(path), value)


def _put(leaves: Leaves, path: Keys, own: bool) -> None:
    key = joined(path)
    if key in leaves.paths:
        raise ArgumentError(
            f"two parts of the state would be saved as {key!r}: {leaves.paths[key]} and {path}. "
            "Rename one of them."
        )
    leaves.paths[key] = path
    if own:
        leaves.own.add(key)


def _has_names(value: Mapping[Any, Any], modules: Modules) -> bool:
    # where keys are numbers, say, torch's flat keys would make texts of them
    return all(isinstance(name, str) for name in value) or not is_bare(value, modules)


def _is_terminal(value: list[Any], modules: Modules) -> bool:
    """Tell whether torch's checkpoints keep a list in one piece."""
    if not is_bare(value, modules):
        return False
    return not any(
        isinstance(item, Mapping) or (isinstance(item, list) and not _is_terminal(item, modules))
        for item in value
    )


def _told(path: Keys, tree: Callable[[], Any]) -> Any:
    try:
        return tree()
    except ArgumentError as error:
        raise ArgumentError(f"{joined(path)!r}: {error}") from error


def checked_rows(key: str, rows: Rows) -> Rows:
    """Return rows with numbers that fit them, or raise ArgumentError."""
    tensor, ids, total = rows.tensor, rows.ids, rows.total
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not is_whole(tensor):
        raise ArgumentError(f"{key!r}: the tensor of Rows must have rows; got {_short(tensor)}.")
    integers = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not integers or ids.shape != tensor.shape[:1]:
        raise ArgumentError(
            f"{key!r}: the ids of Rows must be {len(tensor)} integers, one for each row; got "
            f"{_short(ids)}."
        )
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ArgumentError(f"{key!r}: the total of Rows must be a number of rows; got {total!r}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < total:
        raise ArgumentError(
            f"{key!r}: the ids of Rows span {int(ids.min())}...{int(ids.max())}, but there are "
            f"{total} rows."
        )
    return Rows(tensor.detach(), ids.to(tensor.device, torch.int64), total)


def _checked_tensor(key: str, tensor: torch.Tensor, own: bool) -> torch.Tensor:
    ragged = tensor.is_nested
    if ragged or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ArgumentError(f"{key!r} is not a dense tensor with values: it is {_short(tensor)}.")
    if is_whole(tensor) and type(tensor) is not torch.Tensor:
        raise ArgumentError(
            f"{key!r} is a {type(tensor).__name__}, which could not be loaded again without "
            "pickle. Save a plain tensor of it."
        )
    if own and not is_whole(tensor):
        raise ArgumentError(
            f"{key!r} is part of a tensor of all ranks, and is said to be this rank's own by "
            "PerRank."
        )
    if not is_whole(tensor):
        check_parts(key, tensor)
    return tensor


def _checked_value(key: str, value: Any) -> Value:
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception as error:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
        raise ArgumentError(
            f"{key!r} is of {name} and could not be loaded again without pickle. Save tensors, "
            "texts, numbers of Python's own, ints below 2**2000, and lists and dicts of them."
        ) from error
    content.seek(0)
    return Value(content, crc32(_canonical(value).encode()), value in ({}, []))


def _canonical(value: Any) -> str:
    """Return a text that is the same for values that are equal, in whatever order they are."""
    if isinstance(value, Mapping):
        items = sorted(f"{_canonical(key)}: {_canonical(item)}" for key, item in value.items())
    elif isinstance(value, set):
        items = sorted(map(_canonical, value))
    elif isinstance(value, list | tuple):
        items = [_canonical(item) for item in value]
    else:
        return repr(value)
    return f"{type(value).__name__}{items}"


def _short(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.is_nested:
        return f"a nested tensor, {value.dtype}, {value.layout}"
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}, {value.device}"
