"""Replacement of functions that the methods of a module reach.

A layer that calls ``gcn_norm`` means that of the full graph. In one distributed layer that name has
to mean another function, and nowhere else. The layer's class is exchanged for one made for it, as
``torch.nn.utils.parametrize`` does: methods that reach such a function run the same code with other
globals. Python modules do not change.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, new_class
from typing import Any

import torch

from varcomm.errors import ArgumentError

__all__ = ["Rebinding", "release"]

# The attribute of a module that holds its replaced attributes, and those in their place.
_BEFORE = "_before_rebinding"
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) | {_BEFORE}

# Code of these packages, and of Python itself, is not searched.
_OPAQUE = frozenset({"torch", "varcomm", "numpy"})
_PYTHON = os.path.dirname(os.__file__) + os.sep


class Rebinding:
    """A mapping from functions to their replacements in the methods of modules.

    A method reaches a function by a global name, its own or that of a function which it calls so;
    by a Python module, ``nn.global_add_pool``; by a default argument or an enclosed variable; or by
    an attribute of the instance that holds the function. Other globals keep the values that they
    have when the module is rebound.

    Parameters
    ----------
    ours : mapping
        Functions, or methods as their classes hold them, and functions in their place.
    """

    def __init__(self, ours: Mapping[Any, Callable[..., Any]]) -> None:
        self._ours = ours
        self._reaching: dict[FunctionType, bool] = {}
        self._scopes: dict[int, dict[str, Any]] = {}
        self._rebuilt: dict[FunctionType, FunctionType] = {}
        self._kinds: dict[type, type] = {}
        self._passed: set[type] = set()
        self._seen: list[tuple[Callable[[], Mapping[str, Any]], dict[str, Any]]] = []

    def is_current(self) -> bool:
        """Return whether all names that were looked up still have the same values."""
        return all(
            len(now := look()) == len(then) and all(now.get(k, self) is v for k, v in then.items())
            for look, then in self._seen
        )

    def _look(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._seen.append((look, dict(look())))

    def check(self, module: torch.nn.Module, what: str) -> None:
        """Raise ArgumentError if a module, named `what`, reaches a function in a way not listed."""
        where = f"cannot distribute {what}: "
        kind = _original(module)
        if kind in self._passed:
            return
        if any("_rebound_from" in vars(owner) for owner in kind.__mro__):
            raise ArgumentError(
                f"{where}its class was exchanged after it was distributed, as parametrizations do. "
                "Register them before."
            )
        ours = {one.__name__ for one in self._ours if one.__qualname__ == one.__name__}
        affected = {owner: self._affected(owner) for owner in _classes(kind)}
        by_name = {owner.__name__: owner for owner in affected}
        for function in _functions_in([[*vars(owner).values()] for owner in affected], set()):
            for opname, name, then in _Names.of(function.__code__).lookups:
                if (opname == "IMPORT_FROM" and name in ours) or (
                    opname == "IMPORT_NAME" and self._leads_to_ours(name, function)
                ):
                    raise ArgumentError(
                        f"{where}{function.__qualname__} imports {name} when it runs, and would "
                        "get that of one process. Import it at the top of the file."
                    )
                if opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_DEREF"):
                    owner = function.__globals__.get(name, by_name.get(name))
                    if isinstance(owner, type) and then in affected.get(owner, ()):
                        raise ArgumentError(
                            f"{where}{function.__qualname__} calls {name}.{then} by its "
                            "class, and would get that of one process. Call super()."
                        )
        self._passed.add(kind)

    def _leads_to_ours(self, imported: str, function: FunctionType) -> bool:
        modules = [sys.modules.get(imported), sys.modules.get(imported.partition(".")[0])]
        attributes = _Names.of(function.__code__).of_attributes
        return any(one in self._ours for one in _held(modules, attributes, set()))

    def __call__(self, module: torch.nn.Module) -> None:
        """Rebind the methods of a module, and the functions that its attributes hold."""
        release(module)
        kind = type(module)
        if kind not in self._kinds:
            self._kinds[kind] = self._exchanged(kind)
        if self._kinds[kind] is not kind:
            module.__class__ = self._kinds[kind]
        before = {}
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and self._affects(value):
                before[name] = value, self._value(value)
        if before:
            vars(module).update({name: new for name, (_, new) in before.items()})
            vars(module)[_BEFORE] = before

    def _exchanged(self, kind: type) -> type:
        """Return a class like `kind` with rebound methods; itself, if no method is affected."""
        for owner in _classes(kind):
            self._look(functools.partial(vars, owner))
        parts = {
            owner: {name: self._value(vars(owner)[name]) for name in self._affected(owner)}
            for owner in _classes(kind)
        }
        own = parts.pop(kind, {})
        # each base precedes the class that it is of, in the order of super()
        bases = [_derived(owner, (owner,), part) for owner, part in parts.items() if part]
        if not own and not bases:
            return kind
        return _derived(kind, (kind, *bases), own | {"_rebound_from": kind})

    def _affected(self, owner: type) -> list[str]:
        return [name for name, member in vars(owner).items() if self._affects(member)]

    def _affects(self, value: Any) -> bool:
        return any(map(self._reaches, _functions_in(value, set())))

    def _reaches(self, function: FunctionType) -> bool:
        """Return whether a function is one of ours, or names one, directly or by others."""
        if function not in self._reaching:
            seen, todo, found = {function}, [function], False
            containers: set[int] = set()
            while todo and not found:
                one = todo.pop()
                found = one in self._ours or self._reaching.get(one, False)
                if not found:
                    more = set(_named(one, containers)) - seen
                    seen |= more
                    todo += more
            self._reaching |= {function: True} if found else dict.fromkeys(seen, False)
        return self._reaching[function]

    def _value(self, value: Any) -> Any:
        """Return the replacement of a value that is, or holds, a function."""
        if not self._affects(value):
            return value
        if isinstance(value, FunctionType):
            return self._ours[value] if value in self._ours else self._rebuild(value)
        if isinstance(value, MethodType):
            return MethodType(self._value(value.__func__), value.__self__)
        if isinstance(value, functools.partial):
            return functools.partial(self._value(value.func), *value.args, **value.keywords)
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self._value(value.__func__))
        if isinstance(value, property):
            fget, fset, fdel = map(self._value, (value.fget, value.fset, value.fdel))
            return property(fget, fset, fdel, value.__doc__)
        if isinstance(value, dict):
            return {key: self._value(item) for key, item in value.items()}
        return type(value)(map(self._value, value))

    def _rebuild(self, function: FunctionType) -> FunctionType:
        """Return a function of the same code, with other globals."""
        if function in self._rebuilt:
            return self._rebuilt[function]
        scope, names = self._scope(function), _Names.of(function.__code__)
        cells = None
        if function.__closure__ is not None:
            cells = tuple(self._cell(cell, names.of_attributes) for cell in function.__closure__)
        new = FunctionType(
            function.__code__, scope, function.__name__, self._value(function.__defaults__), cells
        )
        self._rebuilt[function] = new  # before its globals: they may name it
        new.__kwdefaults__ = self._value(function.__kwdefaults__)
        functools.update_wrapper(new, function)
        for name in names.of_globals & _searched(function.__globals__).keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                scope[name] = self._module(value, scope[name], names.of_attributes)
            else:
                scope[name] = self._value(value)
        return new

    def _scope(self, function: FunctionType) -> dict[str, Any]:
        """Return the globals of all rebuilt functions of one Python module."""
        own = function.__globals__
        if _searched(own) is not own:
            return own
        if id(own) not in self._scopes:
            self._look(lambda: own)
            # by its name torch.compile would find the module, and in it the original functions
            self._scopes[id(own)] = {key: own[key] for key in own if key != "__name__"}
        scope = self._scopes[id(own)]
        if "__name__" in _Names.of(function.__code__).of_globals:
            scope["__name__"] = own["__name__"]
        return scope

    def _cell(self, cell: CellType, wanted: frozenset[str]) -> CellType:
        value = _content(cell)
        self._look(lambda: {"": _content(cell)})
        if isinstance(value, ModuleType):
            new = self._module(value, value, wanted)
        else:
            new = self._value(value)
        return cell if new is value else CellType(new)

    def _module(
        self,
        module: ModuleType,
        made: ModuleType,
        wanted: frozenset[str],
        within: tuple[ModuleType, ...] = (),
    ) -> ModuleType:
        """Return a copy of a Python module in which our functions stand under the wanted names.

        `made` is the copy so far, or the module itself; `within`, the modules on the way to it.
        """
        new, within = {}, (*within, module)
        self._look(lambda: _members(module, wanted))
        for name, value in _members(module, wanted).items():
            if not isinstance(value, ModuleType):
                new[name] = self._value(value)
            elif value not in within:
                new[name] = self._module(value, vars(made)[name], wanted, within)
        new = {name: value for name, value in new.items() if value is not vars(made)[name]}
        if new and made is module:
            made = ModuleType(module.__name__, module.__doc__)
            vars(made).update(vars(module))
        vars(made).update(new)
        return made


def release(module: torch.nn.Module) -> None:
    """Undo a :class:`Rebinding` of a module."""
    for name, (old, new) in vars(module).pop(_BEFORE, {}).items():
        if vars(module).get(name) is new:
            vars(module)[name] = old
    module.__class__ = _original(module)


def _original(module: torch.nn.Module) -> type:
    kind = type(module)
    return vars(kind).get("_rebound_from", kind)  # type: ignore[no-any-return]


def _derived(kind: type, bases: tuple[type, ...], own: dict[str, Any]) -> type:
    """Return a class with the name of another."""
    like = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return new_class(kind.__name__, bases, {}, lambda body: body.update(like | own))


def _classes(kind: type) -> Iterator[type]:
    """Yield the classes of a module whose code is searched."""
    for owner in kind.__mro__:
        if owner is not object and not _is_opaque(owner.__module__):
            yield owner


def _is_opaque(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _OPAQUE


def _searched(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module, or none if it is opaque or of Python itself."""
    spec = scope.get("__spec__")
    name, origin = getattr(spec, "name", ""), getattr(spec, "origin", None) or ""
    of_python = name.partition(".")[0] in sys.stdlib_module_names and (
        origin in ("built-in", "frozen") or origin.startswith(_PYTHON)
    )
    return {} if of_python or _is_opaque(scope.get("__name__")) else scope


@dataclass(frozen=True)
class _Names:
    """The names in the code of a function, and in the functions that it defines.

    Attributes
    ----------
    of_globals : frozenset of str
        Names looked up in the function's Python module.
    of_attributes : frozenset of str
        Names looked up elsewhere.
    lookups : tuple
        Look-ups in their order: operation, name, and the argument of the next instruction.
    """

    of_globals: frozenset[str]
    of_attributes: frozenset[str]
    lookups: tuple[tuple[str, str, Any], ...]

    @staticmethod
    @functools.cache  # disassembly is most of the time that distribute takes
    def of(code: CodeType) -> _Names:
        """Return the names in a code."""
        from_globals = {"LOAD_GLOBAL", "LOAD_NAME"}
        by_name = from_globals | {"LOAD_ATTR", "LOAD_DEREF", "IMPORT_NAME", "IMPORT_FROM"}
        own = [
            (one.opname, one.argval, two.argval)
            for one, two in pairwise(dis.get_instructions(code))
            if one.opname in by_name
        ]
        inner = [_Names.of(one) for one in code.co_consts if isinstance(one, CodeType)]
        lookups = (*own, *chain.from_iterable(one.lookups for one in inner))
        loaded = frozenset(name for opname, name, _ in lookups if opname in from_globals)
        every = frozenset(code.co_names).union(*(one.of_attributes for one in inner))
        return _Names(loaded, every - loaded, lookups)


def _members(module: ModuleType, wanted: frozenset[str]) -> dict[str, Any]:
    scope = _searched(vars(module))
    return {name: scope[name] for name in wanted & scope.keys()}


def _content(cell: CellType) -> Any:
    """Return the value of a closure's cell; None if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _functions_in(value: Any, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that a value is or holds; `seen` has ids of searched containers."""
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


def _held(values: list[Any], wanted: frozenset[str], seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that values hold, and Python modules under the wanted names."""
    todo, modules = [*values], set[int]()
    while todo:
        value = todo.pop()
        if not isinstance(value, ModuleType):
            yield from _functions_in(value, seen)
        elif id(value) not in modules:
            modules.add(id(value))
            todo += _members(value, wanted).values()


def _named(function: FunctionType, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that a function names."""
    names, scope = _Names.of(function.__code__), _searched(function.__globals__)
    values = [scope[name] for name in names.of_globals if name in scope]
    values += [_content(cell) for cell in function.__closure__ or ()]
    values += [function.__defaults__, function.__kwdefaults__]
    yield from _held(values, names.of_attributes, seen)
