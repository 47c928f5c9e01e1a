"""Values in nested tuples, lists and dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from varcomm.errors import ArgumentError

_DEEPEST = 100  # containers in each other


def leaves(value: Any) -> dict[str, Any]:
    """Return each leaf by its place, such as ``['scores'][0]``."""
    pairs = list(_pairs(value, "", 0))
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ArgumentError("keys of a dictionary must differ as text. Rename them.")
    return found


def _pairs(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ArgumentError(
            f"the value contains itself, or more than {_DEEPEST} containers in each other. Pass a "
            "value without cycles."
        )
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _pairs(each, f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _pairs(each, f"{place}[{index}]", depth + 1)
    else:
        yield place, value


def lists(value: Any, place: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the place and the items of each list, and of each dictionary with integer keys."""
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            yield place, [*value.values()]
        for key, each in value.items():
            yield from lists(each, f"{place}[{key!r}]")
    elif isinstance(value, tuple | list):
        if isinstance(value, list) and value:
            yield place, value
        for index, each in enumerate(value):
            yield from lists(each, f"{place}[{index}]")


def rebuilt(value: Any, results: Mapping[str, Any], place: str = "") -> Any:
    """Return the structure of `value` with the result of each place as its leaf, by default None.

    A mapping that cannot be changed becomes a dictionary.
    """
    if isinstance(value, Mapping):
        items = {key: rebuilt(each, results, f"{place}[{key!r}]") for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        made = copy.copy(value)
        for key, each in items.items():
            made[key] = each
        return made
    if isinstance(value, tuple | list):
        parts = [rebuilt(each, results, f"{place}[{at}]") for at, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return results.get(place)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the structure of `value` with each leaf changed."""
    return rebuilt(value, {place: change(leaf) for place, leaf in leaves(value).items()})
