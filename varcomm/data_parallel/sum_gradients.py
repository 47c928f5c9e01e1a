"""Sum the gradients of replicated parameters over ranks, in buckets, after backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from varcomm.data_parallel.buckets import (
    BUCKET_BYTES,
    IS_SHARDED,
    as_ordinary,
    cut,
    gradient_dtype,
    is_owned,
    listed,
    with_flags,
)
from varcomm.data_parallel.global_count import Reduce, described, divisor_of
from varcomm.errors import ArgumentError
from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.carried import Word, carried
from varcomm.ops.checks import checked_tensor, checking, is_sharded_over, refuse_exhausted
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
        Size of a message in bytes. A gradient of more than `bucket_bytes` and 64 KiB is sent in
        parts of that size.

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
    Communication: per bucket, ``2 (P - 1) / P`` of its bytes, and one number per parameter or
    part of it; up to 16 KiB, ``P - 1`` times its bytes in one round. From 16 ranks on, sums are
    hierarchical, as in :func:`all_reduce`. A GlobalCount adds a gather and a broadcast of 1 KiB
    per rank. The order of sums is fixed, and sums are equal on all ranks bit for bit, so
    replicated parameters stay equal.

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
    buckets = cut(_segments(trained, max(size, _MIN_PART_BYTES)), size)
    total = AllReduce(ranks, use_fp32, divisor=divisor, compares=False)
    with torch.no_grad():
        # new gradients are ordinary tensors, as those of autograd, for parameters of any class
        as_ordinary(_sum, total, buckets, trained, partial(_name, model, trained))


def _name(model: torch.nn.Module | None, trained: Sequence[torch.Tensor], place: int) -> str:
    named = () if model is None else model.named_parameters()
    return next((name for name, p in named if p is trained[place]), f"parameter {place}")


# The least size of parts of a gradient: more messages cost more than their memory is worth.
_MIN_PART_BYTES = 64 * 1024


class _Segment(NamedTuple):
    """Elements of a gradient that travel in one bucket: all of them, or a part of many."""

    place: int  # of the parameter
    start: int
    length: int


def _segments(
    trained: Sequence[torch.nn.Parameter], nbytes: int
) -> Iterator[tuple[_Segment, tuple[torch.dtype, torch.device], int]]:
    """Yield the segments of at most that many bytes, each with the kind and bytes of a message."""
    for place, parameter in enumerate(trained):
        count, dtype = parameter.numel(), gradient_dtype(parameter)
        most = max(1, nbytes // dtype.itemsize)
        for start in range(0, max(count, 1), most):
            length = min(most, count - start)
            message = dtype, parameter.device
            yield _Segment(place, start, length), message, length * dtype.itemsize


def _sum(
    total: AllReduce,
    buckets: Iterable[Sequence[_Segment]],
    trained: Sequence[torch.nn.Parameter],
    name_of: Callable[[int], str],
) -> None:
    """Sum gradients; while a bucket travels, the one before is delivered."""
    settle(total.group)
    sums = _Sums(trained)
    begun = _begun(total, buckets, trained, name_of)
    before = next(begun, None)
    while before is not None:
        bucket, message = before
        before = next(begun, None)
        sums.deliver(bucket, message.wait())
    sums.finish()


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
        checked_tensor(parameter, where, f"parameter {number}")
        fault = _fault(parameter, ranks)
        if fault:
            shape = tuple(parameter.shape)
            raise ArgumentError(f"{where}parameter {number}, of shape {shape}, {fault}")
    return trained


def _fault(parameter: torch.nn.Parameter, ranks: Group) -> str | None:
    """Return the reason why a gradient cannot be summed, or None."""
    gradient, dtype = parameter.grad, gradient_dtype(parameter)
    if is_sharded_over(parameter, ranks):
        return IS_SHARDED
    if is_owned(parameter):
        return (
            "belongs to a ShardedGradients, which sums its gradients. Use one of the two, or call "
            "its close() first."
        )
    if gradient is None:
        if getattr(parameter, "main_grad", None) is not None:
            return (
                "has its gradient in main_grad, which would not be summed. Set grad to "
                "main_grad before, and main_grad to grad afterwards; or sum main_grad with "
                "varcomm.all_reduce."
            )
    elif (gradient.layout, gradient.dtype) != (torch.strided, dtype):
        return (
            f"has a gradient of {gradient.layout} and {gradient.dtype}, and not a dense one of "
            f"{dtype}. Use sparse=False; set its grad_dtype before backward."
        )
    return None


def _begun(
    total: AllReduce,
    buckets: Iterable[Sequence[_Segment]],
    trained: Sequence[torch.nn.Parameter],
    name_of: Callable[[int], str],
) -> Iterator[tuple[Sequence[_Segment], Pending]]:
    """Start the sums; the first carries the comparison of calls and of some entries."""
    for place, bucket in enumerate(buckets):
        first = trained[bucket[0].place]
        dtype, device = gradient_dtype(first), first.device
        word = None
        if place == 0 and not in_graph(first):
            word = word_with(total.group, dtype, device, trained, name_of)
        flat, count = _flat(bucket, trained, word)
        message = send_in_rule(total, flat, False)
        del flat  # sent values are freed before the next bucket is made, and the sum arrives
        if word is not None:
            message = carried(message, total.group, (count,), word, total.divisor)
        yield bucket, message


def _flat(
    bucket: Sequence[_Segment], trained: Sequence[torch.nn.Parameter], word: Word | None
) -> tuple[torch.Tensor, int]:
    """Return gradients, a flag for each and the word in a row, and the length without the word.

    By their flags, other ranks learn which gradients are used.
    """
    gradients = [_elements(trained[segment.place].grad, segment) for segment in bucket]
    first = trained[bucket[0].place]
    empty = first.new_empty(0, dtype=gradient_dtype(first))
    parts = with_flags(gradients, [segment.length for segment in bucket], empty)
    count = sum(map(len, parts))
    return torch.cat([*parts, *([] if word is None else [word.values])]), count


def _elements(gradient: torch.Tensor | None, segment: _Segment) -> torch.Tensor | None:
    if gradient is None:
        return None
    if gradient.numel() == segment.length:
        return gradient.reshape(-1)
    if gradient.is_contiguous():
        return gradient.view(-1).narrow(0, segment.start, segment.length)
    rows = torch.arange(segment.start, segment.start + segment.length, device=gradient.device)
    return gradient[torch.unravel_index(rows, gradient.shape)]  # a copy of these elements alone


class _Unused(NamedTuple):
    """A parameter without a gradient on this rank, the sum over ranks, and whether any has one."""

    parameter: torch.nn.Parameter
    total: torch.Tensor
    flag: torch.Tensor


class _Sums:
    """Sums as they arrive, on their way to the gradients of parameters."""

    def __init__(self, trained: Sequence[torch.nn.Parameter]) -> None:
        self.trained = trained
        self.partly: dict[int, torch.Tensor] = {}  # flat sums, until the last part has arrived
        self.unused: list[_Unused] = []

    def deliver(self, bucket: Sequence[_Segment], total: torch.Tensor) -> None:
        """Make a bucket's sums the gradients of parameters that have one, and note the others."""
        *parts, flags = total.split([*(segment.length for segment in bucket), len(bucket)])
        if any(self.trained[segment.place].grad is None for segment in bucket):
            flags = flags.ne(0)
        for at, (segment, part) in enumerate(zip(bucket, parts, strict=True)):
            parameter = self.trained[segment.place]
            if segment.length < parameter.numel():
                flat = self.partly.setdefault(segment.place, part.new_empty(parameter.numel()))
                flat.narrow(0, segment.start, segment.length).copy_(part)
                if segment.start + segment.length < parameter.numel():
                    continue
                part = self.partly.pop(segment.place)
            # new tensors: autograd may have made views of one the gradients of two parameters
            own = torch.empty_like(parameter, dtype=part.dtype).copy_(part.view(parameter.shape))
            if parameter.grad is None:
                self.unused.append(_Unused(parameter, own, flags[at : at + 1]))
            else:
                parameter.grad = own

    def finish(self) -> None:
        """Give the parameters that this rank has not used the gradients of other ranks, if any."""
        flags = listed([one.flag for one in self.unused])
        for one, is_used in zip(self.unused, flags, strict=True):
            if is_used:
                one.parameter.grad = one.total
