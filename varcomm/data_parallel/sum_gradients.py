"""Sum the gradients of replicated parameters over ranks, in one message a dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from varcomm.data_parallel.taken import check_not_taken
from varcomm.data_parallel.watching import replicas_of
from varcomm.errors import ArgumentError
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.operator import checking
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import GroupLike, resolve

__all__ = ["sum_gradients"]


def sum_gradients(
    parameters: torch.nn.Module | Iterable[torch.nn.Parameter], group: GroupLike = None
) -> None:
    """Replace each parameter's ``grad`` by its sum over ranks; call once a step, after backward.

    Every rank has the same parameters and has computed a part of the loss; the gradient of the loss
    is the sum of the ranks' gradients. Micro-batches are accumulated first: a second call would sum
    what has been summed.

    Parameters
    ----------
    parameters : Module or iterable of Parameter
        The same on every rank, in the same order. Those with ``requires_grad=False`` are left
        alone; one without a ``grad`` on this rank counts as zeros, and gets the sum.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Raises
    ------
    ArgumentError
        If a gradient is sparse, `parameters` is a tensor, or :func:`replicate` or a
        ``ShardedGradients`` sums them already.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if the ranks have other parameters.

    Notes
    -----
    Communication: one :func:`varcomm.all_reduce` for each dtype and device among the parameters.
    Floats narrower than 4 bytes are summed in fp32 and rounded once. The sums are the same on all
    ranks, bit for bit, so replicated parameters stay equal.

    In one process: nothing: backward from the sum of the losses of all ranks.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     layer = torch.nn.Linear(1, 1, bias=False)
    ...     layer(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     varcomm.data_parallel.sum_gradients(layer)
    ...     return layer.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [3.0, 3.0]
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    ranks = resolve(group)
    with checking("sum_gradients", ranks) as where:
        if isinstance(parameters, torch.Tensor):  # an iterable of its rows, which have no gradient
            raise ArgumentError(
                f"{where}parameters must be a Module or an iterable of Parameter; got a tensor. "
                "Put it into a list."
            )
        given = list(parameters)
        for value in given:
            if not isinstance(value, torch.Tensor) or not value.is_leaf:
                computed = isinstance(value, torch.Tensor)
                raise ArgumentError(
                    f"{where}parameters must be a Module or an iterable of Parameter; it holds a "
                    f"{'computed tensor' if computed else type(value).__name__}. Pass the model, "
                    "or model.parameters()."
                )
        trained = [parameter for parameter in given if parameter.requires_grad]
        for number, parameter in enumerate(trained):
            what = f"{where}parameter {number}, of shape {tuple(parameter.shape)},"
            check_not_taken(parameter, what)
            replicas = replicas_of(parameter)
            if any(replica.unsummed.any() for replica in replicas):
                raise ArgumentError(
                    f"{where}replicate has yet to sum what backwards in no_sync have brought to "
                    f"the module of parameter {number}, of shape {tuple(parameter.shape)}: the "
                    "next backward() outside of no_sync does. Leave this call out."
                )
            if replicas:
                raise ArgumentError(
                    f"{where}replicate has summed the gradient of parameter {number}, of shape "
                    f"{tuple(parameter.shape)}, in backward already. Leave this call out."
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ArgumentError(
                    f"{where}the gradient of parameter {number}, of shape "
                    f"{tuple(parameter.shape)}, is sparse. Use sparse=False, or densify it."
                )
    if debugging():
        shapes = [list(parameter.shape) for parameter in trained]
        compare(ranks, {"operation": "sum_gradients", "shapes of parameters": shapes})
    # autograd may have made views of what came in the gradients of two parameters
    places = Counter(p.grad.data_ptr() for p in set(trained) if p.grad is not None)
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in trained:
        buckets.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    with torch.no_grad():
        for bucket in buckets.values():
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket])
            parts = all_reduce(flat, group=group).split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if parameter.grad is None or places[parameter.grad.data_ptr()] > 1:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view(parameter.shape))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
