"""Nested dicts and lists, and the flat keys that torch's checkpoints have for what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from varcomm.errors import ArgumentError

__all__ = ["Keys", "at", "joined", "nested"]

# From the outermost container inwards: names in dicts, numbers in lists.
Keys: TypeAlias = tuple[str | int, ...]


def joined(path: Keys) -> str:
    """Return the flat key of a place.

    >>> joined(("model", "0.weight")), joined(("options", 0, "lr"))
    ('model.0.weight', 'options.0.lr')
    """
    return ".".join(map(str, path))


def nested(flat: Mapping[Keys, Any]) -> dict[Any, Any]:
    """Return dicts and lists of what is at places.

    >>> nested({("a", "b"): 1, ("c", 0): 2, ("c", 1): 3})
    {'a': {'b': 1}, 'c': [2, 3]}

    Raises
    ------
    ArgumentError
        If something is at a place within which there is something else.
    """
    root: dict[str | int, Any] = {}
    lists: list[tuple[dict[str | int, Any], str | int]] = []
    inner = {id(root)}
    for path, value in flat.items():
        container = root
        for name, after in pairwise(path):
            if name not in container:
                made: dict[str | int, Any] = {}
                container[name] = made
                inner.add(id(made))
                if isinstance(after, int):
                    lists.append((container, name))
            container = container[name]
            if id(container) not in inner:
                raise ArgumentError(f"{joined(path)!r} lies within something that is no container.")
        if path[-1] in container:
            raise ArgumentError(f"{joined(path)!r} is both a value and a container.")
        container[path[-1]] = value
    for container, name in reversed(lists):  # from the inside out
        items = container[name]
        container[name] = [items[number] for number in sorted(items)]
    return root


def at(tree: Any, path: Keys, default: Any = None) -> Any:
    """Return what is at a place in dicts and lists, or `default`."""
    for name in path:
        inner = tree.get(name, default) if isinstance(tree, Mapping) else default
        if isinstance(tree, list) and isinstance(name, int) and name < len(tree):
            inner = tree[name]
        if inner is default:
            return default
        tree = inner
    return tree
