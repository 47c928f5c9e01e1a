"""Integers of nodes that may be ids of groups, by which a reduction would miss other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.index.partitioned_index import (
    NAMES,
    Marked,
    PartitionedIndex,
    functions_named,
    name_of,
)

_SET_ROWS = {"__setitem__", "index_put", "index_put_"}
_REDUCE = _SET_ROWS | {
    "bincount", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_", "index_add", "index_add_", "index_reduce", "index_reduce_", "index_copy",
    "index_copy_", "index_fill", "index_fill_",
}  # fmt: skip

# Results that may still be ids of groups: views, copies, parts, and other integers of each node.
_CARRY = {
    "clone", "contiguous", "detach", "to", "cpu", "cuda", "long", "int", "type", "type_as",
    "pin_memory", "view", "view_as", "neg", "__neg__", "abs", "__rshift__", "__lshift__",
    "reshape", "expand", "expand_as", "repeat", "unique", "unsqueeze", "squeeze", "flatten",
    "__getitem__", "index_select", "masked_select", "add", "__add__", "__radd__", "sub", "__sub__",
    "__rsub__", "mul", "__mul__", "__rmul__", "div", "floor_divide", "__floordiv__", "remainder",
    "__mod__", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "stack", "sort",
    "searchsorted", "bucketize", "add_", "__iadd__", "sub_", "__isub__", "mul_", "__imul__",
    "floor_divide_", "__ifloordiv__", "remainder_", "__imod__", "clamp_", "masked_fill_",
}  # fmt: skip
_CATS = {"cat", "concat", "concatenate"}
_CARRY |= _CATS
for _name in _REDUCE | _CARRY:
    for _function in functions_named(_name):
        if not hasattr(_function, "__wrapped__"):  # which dynamo does not find in a dict
            NAMES[_function] = _name


class NodeIntegers(Marked):
    """An attribute of integers, (n, *F), of nodes on several ranks: labels, kinds, cells.

    All operations are those on an ordinary tensor, except reductions of rows by these integers,
    which raise ArgumentError: ids of groups are named in :func:`varcomm.graph.partition`.
    """

    attribute: str
    axis: int  # along which nodes lie, in a view

    @staticmethod
    def make(values: torch.Tensor, attribute: str, axis: int = 0) -> NodeIntegers:
        """Let integers of nodes carry the name of their attribute."""
        out = values.as_subclass(NodeIntegers)
        out.plain, out.attribute, out.axis = values, attribute, axis
        return out

    def on(self, device: torch.device | str) -> NodeIntegers:
        """Return the same integers, with their name, on another device."""
        return NodeIntegers.make(self.plain.to(device), self.attribute, self.axis)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as an ordinary tensor, unless rows are reduced by these integers."""
        kwargs, name = kwargs or {}, name_of(func)
        if name in _REDUCE:
            _check_reduction(name, args, kwargs)
        given = [_plain(one) for one in args]
        rest = {key: _plain(value) for key, value in kwargs.items()}
        if any(isinstance(one, PartitionedIndex) for one in _flat(given)):
            # compiled code does not dispatch again inside a rule
            out = PartitionedIndex.__torch_function__(func, types, given, rest)
        else:
            out = func(*given, **rest)
        given = [*args, *kwargs.values()]
        source = next((one for one in _flat(given) if isinstance(one, cls)), None)
        if name not in _CARRY or source is None:
            return out
        if name == "sort":  # the order selects rows
            return type(out)([_carried(name, source, given, out[0]), out[1]])
        if isinstance(out, tuple):  # of unique, with the place of each
            return tuple([_carried(name, source, given, one) for one in out])
        return _carried(name, source, given, out)


def is_integer(values: torch.Tensor) -> bool:
    """Return whether values are integers, and not bools."""
    dtype = values.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_plain(one) for one in value])
    return value.plain if isinstance(value, NodeIntegers) else value


def _flat(values: Sequence[Any]) -> list[Any]:
    return [part for one in values for part in (one if isinstance(one, list | tuple) else (one,))]


def _carried(name: str, source: NodeIntegers, args: Sequence[Any], out: Any) -> Any:
    """Return a result that carries the name of the attribute, if it may be ids of groups."""
    if type(out) is not torch.Tensor or not is_integer(out) or out.dim() == 0:
        return out
    is_part = source is args[0] or isinstance(args[0], list | tuple)
    if not is_part and out.shape != source.plain.shape:
        return out
    return NodeIntegers.make(out, source.attribute, _axis(name, source, args, out))


def _check_reduction(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentError if rows of nodes are reduced by integers of nodes."""
    values = dict(zip(("x", "dim", "index"), args, strict=False)) | kwargs
    if name == "bincount":
        index = values.get("x", values.get("input"))
    elif name in _SET_ROWS:
        index = values.get("dim", values.get("indices"))
        index = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
    else:
        index = values.get("index")
    if not isinstance(index, NodeIntegers):
        return
    dims = index.plain.dim()
    if dims > 1 and name not in _SET_ROWS and values["dim"] % dims != index.axis:
        return  # of each node's own row
    raise ArgumentError(
        f"{name.strip('_')} by {index.attribute!r} would be over this rank's rows only. If "
        f'these are ids of groups, name them: graph.partition(data, groups=["{index.attribute}"]). '
        f"For this rank's rows alone, such as counts that you sum by varcomm.all_reduce, use "
        f"graph.{index.attribute}.plain."
    )


def _axis(name: str, source: NodeIntegers, args: Sequence[Any], out: torch.Tensor) -> int:
    """Return the dimension of a result along which nodes lie."""
    axis = source.axis
    if name in _CATS:
        return axis
    if name in ("unsqueeze", "stack"):
        place = args[1] if len(args) > 1 else 0
        return axis + int(place % out.dim() <= axis)
    if name in ("expand", "expand_as"):
        return axis + out.dim() - source.plain.dim()
    if name == "__getitem__":
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        new = next((place for place, key in enumerate(keys) if key is not None), len(keys))
        return min(axis + new, out.dim() - 1)
    if out.shape == source.shape or out.dim() == 1:
        return min(axis, out.dim() - 1)
    places = [place for place, size in enumerate(out.shape) if size == source.shape[axis]]
    shape = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(places) > 1 and -1 in shape:  # a rank with one node
        return [*shape].index(-1)
    return places[0] if places else min(axis, out.dim() - 1)
