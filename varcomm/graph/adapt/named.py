"""What the code of a function names: other functions, by globals, modules, defaults, closures."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

__all__ = [
    "Names",
    "content",
    "functions_in",
    "held",
    "is_opaque",
    "lookups",
    "members",
    "named",
    "scope_of",
]

_FROM_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_BY_NAME = _FROM_GLOBALS | {"LOAD_ATTR", "LOAD_DEREF", "IMPORT_NAME", "IMPORT_FROM"}

# Whatever these packages call themselves is their own business, as with modules of Python itself.
_OPAQUE = frozenset({"torch", "varcomm", "numpy"})

_PYTHON = os.path.dirname(os.__file__)


def is_opaque(name: str | None) -> bool:
    """Return whether what a module of this name calls is not looked at."""
    return (name or "").partition(".")[0] in _OPAQUE


def _looked_at(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module, or none if it is of an opaque package or of Python itself."""
    return {} if is_opaque(scope.get("__name__")) or _is_of_python(scope) else scope


def _is_of_python(scope: dict[str, Any]) -> bool:
    """Return whether globals are of a module of Python itself, whatever name they go by."""
    spec = scope.get("__spec__")
    name, origin = getattr(spec, "name", ""), getattr(spec, "origin", None) or ""
    return name.partition(".")[0] in sys.stdlib_module_names and (
        origin in ("built-in", "frozen") or origin.startswith(_PYTHON + os.sep)
    )


def scope_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals of a function that are looked at."""
    return _looked_at(function.__globals__)


@dataclass(frozen=True)
class Names:
    """The names in the code of a function, and of those that it defines.

    Attributes
    ----------
    of_globals : frozenset of str
        What it looks up in the module of Python that it is in.
    of_attributes : frozenset of str
        What it looks up in whatever else.
    """

    of_globals: frozenset[str]
    of_attributes: frozenset[str]

    @staticmethod
    @functools.cache
    def of(code: CodeType) -> Names:
        """Return the names in a code, once looked for.

        >>> names = Names.of((lambda x: [len(abs(y)) for y in x.values]).__code__)
        >>> sorted(names.of_globals), sorted(names.of_attributes)
        (['abs', 'len'], ['values'])
        """
        loaded = {one.name for one in lookups(code) if one.opname in _FROM_GLOBALS}
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        every = set(code.co_names).union(*(Names.of(one).of_attributes for one in inner))
        return Names(frozenset(loaded), frozenset(every - loaded))


class Lookup(NamedTuple):
    """An instruction that looks something up by a name, and the name in the one after it."""

    opname: str
    name: str
    then: Any


@functools.cache  # taking code apart is most of what it costs to distribute a model
def lookups(code: CodeType) -> tuple[Lookup, ...]:
    """Return what a function looks up, and what those do that it defines."""
    own = pairwise(dis.get_instructions(code))
    found = [
        Lookup(one.opname, one.argval, two.argval) for one, two in own if one.opname in _BY_NAME
    ]
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return (*found, *chain.from_iterable(map(lookups, inner)))


def members(module: ModuleType, wanted: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a module of Python holds under some names."""
    scope = _looked_at(vars(module))
    for name in wanted & scope.keys():
        yield name, scope[name]


def content(cell: CellType) -> Any:
    """Return what a cell of a closure holds; None where it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def functions_in(value: Any, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Yield the functions that a value is or holds.

    `seen` are the containers, by their ids, that have been looked into: each is only once.
    """
    seen = set() if seen is None else seen
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, FunctionType):
            yield one
        elif isinstance(one, MethodType | staticmethod | classmethod):
            todo.append(one.__func__)
        elif isinstance(one, functools.partial):
            todo.append(one.func)
        elif isinstance(one, property):
            todo += (one.fdel, one.fset, one.fget)
        elif type(one) in (list, tuple, dict) and id(one) not in seen:
            seen.add(id(one))
            todo += reversed([*one.values()] if type(one) is dict else one)


def held(values: list[Any], wanted: frozenset[str], seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that values are or hold, and modules of Python under some names.

    Nothing is yielded of containers `seen` before.
    """
    todo, modules = [*values], set[int]()
    while todo:
        value = todo.pop()
        if not isinstance(value, ModuleType):
            yield from functions_in(value, seen)
        elif id(value) not in modules:
            modules.add(id(value))
            todo += [member for _, member in members(value, wanted)]


def named(function: FunctionType, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that a function names, but for those in containers `seen` before."""
    names, scope = Names.of(function.__code__), scope_of(function)
    values = [scope[name] for name in names.of_globals if name in scope]
    values += [content(cell) for cell in function.__closure__ or ()]
    values += [function.__defaults__, function.__kwdefaults__]
    yield from held(values, names.of_attributes, seen)
