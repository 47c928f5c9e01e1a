"""Give the methods of a module other functions than those that their code names.

A layer that calls ``gcn_norm`` means that of the whole graph. For one layer on ranks, and for
nobody else, that name has to mean another function. So its class is exchanged for one made for this
layer, in which methods that reach such a function run the same code with other globals; as
``torch.nn.utils.parametrize`` exchanges classes. Nothing changes in modules of Python.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, new_class
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.named import (
    Names,
    content,
    functions_in,
    held,
    is_opaque,
    lookups,
    members,
    named,
    scope_of,
)

__all__ = ["Rebinding", "release"]

# Where a module keeps the attributes that it had, and those that it has got for them.
_BEFORE = "_before_rebinding"

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) | {_BEFORE}


class Rebinding:
    """From some functions to those that stand for them, in methods of modules.

    A method reaches a function by a global name, its own or that of a function which it calls so;
    by a module, ``nn.global_add_pool``; by a default argument or an enclosed variable; or by an
    attribute of the instance that holds the function. Other globals keep the values that they have
    when the module is rebound.

    Parameters
    ----------
    ours : mapping
        From functions of Python to what stands for them. A method may be one, as its class holds
        it; a function must stand for it.
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
        """Return whether all names that have been looked at still mean what they meant then."""
        return all(
            len(now := look()) == len(then) and all(now.get(k, self) is v for k, v in then.items())
            for look, then in self._seen
        )

    def _look(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._seen.append((look, dict(look())))

    def check(self, module: torch.nn.Module, what: str) -> None:
        """Raise ArgumentError if code of a module's class reaches a function as none can rebind.

        `what` names the module.
        """
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
        for function in functions_in([[*vars(owner).values()] for owner in affected]):
            for one in lookups(function.__code__):
                name = one.name
                if (one.opname == "IMPORT_FROM" and name in ours) or (
                    one.opname == "IMPORT_NAME" and self._leads_to_ours(name, function)
                ):
                    raise ArgumentError(
                        f"{where}{function.__qualname__} imports {name} when it runs, and would "
                        "get that of one process. Import it at the top of the file."
                    )
                if one.opname not in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_DEREF"):
                    continue
                owner = function.__globals__.get(name, by_name.get(name))
                if isinstance(owner, type) and one.then in affected.get(owner, ()):
                    raise ArgumentError(
                        f"{where}{function.__qualname__} calls {name}.{one.then} by its "
                        "class, and would get that of one process. Call super()."
                    )
        self._passed.add(kind)

    def _leads_to_ours(self, imported: str, function: FunctionType) -> bool:
        """Return whether a function that imports a module names one of ours by its attributes."""
        modules = [sys.modules.get(imported), sys.modules.get(imported.partition(".")[0])]
        attributes = Names.of(function.__code__).of_attributes
        return any(one in self._ours for one in held(modules, attributes, set()))

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
        """Return a class like `kind` in which methods are rebound; itself, if none needs to be."""
        for owner in _classes(kind):
            self._look(functools.partial(vars, owner))
        parts = {
            owner: {name: self._value(vars(owner)[name]) for name in self._affected(owner)}
            for owner in _classes(kind)
        }
        own = parts.pop(kind, {})
        # each stands before the class that it is of, in the order in which super() asks them
        bases = [_derived(owner, (owner,), part) for owner, part in parts.items() if part]
        if not own and not bases:
            return kind
        return _derived(kind, (kind, *bases), own | {"_rebound_from": kind})

    def _affected(self, owner: type) -> list[str]:
        return [name for name, member in vars(owner).items() if self._affects(member)]

    def _affects(self, value: Any) -> bool:
        return any(map(self._reaches, functions_in(value)))

    def _reaches(self, function: FunctionType) -> bool:
        """Return whether it is one of ours, or its code, or that of what it names, names one."""
        if function not in self._reaching:
            seen, todo, found = {function}, [function], False
            containers: set[int] = set()
            while todo and not found:
                one = todo.pop()
                found = one in self._ours or self._reaching.get(one, False)
                if not found:
                    more = set(named(one, containers)) - seen
                    seen |= more
                    todo += more
            # what is named by one that reaches nothing reaches nothing either
            self._reaching |= {function: True} if found else dict.fromkeys(seen, False)
        return self._reaching[function]

    def _value(self, value: Any) -> Any:
        """Return what stands for a value that is, or holds, a function."""
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
        """Return a function of the same code, with other globals where ours stand for them."""
        if function in self._rebuilt:
            return self._rebuilt[function]
        scope, names = self._scope(function), Names.of(function.__code__)
        cells = None
        if function.__closure__ is not None:
            cells = tuple(self._cell(cell, names.of_attributes) for cell in function.__closure__)
        new = FunctionType(
            function.__code__, scope, function.__name__, self._value(function.__defaults__), cells
        )
        self._rebuilt[function] = new  # before its globals: they may name it
        new.__kwdefaults__ = self._value(function.__kwdefaults__)
        functools.update_wrapper(new, function)
        for name in names.of_globals & scope_of(function).keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                scope[name] = self._module(value, scope[name], names.of_attributes)
            else:
                scope[name] = self._value(value)
        return new

    def _scope(self, function: FunctionType) -> dict[str, Any]:
        """Return the globals of all rebuilt functions of the same module of Python."""
        own = function.__globals__
        if scope_of(function) is not own:
            return own
        if id(own) not in self._scopes:
            self._look(lambda: own)
            # by its name torch.compile would find the module, and there what ours stand for
            self._scopes[id(own)] = {key: own[key] for key in own if key != "__name__"}
        scope = self._scopes[id(own)]
        if "__name__" in Names.of(function.__code__).of_globals:
            scope["__name__"] = own["__name__"]
        return scope

    def _cell(self, cell: CellType, wanted: frozenset[str]) -> CellType:
        value = content(cell)
        self._look(lambda: {"": content(cell)})
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
        """Return a copy of a module of Python in which ours stand under these names.

        `made` is the copy that there is already, or the module itself; `within`, through which
        modules it was reached.
        """
        new, within = {}, (*within, module)
        self._look(lambda: dict(members(module, wanted)))
        for name, value in members(module, wanted):
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
    """Undo what a :class:`Rebinding` has done to a module."""
    for name, (old, new) in vars(module).pop(_BEFORE, {}).items():
        if vars(module).get(name) is new:
            vars(module)[name] = old
    module.__class__ = _original(module)


def _original(module: torch.nn.Module) -> type:
    kind = type(module)
    return vars(kind).get("_rebound_from", kind)  # type: ignore[no-any-return]


def _derived(kind: type, bases: tuple[type, ...], own: dict[str, Any]) -> type:
    """Return a class that goes by the name of another."""
    like = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return new_class(kind.__name__, bases, {}, lambda body: body.update(like | own))


def _classes(kind: type) -> Iterator[type]:
    """Yield the classes of a module whose code is looked at."""
    for owner in kind.__mro__:
        if owner is not object and not is_opaque(owner.__module__):
            yield owner
