"""What the code of a function names: other functions, by globals, modules, defaults, closures."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = [
    "Names",
    "content",
    "functions_in",
    "instructions",
    "is_opaque",
    "members",
    "named",
    "scope_of",
]

_FROM_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})

# Whatever these packages call themselves is their own business.
_OPAQUE = frozenset({"torch", "varcomm", "numpy"})


def is_opaque(name: str | None) -> bool:
    """Return whether what a module of this name calls is not looked at."""
    return (name or "").partition(".")[0] in _OPAQUE


def scope_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that are looked at: none of packages that are opaque."""
    scope = function.__globals__
    return {} if is_opaque(scope.get("__name__")) else scope


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
        loaded = {one.argval for one, _ in instructions(code) if one.opname in _FROM_GLOBALS}
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        every = set(code.co_names).union(*(Names.of(one).of_attributes for one in inner))
        return Names(frozenset(loaded), frozenset(every - loaded))


def instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction of a function, and of those that it defines, and the one after it."""
    yield from pairwise(dis.get_instructions(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from instructions(constant)


def members(module: ModuleType, wanted: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a module of Python holds under some names."""
    if not is_opaque(module.__name__):
        for name in wanted & vars(module).keys():
            yield name, vars(module)[name]


def content(cell: CellType) -> Any:
    """Return what a cell of a closure holds; None where it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a value is or holds."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType | staticmethod | classmethod):
        yield from functions_in(value.__func__)
    elif isinstance(value, functools.partial):
        yield from functions_in(value.func)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_in(part)
    elif type(value) in (list, tuple, dict):
        for item in [*value.values()] if type(value) is dict else value:
            yield from functions_in(item)


def named(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions that a function names."""
    names, scope = Names.of(function.__code__), scope_of(function)
    todo = [scope[name] for name in names.of_globals if name in scope]
    todo += [content(cell) for cell in function.__closure__ or ()]
    todo += [function.__defaults__, function.__kwdefaults__]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if not isinstance(value, ModuleType):
            yield from functions_in(value)
        elif id(value) not in seen:
            seen.add(id(value))
            todo += [member for _, member in members(value, names.of_attributes)]
