"""Nested dicts and lists, and the flat keys that torch's checkpoints have for what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from varcomm.errors import ArgumentError
from varcomm.transport.serialization import travels

__all__ = ["Keys", "Number", "at", "joined", "nested", "prefix_hint", "spelled"]

# From the outermost container inwards: names in dicts, numbers in lists.
Keys: TypeAlias = tuple[str | int, ...]

# What wrappers of modules put before the names of parameters.
_WRAPPERS = ("module", "_orig_mod")


@travels
class Number(str):
    """A key of a dict that is a number, as a text, which is how torch's flat keys have it."""

    __slots__ = ()


def spelled(name: Any) -> str:
    """Return a key of a dict as a text that tells what it has been.

    Raises
    ------
    ArgumentError
        If it is neither a text nor an int, since nothing could tell later what it was.
    """
    if isinstance(name, str):
        return str.__str__(name)
    if type(name) is not int:
        raise ArgumentError(
            f"{name!r} is a key of a dict that has tensors or objects in it, and is of "
            f"{type(name).__name__}. Such dicts have texts or ints as keys."
        )
    return Number(name)


def joined(path: Keys) -> str:
    """Return the flat key of a place.

    >>> joined(("model", "0.weight")), joined(("options", 0, "lr"))
    ('model.0.weight', 'options.0.lr')
    """
    return ".".join(map(str, path))


def nested(flat: Mapping[Keys, Any]) -> dict[Any, Any]:
    """Return dicts and lists of what is at places.

    >>> nested({("a", "b"): 1, ("c", 0): 2, ("c", 1): 3, ("d", Number(7)): 4})
    {'a': {'b': 1}, 'c': [2, 3], 'd': {7: 4}}

    Raises
    ------
    ArgumentError
        If something is at a place within which there is something else.
    """
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], str | int]] = []
    inner = {id(root)}
    for path, value in flat.items():
        if not path:
            continue  # the whole, which has nothing in it
        container = root
        for name, after in pairwise(path):
            key = _key(name)
            if key not in container:
                made: dict[Any, Any] = {}
                container[key] = made
                inner.add(id(made))
                if isinstance(after, int):
                    lists.append((container, key))
            container = container[key]
            if id(container) not in inner:
                raise ArgumentError(f"{joined(path)!r} lies within something that is no container.")
        key = _key(path[-1])
        if key in container:
            raise ArgumentError(f"{joined(path)!r} is both a value and a container.")
        container[key] = value
    for container, key in reversed(lists):  # from the inside out
        items = container[key]
        container[key] = [items[number] for number in sorted(items)]
    return root


def at(tree: Any, path: Keys, default: Any = None) -> Any:
    """Return what is at a place in dicts and lists, or `default`."""
    for name in path:
        inner = default
        if isinstance(tree, Mapping):
            # torch alone has not noted which keys were numbers
            inner = tree.get(_key(name), tree.get(name, default))
        elif isinstance(tree, list) and isinstance(name, int) and name < len(tree):
            inner = tree[name]
        if inner is default:
            return default
        tree = inner
    return tree


def _key(name: str | int) -> str | int:
    return int(name) if isinstance(name, Number) else name


def prefix_hint(here: Iterable[str], saved: Iterable[str]) -> str:
    """Return advice where names differ by what a wrapper of the module puts before them."""
    ours, theirs = set(here), set(saved)
    if ours.isdisjoint(theirs) and {*map(_unwrapped, ours)} & {*map(_unwrapped, theirs)}:
        return (
            " Names differ by 'module.' or '_orig_mod.', which DistributedDataParallel and "
            "torch.compile put before them: save and load the module inside, such as model.module."
        )
    return ""


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
