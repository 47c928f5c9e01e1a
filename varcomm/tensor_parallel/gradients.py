"""Norm and clipping of the gradients of a model whose parameters are partly sharded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.carried import refuse_if
from varcomm.ops.checks import checked_tensor, checking, holds_values, refuse_exhausted
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import apply
from varcomm.ops.reduction import accumulation_dtype
from varcomm.ops.replicated import ComparedGather
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.layout import checked_number
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group, GroupLike, resolve

Parameters = torch.nn.Module | Tensor | Iterable[Tensor]


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    group: GroupLike = None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of all gradients of the unsharded model, as one vector.

    Parameters
    ----------
    parameters : Module, torch.Tensor or iterable of torch.Tensor
        Parameters of any shapes, in the same order on every rank. Those with a :func:`shard_spec`
        count on each rank; others count once, and their gradients are assumed to be identical on
        all ranks. The gradient is ``main_grad`` if it exists, otherwise ``grad``; None is zeros.
    norm_type : float
        The order ``p > 0``; ``inf`` is the largest absolute value.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that hold shards of the model; None means the whole world.
    error_if_nonfinite : bool
        Raise torch's RuntimeError, on every rank, if the norm is NaN or infinite.

    Returns
    -------
    torch.Tensor
        A float64 scalar, bit for bit the same on all ranks.

    Raises
    ------
    ArgumentError
        If `norm_type` is not positive, a gradient is sparse, or a parameter is sharded over another
        group: compute a norm per group, and use :func:`torch.nn.utils.clip_grads_with_norm_`.
    DisagreementError
        On every rank, if the gradients of unsharded parameters differ between ranks by more than
        rounding: a module needs :func:`sequence_parallel`, or reads the input of a column-parallel
        layer without :func:`copy_to_tensor_model_parallel_region`. On a GPU a later call raises.

    See Also
    --------
    clip_grad_norm_, param_is_not_tensor_parallel_duplicate

    Notes
    -----
    Communication: 32 bytes from each rank to every other rank; inside :func:`varcomm.debug` 16 more
    per unsharded parameter.

    In one process: ``torch.nn.utils.get_total_norm`` of all gradients; fp16 and bf16 gradients are
    summed in fp32.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import grad_norm
    >>> from varcomm.sharding import ShardSpec, mark
    >>> def fn(rank):
    ...     bias, weight = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(rank))
    ...     mark(weight, ShardSpec.of([0, 1]))
    ...     bias.grad, weight.grad = torch.full((1,), 3.0), torch.full((rank,), 4.0)
    ...     return grad_norm([bias, weight]).item()
    >>> varcomm.launch(fn, 2)
    [5.0, 5.0]
    """
    ranks, listed = resolve(group), _listed(parameters)
    with checking("grad_norm", ranks, error_if_nonfinite=error_if_nonfinite) as where:
        checked_number(norm_type, "norm_type", where, "a positive number", lambda p: p > 0)
        sharded = [_is_sharded(i, x, ranks, where) for i, x in enumerate(listed)]
    if debugging():
        described = {"operation": "grad_norm", "norm_type": norm_type}
        compare(ranks, described | {"sharded parameters": sharded})
        _check_replicas(parameters, listed, sharded, ranks)
    device = listed[0].device if listed else ranks.device()
    own = torch.zeros(2, dtype=torch.float64, device=device)
    for place, everywhere in enumerate((True, False)):
        norms = [
            torch.linalg.vector_norm(
                gradient, norm_type, dtype=accumulation_dtype(gradient.dtype, use_fp32=True)
            ).to(device, torch.float64)
            for gradient, is_sharded in zip(map(_gradient, listed), sharded, strict=True)
            if gradient is not None and gradient.numel() and is_sharded == everywhere
        ]
        if norms:
            own[place] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    parts = apply(ComparedGather(ranks, (2,) * ranks.size, 0, use_fp32=True), own).view(-1, 2)
    of_whole = parts[:, 1]
    if ranks.size > 1 and not in_graph(own):
        dtypes = [x.dtype for x, is_sharded in zip(listed, sharded, strict=True) if not is_sharded]
        bound = max((torch.finfo(dtype).eps ** 0.5 for dtype in dtypes), default=1.0)
        low, high = of_whole.aminmax()
        refuse_if(
            ranks, high - low > bound * high, partial(_refuse, parameters, listed, sharded, ranks)
        )
    parts = torch.cat([parts[:, 0], of_whole[:1]])  # those of all ranks, and once the others
    total: Tensor = torch.nn.utils.get_total_norm([parts], norm_type, error_if_nonfinite)
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    group: GroupLike = None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them is at most `max_norm`.

    Parameters
    ----------
    parameters, norm_type, group, error_if_nonfinite
        As in :func:`grad_norm`. If the norm is not finite and `error_if_nonfinite` is False,
        gradients become NaN or zeros, as in torch.
    max_norm : float
        Upper bound of the norm afterwards, not negative; identical on all ranks.

    Returns
    -------
    torch.Tensor
        The norm before scaling, as from :func:`grad_norm`, with the same errors.

    Raises
    ------
    ArgumentError
        If a parameter is sharded over another group, or an argument is wrong.

    See Also
    --------
    grad_norm, varcomm.data_parallel.ShardedGradients

    Notes
    -----
    Communication: as in :func:`grad_norm`.

    In one process: :func:`torch.nn.utils.clip_grad_norm_`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import clip_grad_norm_
    >>> from varcomm.sharding import ShardSpec, mark
    >>> def fn(rank):
    ...     weight = mark(torch.nn.Parameter(torch.zeros(1)), ShardSpec.of([1, 1]))
    ...     weight.grad = torch.tensor([3.0 + rank])
    ...     return clip_grad_norm_([weight], 1.0).item(), round(weight.grad.item(), 4)
    >>> varcomm.launch(fn, 2)
    [(5.0, 0.6), (5.0, 0.8)]
    """
    listed, ranks = _listed(parameters), resolve(group)
    with checking("clip_grad_norm_", ranks) as where:
        checked_number(max_norm, "max_norm", where, "a non-negative number", lambda n: n >= 0)
    if debugging():
        compare(ranks, {"operation": "clip_grad_norm_", "max_norm": float(max_norm)})
    named = parameters if isinstance(parameters, torch.nn.Module) else listed
    total = grad_norm(named, norm_type, group, error_if_nonfinite=error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch has it
    for gradient in map(_gradient, listed):
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
    return total


def _refuse(
    parameters: Parameters, listed: list[Tensor], sharded: list[bool], group: Group
) -> None:
    """Raise on all ranks for unsharded parameters whose gradients differ."""
    _check_replicas(parameters, listed, sharded, group)
    raise DisagreementError(
        f"grad_norm on {group}: the gradients of unsharded parameters differed between ranks. Run "
        "the program inside varcomm.debug() to see which."
    )


def _check_replicas(
    parameters: Parameters, listed: list[Tensor], sharded: list[bool], group: Group
) -> None:
    """Raise on all ranks if gradients of unsharded parameters differ by more than rounding."""
    whole = [i for i, everywhere in enumerate(sharded) if not everywhere]
    device = listed[0].device if listed else group.device()
    own = torch.zeros(len(whole), 2, dtype=torch.float64, device=device)
    for place, i in enumerate(whole):
        gradient = _gradient(listed[i])
        if gradient is not None and gradient.numel():
            wide = gradient.detach().abs() if gradient.is_complex() else gradient.detach()
            own[place, 0] = torch.linalg.vector_norm(wide, dtype=torch.float64)
            own[place, 1] = wide.sum(dtype=torch.float64) / wide.numel() ** 0.5
    each = [len(whole)] * group.size
    by_rank = all_gather_v(own, each, group=group.process_group).view(group.size, -1, 2)
    differences = (by_rank - by_rank[0]).abs().amax((0, 2)).tolist() if whole else []
    largest = by_rank[..., 0].amax(0).tolist() if whole else []
    for i, difference, norm in zip(whole, differences, largest, strict=True):
        if difference > torch.finfo(listed[i].dtype).eps ** 0.5 * norm:
            name = f"parameter {i}"
            if isinstance(parameters, torch.nn.Module):
                name = repr(list(dict(parameters.named_parameters()))[i])
            raise DisagreementError(
                f"grad_norm on {group}: the gradients of {name}, of shape "
                f"{tuple(listed[i].shape)}, differ between ranks, although it is not sharded; "
                f"their norms are {by_rank[:, whole.index(i), 0].tolist()}. If its module runs on "
                "parts of heads or of a sequence, set its style to 'sequence' in the plan of "
                "parallelize, or call sequence_parallel(module). If it is beside a sharded layer, "
                "as in LoRA, call copy_to_tensor_model_parallel_region on its input or output. "
                "torch.nn.utils.clip_grad_norm_ before this call has the same effect: omit it."
            )


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return ``main_grad`` of a parameter that has it, otherwise ``grad``."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def _is_sharded(index: int, parameter: Tensor, group: Group, where: str) -> bool:
    checked_tensor(parameter, where, f"parameter {index}")
    gradient = _gradient(parameter)
    if gradient is not None:
        if not holds_values(gradient):
            raise ArgumentError(
                f"{where}the gradient of parameter {index} is a {type(gradient).__name__}, which "
                "ranks have in pieces. Call clip_grad_norm_ of its ShardedGradients, or to_local()."
            )
        checked_tensor(gradient, where, f"the gradient of parameter {index}")
    spec = shard_spec(parameter)
    if spec is not None and spec.group != group:
        raise ArgumentError(
            f"{where}parameter {index}, of shape {tuple(parameter.shape)}, is sharded over another "
            f"group ({spec.group}). Pass that group, with its parameters."
        )
    return spec is not None


def _listed(parameters: Parameters) -> list[Tensor]:
    """Return each parameter once; tied parameters share one gradient."""
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    refuse_exhausted(parameters, "")
    return list(dict.fromkeys(parameters))
