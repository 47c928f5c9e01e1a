"""Paths in nested states, and plain values as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.transport.serialization import dtype_of

__all__ = ["Keys", "at", "decode", "encode", "joined", "nested", "prefix_hint"]

# From the outermost container inwards: a text or an int is a key of a dict, (n,) a place in a list.
Keys: TypeAlias = tuple[str | int | tuple[int], ...]

# Prefixes that wrappers of modules add to names of parameters.
_WRAPPERS = ("module", "_orig_mod")


def joined(path: Keys) -> str:
    """Return the flat key of a path.

    >>> joined(("model", "0.weight")), joined(("options", (0,), "lr"))
    ('model.0.weight', 'options.0.lr')
    """
    return ".".join(str(name[0] if isinstance(name, tuple) else name) for name in path)


def nested(flat: Mapping[Keys, Any]) -> dict[Any, Any]:
    """Return the dicts and lists that have these values at these paths.

    >>> nested({("a", "b"): 1, ("c", (0,)): 2, ("c", (1,)): 3, ("d", 7): 4})
    {'a': {'b': 1}, 'c': [2, 3], 'd': {7: 4}}

    Raises
    ------
    ArgumentError
        If a path leads through a value.
    """
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], Any]] = []
    containers = {id(root)}
    for path, value in flat.items():
        if not path:
            continue  # an empty state
        here = root
        for name, after in pairwise(path):
            if name not in here:
                here[name] = made = dict[Any, Any]()
                containers.add(id(made))
                if isinstance(after, tuple):
                    lists.append((here, name))
            here = here[name]
            if id(here) not in containers:
                raise ArgumentError(f"{joined(path)!r} is inside a value.")
        if path[-1] in here:
            raise ArgumentError(f"{joined(path)!r} is both a value and a container.")
        here[path[-1]] = value
    for here, name in reversed(lists):  # inner lists first
        items = here[name]
        if not all(isinstance(place, tuple) for place in items):
            raise ArgumentError(f"{name!r} is both a list and a dict.")
        here[name] = [items[place] for place in sorted(items)]
    return root


def at(tree: Any, path: Keys, default: Any = None) -> Any:
    """Return the value at a path in dicts and lists, or `default`."""
    for name in path:
        if isinstance(name, tuple):
            if not isinstance(tree, list) or name[0] >= len(tree):
                return default
            tree = tree[name[0]]
        elif isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        else:
            return default
    return tree


def prefix_hint(here: Iterable[str], saved: Iterable[str]) -> str:
    """Return advice if names differ only by the prefix of a wrapper."""
    ours, theirs = set(here), set(saved)
    if ours.isdisjoint(theirs) and {*map(_unwrapped, ours)} & {*map(_unwrapped, theirs)}:
        return (
            " Names differ by 'module.' or '_orig_mod.', which DistributedDataParallel and "
            "torch.compile add: save and load the inner module, such as model.module."
        )
    return ""


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "!tuple": tuple,
    "!Size": torch.Size,
    "!set": set,
    "!frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "!dict": dict,
    "!OrderedDict": OrderedDict,
    "!Counter": lambda pairs: Counter(dict(pairs)),
}
_ATOMS: dict[str, Callable[[Any], Any]] = {
    "!float": float,
    "!complex": complex,
    "!bytes": base64.b64decode,
    "!dtype": dtype_of,
    "!device": torch.device,
}


def encode(value: Any) -> Any:
    """Return a plain value as JSON; types that JSON lacks are dicts with one key, as ``"!tuple"``.

    >>> encode({"a": (1, 2.5), "b": {3: None}})
    {'a': {'!tuple': [1, 2.5]}, 'b': {'!dict': [[3, None]]}}

    Raises
    ------
    TypeError
        If the value has another type, subclasses included.
    """
    kind = type(value)
    tag = f"!{kind.__name__}"
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [*map(encode, value)]
    if kind is dict and all(type(name) is str and name[:1] != "!" for name in value):
        return {name: encode(item) for name, item in value.items()}
    if kind in (dict, OrderedDict, Counter):
        return {tag: [[encode(name), encode(item)] for name, item in value.items()]}
    if kind in (tuple, torch.Size):
        return {tag: [*map(encode, value)]}
    if kind in (set, frozenset):  # in one order on all ranks
        return {tag: sorted(map(encode, value), key=json.dumps)}
    if kind in (float, complex, torch.dtype, torch.device):
        return {tag: str(value).removeprefix("torch.")}
    if kind is bytes:
        return {tag: base64.b64encode(value).decode()}
    raise TypeError(f"{kind.__name__} is not a plain value")


def decode(said: Any) -> Any:
    """Return the value that :func:`encode` was given, or raise ArgumentError."""
    if isinstance(said, list):
        return [*map(decode, said)]
    if not isinstance(said, dict):
        return said
    tag = next(iter(said), "")
    if tag[:1] != "!":
        return {name: decode(item) for name, item in said.items()}
    try:
        content = said[tag]
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]([(decode(name), decode(item)) for name, item in content])
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](map(decode, content))
        return _ATOMS[tag](content)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{str(said)[:100]} is not a plain value: {error!r}") from error
