"""Every public parameter for ranks accepts None, a ProcessGroup or a dimension of a DeviceMesh."""

import importlib
import inspect
import types
import typing

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import varcomm
from varcomm.graph import PartitionedGraph
from varcomm.transport.group import Group, GroupLike

ROOMS = ("varcomm", *(f"varcomm.{room}" for room in sorted(varcomm._ROOMS)))
NAMES = {"group", "mesh", "process_group", "device_mesh", "ranks"}
# types in annotations that their module, or the code of a dataclass, does not have
NOT_THERE = (DeviceMesh, Group, PartitionedGraph)
TYPES = {"dist": dist, "GroupLike": GroupLike} | {kind.__name__: kind for kind in NOT_THERE}


def public():
    """Yield name and callable of all functions, classes and public methods."""
    for room in map(importlib.import_module, ROOMS):
        for name in room.__all__:
            value, full = getattr(room, name), f"{room.__name__}.{name}"
            if not inspect.isclass(value):
                yield full, value
                continue
            for key, method in inspect.getmembers(value, callable):
                if not (getattr(method, "__module__", None) or "").startswith("varcomm"):
                    continue
                if key == "__init__":
                    yield full, method
                elif not key.startswith("_"):
                    yield f"{full}.{key}", method


def kinds(annotation):
    """Return the types that an annotation names, at any depth."""
    parts = typing.get_args(annotation)
    return {annotation}.union(*map(kinds, parts)) if parts else {annotation}


def ranks_taken(fn):
    """Return the types and default of each parameter that is ranks, by its name or type."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return {}
    found = {}
    for parameter in parameters:
        annotation = parameter.annotation
        text = str(annotation)
        if parameter.name in NAMES or "Group" in text or "DeviceMesh" in text:
            if isinstance(annotation, str):
                annotation = eval(
                    annotation, getattr(fn, "__globals__", {}) | TYPES
                )  # our own code
            named = kinds(annotation)
            # a number of ranks; or a record that a class method makes from resolved ranks
            if not named & {int, Group}:
                found[parameter.name] = named, parameter.default
    return found


def test_groups_are_accepted():
    takers = {name: ranks_taken(fn) for name, fn in public() if ranks_taken(fn)}
    for name, parameters in takers.items():
        for parameter, (taken, default) in parameters.items():
            assert {dist.ProcessGroup, DeviceMesh, types.NoneType} <= taken, (name, parameter)
            assert parameter != "group" or default is None, name
    rooms = {name.rpartition(".")[0] for name in takers}
    assert {f"varcomm.{room}" for room in ("graph", "checkpoint", "testing", "sharding")} <= rooms
