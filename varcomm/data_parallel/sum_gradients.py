"""Sum the gradients of replicated parameters over ranks, in buckets, after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from varcomm.data_parallel.buckets import (
    BUCKET_BYTES,
    as_ordinary,
    cut,
    gradient_dtype,
    is_owned,
    listed,
    refuse_sharded,
    with_flags,
)
from varcomm.data_parallel.global_count import Reduce, described, divisor_of
from varcomm.errors import ArgumentError
from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.carried import Word, carried
from varcomm.ops.checks import checked_tensor, checking, refuse_exhausted
from varcomm.ops.digest import digest
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import send_in_rule
from varcomm.ops.sampled import word_with
from varcomm.sizes import at_least
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.debug import settle
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve


def sum_gradients(
    parameters: torch.nn.Module | Iterable[torch.nn.Parameter],
    group: GroupLike = None,
    *,
    reduce: Reduce = "sum",
    use_fp32: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each parameter's ``grad`` by its sum over ranks; call once per step, after backward.

    Each rank computes a part of the loss. Accumulate micro-batches first: a second call would add
    gradients that are already summed. A parameter that no rank has used keeps no gradient, as in
    one process.

    Parameters
    ----------
    parameters : Module or iterable of Parameter
        Equal on every rank, in the same order; frozen parameters are ignored. A parameter without
        ``grad`` on this rank counts as zeros, and gets the sum.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    reduce : "sum", "mean" or GlobalCount
        Divisor of the sum: none, the number of ranks, or the number of rows that all ranks have
        counted since the last call.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    bucket_bytes : int
        Size of a message in bytes.

    Raises
    ------
    ArgumentError
        If a gradient is sparse or has an unexpected dtype, or a parameter belongs to a
        ``ShardedGradients`` or is sharded over the same ranks. On every rank, if a rank has not
        called `add`, or if all counts are 0.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if parameters, values or arguments differ.

    See Also
    --------
    sum_hook, GlobalCount, ShardedGradients

    Notes
    -----
    Communication: per bucket, ``2 (P - 1) / P`` of its bytes, and one number per parameter; up to
    16 KiB, ``P - 1`` times its bytes in one round. From 16 ranks on, sums are hierarchical, as in
    :func:`all_reduce`. A GlobalCount adds a gather and a broadcast of 1 KiB per rank. The order of
    sums is fixed, and sums are equal on all ranks bit for bit, so replicated parameters stay equal.

    On a rank where a parameter has no ``grad``, the host waits for the GPU once per call, and a
    CUDA graph cannot capture the call.

    In one process: backward of the sum of all ranks' losses.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     torch.manual_seed(0)  # the same parameters on all ranks
    ...     layer = torch.nn.Linear(1, 1, bias=False)
    ...     layer(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     varcomm.data_parallel.sum_gradients(layer)
    ...     return layer.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [3.0, 3.0]
    """
    ranks, model = resolve(group), None
    if isinstance(parameters, torch.nn.Module):
        model, parameters = parameters, parameters.parameters()
    with checking("sum_gradients", ranks, use_fp32=use_fp32) as where:
        size = at_least(1, bucket_bytes, "bucket_bytes")
        how = {"reduce": described(reduce, where), "bucket_bytes": size}
        trained = _checked(parameters, where, ranks)
    if debugging():
        shapes = [list(parameter.shape) for parameter in trained]
        call = {"operation": "sum_gradients", "shapes of parameters": shapes, **how}
        values = [repr(digest(parameter)) for parameter in trained]
        compare(ranks, {**call, "values of parameters": values})
    divisor = divisor_of(reduce, ranks, "sum_gradients")
    if ranks.size == divisor == 1:
        return
    buckets = cut(dict(enumerate(trained)), range(len(trained)), size)
    total = AllReduce(ranks, use_fp32, divisor=divisor, compares=False)
    with torch.no_grad():
        # new gradients are ordinary tensors, as those of autograd, for parameters of any class
        parts = [[trained[index] for index in members] for members in buckets]
        as_ordinary(_sum, total, parts, trained, partial(_name, model, trained))


def _name(model: torch.nn.Module | None, trained: Sequence[torch.Tensor], place: int) -> str:
    named = () if model is None else model.named_parameters()
    return next((name for name, p in named if p is trained[place]), f"parameter {place}")


def _sum(
    total: AllReduce,
    buckets: Iterable[Sequence[torch.nn.Parameter]],
    trained: Sequence[torch.nn.Parameter],
    name_of: Callable[[int], str],
) -> None:
    """Replace gradients by their sums; while a bucket travels, the one before is delivered."""
    settle(total.group)
    begun = _begun(total, buckets, trained, name_of)
    unused: list[_Unused] = []
    before = next(begun, None)
    while before is not None:
        bucket, message = before
        before = next(begun, None)
        unused += _delivered(bucket, message.wait())
    for one, is_used in zip(unused, listed([one.flag for one in unused]), strict=True):
        if is_used:
            one.parameter.grad = one.total


def _checked(
    parameters: Iterable[torch.nn.Parameter], where: str, ranks: Group
) -> list[torch.nn.Parameter]:
    refuse_exhausted(parameters, where)
    if isinstance(parameters, set | frozenset):
        raise ArgumentError(
            f"{where}parameters is a set, whose order differs between ranks. Pass the model, or a "
            "list in the order of model.parameters()."
        )
    given = list(parameters)
    for value in given:
        if not isinstance(value, torch.Tensor) or not value.is_leaf:
            raise ArgumentError(
                f"{where}parameters must be a Module or an iterable of Parameter; it holds a "
                f"{type(value).__name__} that is none. Pass the model, or model.parameters()."
            )
    # tied parameters are listed twice, and summed once; lazy ones without a call have no shape
    known = (each for each in given if each.requires_grad and not is_lazy(each))
    trained = list({id(each): each for each in known}.values())
    for number, parameter in enumerate(trained):
        gradient, dtype = parameter.grad, gradient_dtype(parameter)
        checked_tensor(parameter, where, f"parameter {number}")
        what = f"{where}parameter {number}, of shape {tuple(parameter.shape)},"
        refuse_sharded(parameter, ranks, what)
        if is_owned(parameter):
            raise ArgumentError(
                f"{what} belongs to a ShardedGradients, which sums its gradients. Use one of the "
                "two, or call its close() first."
            )
        if gradient is None and getattr(parameter, "main_grad", None) is not None:
            raise ArgumentError(
                f"{what} has its gradient in main_grad, which would not be summed. Set grad to "
                "main_grad before, and main_grad to grad afterwards; or sum main_grad with "
                "varcomm.all_reduce."
            )
        if gradient is not None and (gradient.layout, gradient.dtype) != (torch.strided, dtype):
            raise ArgumentError(
                f"{what} has a gradient of {gradient.layout} and {gradient.dtype}, and not a dense "
                f"one of {dtype}. Use sparse=False; set its grad_dtype before backward."
            )
    return trained


def _begun(
    total: AllReduce,
    buckets: Iterable[Sequence[torch.nn.Parameter]],
    trained: Sequence[torch.nn.Parameter],
    name_of: Callable[[int], str],
) -> Iterator[tuple[Sequence[torch.nn.Parameter], Pending]]:
    """Start the sums; the first carries the comparison of calls and of some entries."""
    for place, bucket in enumerate(buckets):
        dtype, device = gradient_dtype(bucket[0]), bucket[0].device
        word = None
        if place == 0 and not in_graph(bucket[0]):
            word = word_with(total.group, dtype, device, trained, name_of)
        flat, count = _flat(bucket, word)
        message = send_in_rule(total, flat, False)
        del flat  # sent values are freed before the next bucket is made, and the sum arrives
        if word is not None:
            message = carried(message, total.group, (count,), word, total.divisor)
        yield bucket, message


def _flat(bucket: Sequence[torch.nn.Parameter], word: Word | None) -> tuple[torch.Tensor, int]:
    """Return gradients, a flag for each and the word in a row, and the length without the word.

    By their flags, other ranks learn which gradients are used.
    """
    gradients = [None if p.grad is None else p.grad.reshape(-1) for p in bucket]
    empty = bucket[0].new_empty(0, dtype=gradient_dtype(bucket[0]))
    parts = with_flags(gradients, [p.numel() for p in bucket], empty)
    count = sum(map(len, parts))
    return torch.cat([*parts, *([] if word is None else [word.values])]), count


class _Unused(NamedTuple):
    """A parameter without a gradient on this rank, the sum over ranks, and whether any has one."""

    parameter: torch.nn.Parameter
    total: torch.Tensor
    flag: torch.Tensor


def _delivered(bucket: Sequence[torch.nn.Parameter], total: torch.Tensor) -> Iterator[_Unused]:
    """Make the parts of a sum the gradients of parameters that have one; yield the others."""
    *parts, flags = total.split([*(p.numel() for p in bucket), len(bucket)])
    if any(p.grad is None for p in bucket):
        flags = flags.ne(0)
    for place, (parameter, part) in enumerate(zip(bucket, parts, strict=True)):
        # new tensors: autograd may have made views of one the gradients of two parameters
        own = torch.empty_like(parameter, dtype=part.dtype).copy_(part.view(parameter.shape))
        if parameter.grad is None:
            yield _Unused(parameter, own, flags[place : place + 1])
        else:
            parameter.grad = own
