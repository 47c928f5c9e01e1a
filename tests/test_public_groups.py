"""Every public parameter for ranks accepts None, a ProcessGroup or a dimension of a DeviceMesh."""

import importlib
import inspect
import re
import types
import typing

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import varcomm
from varcomm.graph import PartitionedGraph
from varcomm.transport.group import Group, GroupLike

ROOMS = ("varcomm", *(f"varcomm.{room}" for room in sorted(varcomm._ROOMS)))
NAMES = {"group", "mesh", "process_group", "device_mesh", "ranks"}
# what annotations are made of that their module, or the code of a dataclass, does not have
NOT_THERE = (DeviceMesh, Group, PartitionedGraph)
TYPES = {"dist": dist, "GroupLike": GroupLike} | {kind.__name__: kind for kind in NOT_THERE}
# as every docstring with a section on parameters has it, be it in one entry with others
ENTRY = re.compile(r"^(\w+, )*ProcessGroup or DeviceMesh, optional$")
SHARED_ENTRY = re.compile(r"^[\w*, ]*\bgroup\b[\w, ]*$", re.MULTILINE)


def public():
    """Every callable that a room exports, and every public method of its classes.

    By name, with what documents its parameters: of a constructor its class.
    """
    found = {}
    for room in map(importlib.import_module, ROOMS):
        for name in room.__all__:
            value, full = getattr(room, name), f"{room.__name__}.{name}"
            if not inspect.isclass(value):
                if callable(value):
                    found[full] = value, value
                continue
            for key, method in inspect.getmembers(value, callable):
                ours = (getattr(method, "__module__", None) or "").startswith("varcomm")
                if ours and key == "__init__":
                    found[full] = method, value
                elif ours and not key.startswith("_"):
                    found[f"{full}.{key}"] = method, method
    return found


def kinds(annotation):
    """The types that an annotation names, at any depth."""
    parts = typing.get_args(annotation)
    return {annotation}.union(*map(kinds, parts)) if parts else {annotation}


def evaluated(fn, parameter):
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = eval(annotation, getattr(fn, "__globals__", {}) | TYPES)  # our own code
    return annotation


def ranks_taken(fn):
    """The parameters that are ranks, by their name or type, and the types of each."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # of a builtin
        return {}
    found = {}
    for parameter in parameters:
        text = str(parameter.annotation)
        if parameter.name in NAMES or "Group" in text or "DeviceMesh" in text:
            named = kinds(evaluated(fn, parameter))
            if int in named:  # how many ranks, or which: what a simulation takes
                continue
            found[parameter.name] = named, parameter.default
    return found


def fault_of(fn):
    """Tell which parameter does not take what it should: "" where all do."""
    for name, (taken, default) in ranks_taken(fn).items():
        if Group in taken:
            continue  # of a record that one of its class methods makes: ranks that are resolved
        if missing := {dist.ProcessGroup, DeviceMesh, types.NoneType} - taken:
            return f"{name} does not take {sorted(kind.__name__ for kind in missing)}"
        if name == "group" and default is not None:
            return f"{name} is not optional"
    return ""


def takers():
    return {name: pair for name, pair in public().items() if ranks_taken(pair[0])}


def test_every_layer_is_searched():
    assert {
        "varcomm.ExchangePlan.from_needed",
        "varcomm.all_gather_v",
        "varcomm.checkpoint.load",
        "varcomm.data_parallel.ShardedGradients",
        "varcomm.graph.partition",
        "varcomm.sharding.to_dtensor",
        "varcomm.tensor_parallel.ColumnParallelLinear.from_linear",
        "varcomm.testing.gradcheck",
    } <= takers().keys()


def test_whatever_takes_ranks_takes_a_dimension_of_a_mesh():
    faults = {name: fault_of(fn) for name, (fn, _) in takers().items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def is_documented(text):
    """Whether a section on parameters, where there is one, says what may be given."""
    if "Parameters\n----" not in text:
        return True  # "as in" another one
    entries = re.findall(r"^group : (.*)$", text, re.MULTILINE)
    return any(map(ENTRY.match, entries)) or (not entries and bool(SHARED_ENTRY.search(text)))


def test_it_is_documented_in_the_same_words():
    texts = {
        name: inspect.getdoc(documented) or ""
        for name, (fn, documented) in takers().items()
        if "group" in ranks_taken(fn) and Group not in ranks_taken(fn)["group"][0]
    }
    assert len(texts) > 50
    assert [name for name, text in texts.items() if not is_documented(text)] == []
    assert not is_documented("Parameters\n----------\ngroup : ProcessGroup, optional")
    assert not is_documented("Parameters\n----------\nx : torch.Tensor")
