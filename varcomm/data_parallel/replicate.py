"""``replicate``: the same module on every rank, with gradients that are summed in each backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.buckets import cut, gradient_dtype
from varcomm.data_parallel.replica import CopyOfReplica, Replica, replica_of
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.layout import exact_int
from varcomm.ops.broadcast import broadcast
from varcomm.ops.checks import checked_tensor
from varcomm.transport.agree import share
from varcomm.transport.engines import engine_for
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.lane import free_lanes, take_lane

__all__ = ["replicate"]

Model = TypeVar("Model", bound=torch.nn.Module)

_WHAT = "data_parallel.replicate"


def replicate(model: Model, group: GroupLike = None, *, bucket_bytes: int = 25 * 2**20) -> Model:
    """Make a module equal on all ranks, and sum its gradients over ranks in every backward.

    Collective: every rank calls it with a module of the same parameters and buffers, and all raise
    if one has to. Parameters and buffers get the values of rank 0.

    From then on each rank computes its part of the loss and calls ``backward()``, which adds to
    each parameter's ``grad`` what it would in one process with the whole loss: the sum over ranks
    of what this backward brings. Micro-batches may be accumulated, parameters may be unused on some
    ranks; one that is unused on all gets no gradient, as in one process. Nothing else in the module
    changes, nor does its ``state_dict``. Calling it again, for the same group, starts anew.

    Parameters
    ----------
    model : torch.nn.Module
        Any, with parameters of any floating-point or complex dtypes. Frozen ones are left alone;
        which ones are frozen may change later, on all ranks alike.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    bucket_bytes : int
        Gradients travel in messages of about so many bytes.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        On every rank, if `model` is no module, is wrapped by ``DistributedDataParallel``, has
        parameters or buffers that are lazy, sparse or sharded, or shares parameters with another
        module that is replicated; or if `bucket_bytes` is not positive.
    DisagreementError
        On every rank, if names, shapes, dtypes or ``requires_grad`` of parameters or buffers
        differ, or `bucket_bytes` do. Inside :func:`varcomm.debug` also in backward, if ranks have
        frozen other parameters, or one of them is not in this backward.
    GroupError
        If this rank is not in `group`; on every rank, if a parameter is where the group has no
        engine.

    Notes
    -----
    Every rank calls ``backward()`` equally often, from a loss that depends on the module's output
    or on derivatives of it, such as forces. That is enough: the output is tied to the sums, so an
    empty shard takes part though it depends on no parameter. It therefore requires a gradient, even
    if the module only hands on an input. ``torch.autograd.grad`` sums nothing. For
    ``backward(create_graph=True)`` and hooks by ``register_post_accumulate_grad_hook`` there is an
    error.

    Communication: reduce-scatter and all-gather of each bucket, ``2 (P - 1) / P`` times the bytes
    of the parameters that are trained and one value more for each; up to 16 KiB, a single round
    with ``P - 1`` times the bytes. Floats narrower than 4 bytes travel narrow and are summed in
    fp32. The sums are in rank order, the same on all ranks bit for bit.

    Buckets are filled from the last parameters to the first, and the sum of each is begun as soon
    as its gradients are there, while backward goes on, on a group of its own; so it may overlap
    with exchanges of the model. A group that is only a part of the world has no such second one:
    its sums are begun when backward is done. So they are in :func:`varcomm.debug`.

    Each backward sums. To sum once after many micro-batches, take :func:`sum_gradients` alone.

    If backward ends in an error, ``grad`` is as it was before. Further ones on that rank refuse to
    run, since other ranks may be elsewhere; call ``replicate`` again on all of them.

    Hooks of the parameters (``register_hook``) see what this rank brings, before the sum. Gradients
    that are sparse on a rank become dense. Buffers are made equal once: running statistics of batch
    norm are each rank's own, unless :func:`varcomm.graph.distribute` has made them global.

    A copy of the module (``copy.deepcopy``, ``torch.save`` of the whole module) is not replicated,
    and its forward raises where it would be trained on several ranks. Keep `model` itself while
    parts of it are used: the sums end with it.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     torch.manual_seed(rank)
    ...     model = varcomm.data_parallel.replicate(torch.nn.Linear(1, 1, bias=False))
    ...     for micro_batch in (torch.ones(1, 1), torch.ones(2, 1)):
    ...         model(micro_batch).sum().backward()
    ...     return model.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [6.0, 6.0]
    """
    ranks = resolve(group)
    given = share(_WHAT, lambda: _described(model, ranks, bucket_bytes), ranks)
    for word in ("bucket_bytes", "parameters and buffers"):
        _compare(word, [described[word] for described in given])
    _make_equal(model, ranks, bucket_bytes)
    lane = take_lane(ranks, [described["free lanes"] for described in given])
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, CopyOfReplica):
                del module._forward_hooks[key]
            elif isinstance(hook, Replica):  # of an earlier call
                hook.close()
    Replica(model, ranks, lane, bucket_bytes)  # which the model keeps
    return model


def _described(model: object, group: Group, bucket_bytes: object) -> dict[str, Any]:
    """Return what must be the same on all ranks, if it will do."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    size = exact_int(bucket_bytes)
    if size is None or size < 1:
        raise ArgumentError(f"bucket_bytes must be a positive integer; got {bucket_bytes!r}.")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ArgumentError(
            "DistributedDataParallel communicates gradients itself. Take either it, with "
            "data_parallel.sum_hook, or replicate of the module within."
        )
    values: dict[str, str] = {}
    devices: list[torch.device] = []
    for kind, name, value in _values(model):
        what = f"{kind} {name!r}"
        _check_value(value, what, group)
        _check_free(value, what, model, group)
        if value.device not in devices:
            devices.append(value.device)
        learns = "trained" if value.requires_grad else "frozen"
        values[name] = (
            f"{kind} {len(values)}, {learns}, {value.dtype} with gradients of "
            f"{gradient_dtype(value)}, shape {tuple(value.shape)}, on {value.device.type} "
            f"{devices.index(value.device)}"
        )
    return {
        "bucket_bytes": {"bucket_bytes": size},
        "parameters and buffers": values,
        "free lanes": free_lanes(group),
    }


def _check_value(value: torch.Tensor, what: str, group: Group) -> None:
    """Raise unless a parameter or buffer can be sent, and written to."""
    if torch.nn.parameter.is_lazy(value):
        raise ArgumentError(f"{what} is not initialised yet. Call the model once before.")
    checked_tensor(value, "", what)
    engine_for(group, value.device)
    expanded = any(
        stride == 0 and n > 1 for n, stride in zip(value.shape, value.stride(), strict=True)
    )
    if expanded or value.is_inference():
        how = "an expanded view" if expanded else "made in inference mode"
        raise ArgumentError(f"{what} is {how}, and cannot be written to. Register its clone().")


def _check_free(value: torch.Tensor, what: str, model: torch.nn.Module, group: Group) -> None:
    """Raise if somebody else sums the gradient of a parameter."""
    replica = replica_of(value) if isinstance(value, torch.nn.Parameter) else None
    if replica is None:
        return
    if replica.module() is not model:
        raise ArgumentError(
            f"{what} is in another module that is replicated already, and would be summed twice. "
            "Replicate the module that has all parameters, alone."
        )
    if replica.group() != group:
        raise ArgumentError(f"{what} is replicated over another group already. Take a deepcopy.")


def _compare(word: str, given: Sequence[Mapping[str, object]]) -> None:
    """Raise on every rank, if ranks differ; without communication."""
    for rank, own in enumerate(given):
        for name in dict.fromkeys([*given[0], *own]):
            here, there = given[0].get(name, "none"), own.get(name, "none")
            if here != there:
                raise DisagreementError(
                    f"{_WHAT}: ranks disagree on {word}: for {name!r}, rank 0 has {here}; rank "
                    f"{rank} has {there}."
                )


def _make_equal(model: torch.nn.Module, group: Group, bucket_bytes: int) -> None:
    """Overwrite parameters and buffers by those of rank 0."""
    values = [value.detach() for _, _, value in _values(model)]
    for members in cut(values, range(len(values)), bucket_bytes):
        mine = [values[index] for index in members]
        flat = torch.cat([value.reshape(-1) for value in mine]) if group.rank == 0 else None
        flat = broadcast(flat, group=group.process_group)
        for value, part in zip(mine, flat.split([v.numel() for v in mine]), strict=True):
            if group.rank != 0:
                value.copy_(part.view(value.shape))


def _values(model: torch.nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """Return kind, name and value of all parameters, then of all buffers."""
    return [
        *(("parameter", name, value) for name, value in model.named_parameters()),
        *(("buffer", name, value) for name, value in model.named_buffers()),
    ]
