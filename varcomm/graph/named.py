"""What the code of a function names: other functions, by globals, modules, defaults, closures."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["content", "functions_in", "instructions", "is_opaque", "members", "named", "names"]

# Whatever these packages call themselves is their own business.
_OPAQUE = frozenset({"torch", "varcomm", "numpy"})


def is_opaque(name: str) -> bool:
    """Return whether what a module of this name calls is not looked at."""
    return name.partition(".")[0] in _OPAQUE


@functools.cache
def names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and in those that it defines.

    >>> sorted(names((lambda x: [len(abs(y)) for y in x.values]).__code__))
    ['abs', 'len', 'values']
    """
    inner = (names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction of a function, and of those that it defines, and the one after it."""
    own = list(dis.get_instructions(code))
    yield from pairwise(own)
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
    wanted = names(function.__code__)
    todo = [value for name, value in function.__globals__.items() if name in wanted]
    todo += [content(cell) for cell in function.__closure__ or ()]
    todo += [function.__defaults__, function.__kwdefaults__]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if not isinstance(value, ModuleType):
            yield from functions_in(value)
        elif id(value) not in seen:
            seen.add(id(value))
            todo += [member for _, member in members(value, wanted)]
