"""What ranks agree on before gradients are summed, and how their values become equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import gradient_dtype
from varcomm.data_parallel.copied import CopyOfReplica
from varcomm.data_parallel.ending import tokens
from varcomm.data_parallel.global_count import GlobalCount, Reduce, described
from varcomm.data_parallel.replica import Options, Replica
from varcomm.data_parallel.taken import check_not_taken
from varcomm.data_parallel.values import (
    check_mode,
    check_module,
    check_value,
    check_writable,
    compare,
    make_equal,
)
from varcomm.data_parallel.watching import replicas_of
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import differing, digest
from varcomm.ops.reduction import checked_summable
from varcomm.sizes import exact_int
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.auxiliary_group import free_lanes, take_lane

__all__ = ["BUCKET_BYTES", "set_up"]

BUCKET_BYTES = 25 * 2**20

# What ranks must have alike, of what they tell.
_COMPARED = ("bucket_bytes", "reduce", "use_fp32", "recurse", "initial", "parameters and buffers")


def set_up(
    what: str,
    model: torch.nn.Module,
    group: GroupLike,
    *,
    reduce: Reduce = "sum",
    initial: str = "broadcast",
    bucket_bytes: int = BUCKET_BYTES,
    use_fp32: bool = True,
    recurse: bool = True,
    marked: bool = False,
) -> None:
    """Agree, make the values equal, and attach what sums the gradients; collective."""
    ranks = resolve(group)
    names = group.mesh_dim_names if isinstance(group, DeviceMesh) else None
    options = Options(
        reduce, use_fp32, bucket_bytes, recurse, marked, names[0] if names is not None else None
    )
    given = share(what, lambda: _described(model, ranks, options, initial), ranks)
    compare(what, [{word: told[word] for word in _COMPARED} for told in given])
    _check_groups(what, [told["other groups"] for told in given])
    if initial == "check":
        others, differ = differing([told["digests"] for told in given])
        if others:
            raise DisagreementError(
                f"{what}: {', '.join(map(repr, differ))} of rank 0 and of ranks {others} differ. "
                'Give all ranks the same values, or take those of rank 0: initial="broadcast".'
            )
    else:
        values = [value for _, _, value in _values(model, recurse)]
        make_equal(values, ranks, options.bucket_bytes)
    lane = take_lane(ranks, [told["lanes"] for told in given])
    for parameter in model.parameters(recurse=recurse):
        for replica in replicas_of(parameter):
            if not replica.exists:
                replica.close()
    number = None
    for module in model.modules() if recurse else [model]:
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, CopyOfReplica):
                del module._forward_hooks[key]
            elif isinstance(hook, Replica) and _is_of(hook, model, ranks, options):
                number = hook.number  # of an earlier call
                hook.close()
                if hook.count is not None:
                    hook.count.forget()
    # the model keeps it
    Replica(model, ranks, lane, options, token=given[0]["token"], number=number)


def _described(model: object, group: Group, options: Options, initial: object) -> dict[str, Any]:
    """Return what must be the same on all ranks, if it will do."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    check_mode()
    check_module(model)
    size = exact_int(options.bucket_bytes)
    if size is None or size < 1:
        raise ArgumentError(
            f"bucket_bytes must be a positive integer; got {options.bucket_bytes!r}."
        )
    reduce = described(options.reduce)
    checked_flag(options.use_fp32, "use_fp32_reduction" if options.marked else "use_fp32", "")
    checked_flag(options.recurse, "recurse", "")
    if initial not in ("broadcast", "check"):
        raise ArgumentError(f'initial must be "broadcast" or "check"; got {initial!r}.')
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ArgumentError(
            "DistributedDataParallel communicates gradients itself. Take either it, with "
            "data_parallel.sum_hook, or replicate of the module within."
        )
    values: dict[str, str] = {}
    others: dict[str, list[tuple[int, ...]]] = {}
    devices: list[torch.device] = []
    given = _values(model, options.recurse)
    for kind, name, value in given:
        what = f"{kind} {name!r}"
        check_value(value, what, group)
        check_writable(value, what)
        if value.device not in devices:
            devices.append(value.device)
        learns = "trained" if value.requires_grad else "frozen"
        values[name] = (
            f"{kind} {len(values)}, {learns}, {value.dtype} with gradients of "
            f"{gradient_dtype(value)}, shape {tuple(value.shape)}, on {value.device.type} "
            f"{devices.index(value.device)}"
        )
        if isinstance(value, torch.nn.Parameter):
            check_not_taken(value, what)
            _check_gradient(value, what, options.use_fp32)
            before, after = _others(value, what, model, group, options)
            others[name] = [replica.ranks for replica in (*before, *after)]
            for place, replicas in (("before", before), ("after", after)):
                if replicas:
                    sizes = " and ".join(str(len(replica.ranks)) for replica in replicas)
                    values[name] += f", summed over groups of {sizes} {place} this one"
    digests = {name: digest(value) for _, name, value in given} if initial == "check" else {}
    return {
        "bucket_bytes": {"bucket_bytes": size},
        "reduce": {"reduce": reduce},
        "use_fp32": {"use_fp32": options.use_fp32},
        "recurse": {"recurse": options.recurse},
        "initial": {"initial": initial},
        "parameters and buffers": values,
        "digests": digests,
        "other groups": others,
        "lanes": free_lanes(group),
        "token": next(tokens),
    }


def _check_gradient(value: torch.nn.Parameter, what: str, use_fp32: bool) -> None:
    """Raise unless gradients of a parameter have a sum."""
    if value.requires_grad:
        gradient = value.new_empty(0, dtype=gradient_dtype(value))
        checked_summable(gradient, f"the gradient of {what}: ", use_fp32)


def _others(
    value: torch.nn.Parameter, what: str, model: torch.nn.Module, group: Group, options: Options
) -> tuple[list[Replica], list[Replica]]:
    """Return who sums a parameter over other groups, before and after this one would.

    Raise if somebody does so over this group.
    """
    before: list[Replica] = []
    after: list[Replica] = []
    place = None
    for replica in replicas_of(value):
        if not replica.exists:
            continue
        if options.marked and replica.options.marked:
            raise ArgumentError(
                f"{what} has been marked as shared already. Call unmark_module_as_shared before."
            )
        if _is_of(replica, model, group, options):
            place = replica.number
            if replica.unsummed.any():
                raise ArgumentError(
                    f"{what} or another one has a gradient of a backward in no_sync that has not "
                    "been summed. Call backward() outside of no_sync, or zero_grad(), before."
                )
        elif _same_group(replica, group, options):
            raise ArgumentError(
                f"{what} is in another module that is replicated already, and would be summed "
                "twice. Replicate the module that has all parameters, alone."
            )
        else:
            (before if place is None else after).append(replica)
        if isinstance(options.reduce, GlobalCount):
            _check_count(replica, group, options.reduce)
    return before, after


def _is_of(replica: Replica, model: torch.nn.Module, group: Group, options: Options) -> bool:
    """Return whether a call with these arguments is to begin anew what a replica does."""
    same = not (options.marked or replica.options.marked) and options.recurse
    return same and replica.module() is model and _same_group(replica, group, options)


def _same_group(replica: Replica, group: Group, options: Options) -> bool:
    """Return whether a sum over the group would be one over a replica's group once more.

    All dimensions of a mesh of one rank may be the same group; their names tell them apart.
    """
    if group.size > 1:
        return replica.ranks == group.ranks
    return replica.group() == group and replica.options.dimension == options.dimension


def _check_count(replica: Replica, group: Group, count: GlobalCount) -> None:
    for other in replica.connected():
        shared = set(other.ranks) & set(group.ranks)
        if other.options.reduce is count and other.ranks != group.ranks and len(shared) > 1:
            raise ArgumentError(
                f"reduce is a GlobalCount that is summed over ranks {list(other.ranks)} already; "
                f"over {list(group.ranks)} rows would be counted twice. Take another GlobalCount."
            )


def _check_groups(what: str, given: Sequence[Mapping[str, Sequence[tuple[int, ...]]]]) -> None:
    """Raise on every rank, if somebody would be counted twice; without communication.

    Groups are to cross like the lines of a mesh: what two ranks of this group have summed over
    another one must come from other ranks.
    """
    for name, first in given[0].items():
        for place in range(len(first)):
            lines = [told[name][place] for told in given]
            for rank, line in enumerate(lines):
                if any(set(line) & set(earlier) for earlier in lines[:rank]):
                    raise ArgumentError(
                        f"{what}: parameter {name!r} is summed over ranks {list(line)} already, of "
                        "which more than one, or one that others sum with, is in this group: it "
                        "would be counted twice. Groups must cross as dimensions of a mesh do."
                    )


def _values(model: torch.nn.Module, recurse: bool) -> list[tuple[str, str, torch.Tensor]]:
    """Return kind, name and value of all parameters, then of all buffers."""
    return [
        *(("parameter", name, value) for name, value in model.named_parameters(recurse=recurse)),
        *(("buffer", name, value) for name, value in model.named_buffers(recurse=recurse)),
    ]
