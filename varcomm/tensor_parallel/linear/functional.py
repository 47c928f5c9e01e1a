"""Parallel linears as functions of weights, which modules and other layers share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.ops.replicated import ReplicatedSum, ReplicatedUse
from varcomm.sizes import checked_sizes
from varcomm.tensor_parallel.linear.column import column_product
from varcomm.tensor_parallel.linear.main_grad import MainGrad
from varcomm.tensor_parallel.linear.row import row_product
from varcomm.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["column_parallel_linear", "row_parallel_linear"]


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
    *,
    gather_output: bool = False,
    sequence_sizes: Sequence[int] | None = None,
    save: Literal["input", "gathered"] = "input",
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `x` is replicated or a part of a sequence, and compute own columns of the output.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, K)``, the same on all ranks; with `sequence_sizes`
        ``(sequence_sizes[rank], *F, K)``, other ones on each.
    weight : torch.Tensor
        This rank's rows of the weight, ``(sizes[rank], K)``. If it has an attribute ``main_grad``,
        ``backward()`` adds its gradient to that, in its dtype, and not to ``weight.grad``.
    bias : torch.Tensor, optional
        This rank's part of the bias, ``(sizes[rank],)``.
    sizes : sequence of int, optional
        Outputs of each rank, zeros allowed. Only `gather_output` needs them, and asks the ranks if
        they are None, which costs a round of messages.
    gather_output : bool
        Return all columns, replicated; they are to be used alike on all ranks.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension of `x` on each rank, zeros allowed: sequence parallelism.
    save : {"input", "gathered"}
        What backward uses for the gradient of `weight` in sequence parallelism: the own part, which
        is gathered again, or the whole, which takes P times the memory.
    use_fp32 : bool
        Sum gradients of `x` narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, sizes[rank])``, or ``(sum(sequence_sizes), *F, sizes[rank])``.

    Raises
    ------
    ArgumentError
        Before any communication, if shapes, dtypes or sizes do not fit on this rank.

    Notes
    -----
    Adjoint: with respect to `x`, :func:`row_parallel_linear` with the transposed weight.
    Derivatives are of any order. Under ``torch.autocast`` it computes in its dtype, as
    :func:`torch.nn.functional.linear` does.

    Communication: with `sequence_sizes` each rank sends its rows of `x` to every other, while it
    multiplies its own; with `save` ``"input"`` once more in backward. With `gather_output` it sends
    its columns to every other. In backward gradients of `x` are summed, by an all-reduce or a
    reduce-scatter, while that of `weight` is computed. If `x` or `weight` has no gradient, what is
    for it is neither kept nor sent.

    In one process: ``torch.nn.functional.linear(x, weight, bias)``, of which each rank has columns.

    Sources: [1]_; the gather in pieces around own rows is that of nanotron.

    References
    ----------
    .. [1] V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
       2022, https://arxiv.org/abs/2205.05198

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import column_parallel_linear
    >>> def fn(rank):
    ...     weight = torch.arange(6.0).view(3, 2).split([1, 2])[rank]
    ...     return column_parallel_linear(torch.ones(1, 2), weight)
    >>> varcomm.launch(fn, 2)
    [tensor([[1.]]), tensor([[5., 9.]])]
    """
    ranks = resolve(group)
    with checking(
        "column_parallel_linear", ranks, gather_output=gather_output, use_fp32=use_fp32
    ) as where:
        checked_operands(x, weight, bias, where)
        if save not in ("input", "gathered"):
            raise ArgumentError(f'{where}save must be "input" or "gathered"; got {save!r}.')
        if sizes is not None:
            _checked_rows(weight, sizes, 0, ranks, where)
        sequence = checked_sequence(x, sequence_sizes, ranks, where)
        main_grad = MainGrad.of(weight, where)
    x, weight, bias = autocast(x, weight, bias)
    before: ReplicatedUse | AllGatherV
    if sequence is None:
        length, before = x.shape[:-1], ReplicatedUse(ranks, use_fp32)
    else:
        length = torch.Size((sum(sequence), *x.shape[1:-1]))
        before = AllGatherV(ranks, flattened(sequence, x), 0, use_fp32)
    y = column_product(as_rows(x), weight, bias, before, save == "gathered", main_grad)
    y = y.view(*length, weight.shape[0])
    return gather_from_tensor_model_parallel_region(y, sizes, -1, group) if gather_output else y


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
    *,
    input_is_parallel: bool = True,
    sequence_sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Assume that `x` is sharded along its last dimension, and sum the products of all ranks.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, sizes[rank])``: this rank's columns of the input. Unless `input_is_parallel`,
        all of them, replicated.
    weight : torch.Tensor
        This rank's columns of the weight, ``(N, sizes[rank])``; ``main_grad`` as in
        :func:`column_parallel_linear`.
    bias : torch.Tensor, optional
        The whole bias, ``(N,)``, replicated; added once. Its gradient is complete on every rank.
    sizes : sequence of int, optional
        Columns of the input on each rank, zeros allowed. Only needed, and then balanced if None,
        unless `input_is_parallel`.
    input_is_parallel : bool
        Whether `x` has this rank's columns only.
    sequence_sizes : sequence of int, optional
        Rows of the output's first dimension for each rank, zeros allowed: sequence parallelism.
    use_fp32 : bool
        Sum products narrower than 4 bytes in fp32 and round once; else in their own dtype.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, N)``, replicated; with `sequence_sizes` this rank's rows of it.

    Raises
    ------
    ArgumentError
        Before any communication, if shapes, dtypes or sizes do not fit on this rank.

    Notes
    -----
    Adjoint: with respect to `x`, :func:`column_parallel_linear` with the transposed weight.
    Derivatives are of any order. ``torch.autocast`` as in :func:`column_parallel_linear`.

    Communication: an all-reduce of the output, or with `sequence_sizes` a reduce-scatter. In
    backward none, or a gather of the gradient's rows, while own ones are multiplied. Unless
    `input_is_parallel`, each rank also sends its columns of the gradient of `x` to every other.

    In one process: ``torch.nn.functional.linear(x, weight, bias)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import row_parallel_linear
    >>> def fn(rank):
    ...     weight = torch.arange(6.0).view(2, 3).split([1, 2], dim=1)[rank]
    ...     return row_parallel_linear(torch.ones(1, rank + 1), weight, torch.tensor([0.5, 0.25]))
    >>> varcomm.launch(fn, 2)
    [tensor([[ 3.5000, 12.2500]]), tensor([[ 3.5000, 12.2500]])]
    """
    ranks = resolve(group)
    with checking(
        "row_parallel_linear", ranks, input_is_parallel=input_is_parallel, use_fp32=use_fp32
    ) as where:
        if sizes is not None:
            checked_tensor(weight, where, "weight")
            _checked_rows(weight, sizes, 1, ranks, where)
    if not input_is_parallel:
        x = scatter_to_tensor_model_parallel_region(x, sizes, -1, group)
    with checking("row_parallel_linear", ranks) as where:
        checked_operands(x, weight, bias, where)
        sequence = checked_sequence(x, sequence_sizes, ranks, where, whole=True)
        main_grad = MainGrad.of(weight, where)
    x, weight, bias = autocast(x, weight, bias)
    after: ReplicatedSum | ReduceScatterV
    if sequence is None:
        length, after = x.shape[:-1], ReplicatedSum(ranks, use_fp32)
    else:
        length = torch.Size((sequence[ranks.rank], *x.shape[1:-1]))
        after = ReduceScatterV(ranks, flattened(sequence, x), 0, use_fp32)
    y = row_product(as_rows(x), weight, bias, after, main_grad)
    return y.view(*length, weight.shape[0])


def checked_operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, where: str
) -> None:
    """Raise ArgumentError unless ``x @ weight.T + bias`` can be computed."""
    checked_tensor(x, where, "x")
    checked_tensor(weight, where, "weight")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"{where}x must be (..., in) and weight (out, in), as this rank has them; got x of "
            f"shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}."
        )
    if bias is not None:
        checked_tensor(bias, where, "bias")
        if bias.shape != weight.shape[:1]:
            raise ArgumentError(
                f"{where}bias must be ({weight.shape[0]},), one a row of this rank's weight; got "
                f"shape {tuple(bias.shape)}."
            )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and (_dtype(value) != _dtype(x) or value.device != x.device):
            raise ArgumentError(
                f"{where}x is of {_dtype(x)} on {x.device}, but {name} is of {_dtype(value)} on "
                f"{value.device}."
            )
    if not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"{where}x must be of floats; got {x.dtype}.")


def _checked_rows(
    weight: torch.Tensor, sizes: Sequence[int], dim: int, group: Group, where: str
) -> None:
    plain = checked_sizes(sizes, "sizes", group.size, where)
    if weight.dim() == 2 and weight.shape[dim] != plain[group.rank]:
        raise ArgumentError(
            f"{where}weight of shape {tuple(weight.shape)} has {weight.shape[dim]} "
            f"{('rows', 'columns')[dim]}, but sizes[{group.rank}] is {plain[group.rank]} (sizes "
            f"{list(plain)})."
        )


def checked_sequence(
    x: torch.Tensor,
    sequence_sizes: Sequence[int] | None,
    group: Group,
    where: str,
    whole: bool = False,
) -> tuple[int, ...] | None:
    """Return `sequence_sizes` as ints, if `x` has this rank's rows of them, or all if `whole`."""
    if sequence_sizes is None:
        return None
    if x.dim() < 2:
        raise ArgumentError(
            f"{where}with sequence_sizes, x must be (sequence, ..., in); got shape "
            f"{tuple(x.shape)}."
        )
    sequence = checked_sizes(sequence_sizes, "sequence_sizes", group.size, where)
    if whole and x.shape[0] != sum(sequence):
        raise ArgumentError(
            f"{where}x has {x.shape[0]} rows, but sequence_sizes sum to {sum(sequence)} "
            f"(sequence_sizes {list(sequence)})."
        )
    if not whole and x.shape[0] != sequence[group.rank]:
        raise ArgumentError(
            f"{where}x has {x.shape[0]} rows, but sequence_sizes[{group.rank}] is "
            f"{sequence[group.rank]} (sequence_sizes {list(sequence)})."
        )
    return sequence


def flattened(sequence: Sequence[int], x: torch.Tensor) -> tuple[int, ...]:
    """Return the rows of each rank once all dimensions of `x` but the last are one."""
    return tuple(size * prod(x.shape[1:-1]) for size in sequence)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with all dimensions but the last as one."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return operands in the dtype of :class:`torch.autocast`, as torch's linear does."""
    return (
        x.to(_dtype(x)),
        weight.to(_dtype(weight)),
        None if bias is None else bias.to(_dtype(bias)),
    )


def _dtype(operand: torch.Tensor) -> torch.dtype:
    """Return what an operand is computed in. Autocast leaves fp64 and complex numbers alone."""
    device, dtype = operand.device.type, operand.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype
