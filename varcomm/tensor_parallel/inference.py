"""Fused paths of inference: a norm before a column-parallel product, or after a row-parallel one.

They return the bits of the separate layers, and keep nothing for backward. Norms, sums and
residuals are computed for a few rows at a time, which stay in a cache, and messages arrive where
the next step reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.ops.compilation import uncompiled
from varcomm.ops.operator import begin, checking
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.tensor_parallel.linear import (
    as_rows,
    autocast,
    checked_operands,
    checked_sequence,
    flattened,
    multiplied,
    multiplied_while_gathered,
)
from varcomm.transport.engine import Pending
from varcomm.transport.group import GroupLike, resolve

__all__ = ["Buffers", "norm_column_linear", "row_linear_norm"]

Norm = nn.LayerNorm | nn.RMSNorm

# Bytes of rows that are computed together, which fit a cache, and the largest number of pieces.
_PIECE = 256 * 1024
_MOST_PIECES = 16

_IN_PLACE = "it writes into the caller's buffers, which a graph does not"


class Buffers:
    """Memory for results and temporaries of fused calls, kept by the caller.

    .. warning::
       A result lives in its buffers, and is **valid until the next call with the same buffers,
       which overwrites it.** Clone what you keep.

    Make one for each place in a program that calls. The first call allocates; later calls allocate
    only if they need more memory, another device, or enter :class:`torch.inference_mode`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import Buffers, norm_column_linear
    >>> def fn(rank):
    ...     norm, buffers = torch.nn.RMSNorm(2), Buffers()
    ...     with torch.inference_mode():
    ...         first = norm_column_linear(torch.ones(1, 2), norm, torch.eye(2), buffers=buffers)
    ...         again = norm_column_linear(-torch.ones(1, 2), norm, torch.eye(2), buffers=buffers)
    ...     return first is not again, first.tolist()  # overwritten
    >>> varcomm.launch(fn, 1)
    [(True, [[-1.0, -1.0]])]
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(
        self, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialised memory, the same one for a role while it is large enough."""
        nbytes = prod(shape) * dtype.itemsize
        memory = self._memory.get(role)
        if (
            memory is None
            or memory.nbytes < nbytes
            or memory.device != device
            # outside of inference mode, its tensors cannot be written
            or memory.is_inference() != torch.is_inference_mode_enabled()
        ):
            self._memory.pop(role, None)  # frees it before the new one is allocated
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._memory[role] = memory
        return memory[:nbytes].view(dtype).view(*shape)

    def hold(self, tensor: Tensor) -> str | None:
        """Return the role whose memory `tensor` uses, or None."""
        place = tensor.untyped_storage().data_ptr()
        for role, memory in self._memory.items():
            if place and memory.untyped_storage().data_ptr() == place:
                return role
        return None


@uncompiled(_IN_PLACE)
def norm_column_linear(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_sizes: Sequence[int] | None = None,
    buffers: Buffers | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `x` is replicated or a part of a sequence; norm it, and compute own outputs.

    Equal to ``column_parallel_linear(norm(x), weight, bias, sequence_sizes=...)``, bit for bit.

    Parameters
    ----------
    x, weight, bias, sequence_sizes, group
        As in :func:`column_parallel_linear`; none may require a gradient.
    norm : torch.nn.LayerNorm or torch.nn.RMSNorm
        Over the last dimension, replicated.
    buffers : Buffers, optional
        Memory for the result, which the next call with it overwrites.

    Returns
    -------
    torch.Tensor
        ``(*F, n)``, or ``(sum(sequence_sizes), *F, n)``.

    Raises
    ------
    ArgumentError
        Before any communication, if arguments do not fit, or one of them requires a gradient.

    Notes
    -----
    Communication: with `sequence_sizes` an all-gather of the normed rows, while own rows are
    multiplied; otherwise none.

    Memory: the normed input and the result, in `buffers`, and temporaries of 256 KiB or a sixteenth
    of the rows. Where torch's norm of a row depends on the number of rows (on GPUs, for
    non-contiguous `x` and very long rows), results are equal to rounding.

    In one process: this rank's columns of ``torch.nn.functional.linear(norm(x), weight, bias)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import norm_column_linear
    >>> def fn(rank):
    ...     weight = torch.arange(6.0).view(3, 2).split([1, 2])[rank]
    ...     with torch.inference_mode():
    ...         return norm_column_linear(torch.full((1, 2), 7.0), torch.nn.RMSNorm(2), weight)
    >>> varcomm.launch(fn, 2)
    [tensor([[1.]]), tensor([[5., 9.]])]
    """
    ranks = resolve(group)
    with checking("norm_column_linear", ranks) as where:
        checked_tensor(x, where, "x")
        normed = _normed(norm, x, where)
        checked_operands(normed, weight, bias, where)
        sequence = checked_sequence(x, sequence_sizes, ranks, where)
        operands = {"x": x, "weight": weight, "bias": bias}
        memory = _checked_buffers(buffers, operands, where)
        _refuse_gradients({**operands, "norm": norm}, where)
    like, weight, bias = autocast(normed.new_empty(0), weight, bias)
    rows, columns, lead = as_rows(x), weight.shape[0], x.shape[:-1]
    gather, count = None, len(rows)
    if sequence is not None:
        count, lead = sum(flattened(sequence, x)), torch.Size((sum(sequence), *lead[1:]))
    whole = into = memory.take("normed", (count, rows.shape[1]), like.dtype, x.device)
    y = memory.take("product", (count, columns), like.dtype, x.device)
    if sequence is not None:
        gather = _GatherInto(ranks, flattened(sequence, x), 0, True, whole)
        into = gather.own
    for piece in _pieces(rows):
        into[piece] = norm(rows[piece])
    if gather is None:
        multiplied(into, weight.T, bias, y)
    else:
        multiplied_while_gathered(gather, into, weight.T, bias, False, y)
    return y.view(*lead, columns)


@uncompiled(_IN_PLACE)
def row_linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Norm,
    *,
    sequence_sizes: Sequence[int],
    gather: bool = True,
    buffers: Buffers | None = None,
    group: GroupLike = None,
) -> tuple[Tensor, Tensor]:
    """Assume that `x` is sharded along its last dimension; sum products, add the residual, norm.

    Equal to ``residual + row_parallel_linear(x, weight, bias, sequence_sizes=...)``, and its
    gathered norm, bit for bit.

    Parameters
    ----------
    x, weight, bias, sequence_sizes
        As in :func:`row_parallel_linear`; none may require a gradient.
    residual : torch.Tensor
        This rank's rows, ``(sequence_sizes[rank], *F, N)``. A residual that the previous call
        returned with the same `buffers` is updated in place; no other is changed.
    gather : bool
        Return the normed rows of all ranks; otherwise this rank's only.
    norm, buffers, group
        As in :func:`norm_column_linear`.

    Returns
    -------
    normed : torch.Tensor
        ``(sum(sequence_sizes), *F, N)``, replicated; without `gather` this rank's rows.
    residual : torch.Tensor
        This rank's rows of the sum, ``(sequence_sizes[rank], *F, N)``.

    Notes
    -----
    Communication: a reduce-scatter of the product, summed in rank order, and an all-gather of the
    normed rows. Without `gather`, :func:`norm_column_linear` gathers while it multiplies.

    In one process: ``residual + torch.nn.functional.linear(x, weight, bias)``, and its norm.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import row_linear_norm
    >>> def fn(rank):
    ...     x, weight, norm = torch.ones(2, 1), torch.ones(4, 1), torch.nn.RMSNorm(4, eps=0.0)
    ...     options = {"residual": torch.zeros(1, 4), "norm": norm, "sequence_sizes": [1, 1]}
    ...     with torch.inference_mode():
    ...         normed, residual = row_linear_norm(x, weight, None, **options)
    ...     return normed.shape, residual
    >>> varcomm.launch(fn, 2)[1]
    (torch.Size([2, 4]), tensor([[2., 2., 2., 2.]]))
    """
    ranks = resolve(group)
    with checking("row_linear_norm", ranks) as where:
        checked_flag(gather, "gather", where)
        checked_operands(x, weight, bias, where)
        sequence = checked_sequence(x, sequence_sizes, ranks, where, whole=True)
        if sequence is None:
            raise ArgumentError(f"{where}sequence_sizes must be one int per rank; got None.")
        own = (sequence[ranks.rank], *x.shape[1:-1], weight.shape[0])
        checked_tensor(residual, where, "residual")
        if residual.shape != own or residual.device != x.device:
            raise ArgumentError(
                f"{where}residual must be this rank's rows {own}, on {x.device}; got shape "
                f"{tuple(residual.shape)} on {residual.device}."
            )
        factors = autocast(x, weight, bias)
        dtype = torch.promote_types(factors[0].dtype, residual.dtype)
        normed = _normed(norm, residual.new_empty((), dtype=dtype).expand(own), where)
        operands = {"x": x, "weight": weight, "bias": bias}
        memory = _checked_buffers(buffers, operands, where)
        _refuse_gradients({**operands, "residual": residual, "norm": norm}, where)
        _check_place(memory, residual, dtype, where)
    x, weight, bias = factors
    sizes, (width, _) = flattened(sequence, x), weight.shape
    product = memory.take("product", (sum(sizes), width), x.dtype, x.device)
    parts = memory.take("parts", (ranks.size, sizes[ranks.rank], width), x.dtype, x.device)
    total = memory.take("residual", (sizes[ranks.rank], width), dtype, x.device)
    torch.mm(as_rows(x), weight.T, out=product)
    begin(_PartsInto(ranks, sizes, 0, True, parts), product, False).wait()
    # in the place of the product, which has been sent
    rows = sum(sizes) if gather else sizes[ranks.rank]
    whole = memory.take("product", (rows, width), normed.dtype, x.device)
    gathering = _GatherInto(ranks, sizes, 0, True, whole)
    into = gathering.own if gather else whole
    before = as_rows(residual)
    for piece in _pieces(total):
        y = sum_in_rank_order(parts[:, piece], use_fp32=True)
        if bias is not None:
            y += bias
        torch.add(before[piece], y, out=total[piece])
        into[piece] = norm(total[piece])
    if gather:
        begin(gathering, into, False).wait()
    length = sum(sequence) if gather else sequence[ranks.rank]
    return whole.view(length, *x.shape[1:-1], width), total.view(own)


@dataclass(frozen=True)
class _GatherInto(AllGatherV):
    """``all_gather_v`` of rows that stand in their place already, `own`."""

    out: Tensor = field(compare=False)

    @property
    def own(self) -> Tensor:
        """Return the place of this rank's rows."""
        rank = self.group.rank
        return self.out.narrow(0, sum(self.sizes[:rank]), self.sizes[rank])

    def start(self, x: Tensor) -> Pending:
        """Let the others' rows arrive in theirs."""
        counts = [rows * self.out.shape[1] for rows in self.sizes]
        works, _ = packing.all_gather(
            self.name, self.group, packing.flat(x), counts, self.out.view(-1)
        )
        return Pending(works, lambda: self.out)


@dataclass(frozen=True)
class _PartsInto(ReduceScatterV):
    """``reduce_scatter_v`` but for the sum: what it is of, rank by rank."""

    out: Tensor = field(compare=False)

    def start(self, x: Tensor) -> Pending:
        """Send each rank its rows."""
        send = [rows * x.shape[1] for rows in self.sizes]
        recv = [send[self.group.rank]] * self.group.size
        works, _ = packing.exchange(
            self.name, self.group, packing.flat(x), send, recv, out=self.out.view(-1)
        )
        return Pending(works, lambda: self.out)


def _pieces(rows: Tensor) -> Iterator[slice]:
    count = len(rows)
    step = max(_PIECE * count // max(rows.nbytes, 1), -(-count // _MOST_PIECES), 1)
    for start in range(0, count, step):
        yield slice(start, start + step)


def _normed(norm: Norm, x: Tensor, where: str) -> Tensor:
    """Return what has shape and dtype of ``norm(x)``, in no memory."""
    if not isinstance(norm, Norm):
        raise ArgumentError(
            f"{where}norm must be a torch.nn.LayerNorm or torch.nn.RMSNorm; got "
            f"{type(norm).__name__}."
        )
    if tuple(norm.normalized_shape) != tuple(x.shape[-1:]):
        raise ArgumentError(
            f"{where}norm must be over the last dimension, of shape {tuple(x.shape)}; it is over "
            f"{tuple(norm.normalized_shape)}."
        )
    try:
        none = norm(x.new_empty(0, x.shape[-1]))
    except RuntimeError as error:
        raise ArgumentError(f"{where}norm cannot take {x.dtype} on {x.device}: {error}") from error
    return none.new_empty(()).expand(x.shape)  # type: ignore[no-any-return]


def _refuse_gradients(operands: Mapping[str, Tensor | nn.Module | None], where: str) -> None:
    for name, operand in operands.items():
        tensors = operand.parameters() if isinstance(operand, nn.Module) else [operand]
        for tensor in tensors:
            if tensor is None:
                continue
            recorded = torch.is_grad_enabled() and tensor.requires_grad
            if recorded or forward_ad.unpack_dual(tensor).tangent is not None:
                kind = "requires a gradient" if recorded else "carries a forward-mode tangent"
                raise ArgumentError(
                    f"{where}{name} {kind}, which is not computed here. Call this under "
                    "torch.inference_mode() or torch.no_grad(), or use the layers."
                )


def _checked_buffers(
    buffers: Buffers | None, operands: Mapping[str, Tensor | None], where: str
) -> Buffers:
    if buffers is None:
        return Buffers()
    if not isinstance(buffers, Buffers):
        raise ArgumentError(f"{where}buffers must be Buffers; got {type(buffers).__name__}.")
    for name, operand in operands.items():
        if operand is not None and buffers.hold(operand) is not None:
            raise ArgumentError(
                f"{where}{name} is in the memory of buffers, which this call writes into. Take "
                f"other Buffers for what {name} comes from."
            )
    return buffers


def _check_place(buffers: Buffers, residual: Tensor, dtype: torch.dtype, where: str) -> None:
    """Raise ArgumentError if a residual would be overwritten before it is read."""
    role = buffers.hold(residual)
    in_place = residual.dtype == dtype and residual.is_contiguous()
    if role is not None and not (
        role == "residual" and in_place and residual.storage_offset() == 0
    ):
        raise ArgumentError(
            f"{where}residual is in the memory of buffers, and not as a call has returned it, so "
            "this one would overwrite it. Clone it."
        )
