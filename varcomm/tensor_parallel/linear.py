"""Linear layers whose weight is sharded along its outputs (column) or its inputs (row).

Both are one product, ``y = after(before(x) @ weight.T) + bias``. For a column-parallel layer,
`before` uses a replicated input or gathers the parts of a sequence. For a row-parallel layer,
`after` sums the products of all ranks, or sums and scatters them along the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod, sqrt
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.checks import checked_flag, checked_shard, checked_tensor, checked_whole, checking
from varcomm.ops.handle import apply, send_in_rule
from varcomm.ops.replicated import ReplicatedSum, ReplicatedUse
from varcomm.ops.rule import is_recorded
from varcomm.tensor_parallel.derivatives import in_transform, recorded_gradients
from varcomm.tensor_parallel.layout import FLAG, ShardedModule, Sizes, checked_choice
from varcomm.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from varcomm.transport.group import Group, GroupLike, resolve

Before = ReplicatedUse | AllGatherV

_SAVED = ("input", "gathered")


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_sizes: Sequence[int] | None = None,
    sequence_dim: int = 0,
    save: Literal["input", "gathered"] = "input",
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `x` is replicated or a part of a sequence, and compute this rank's outputs.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, K)``, identical on all ranks; with `sequence_sizes` this rank's part, of
        ``sequence_sizes[rank]`` rows along `sequence_dim`.
    weight : torch.Tensor
        This rank's rows of the weight, ``(n, K)``.
    bias : torch.Tensor, optional
        This rank's part of the bias, ``(n,)``, or None.
    sequence_sizes : sequence of int, optional
        Sequence parallelism: rows of `x` along `sequence_dim` per rank; zeros are allowed.
    sequence_dim : int
        Dimension of the sequence, not the last: 0, or 1 for batch-first inputs.
    save : {"input", "gathered"}
        Keep this rank's part for backward and gather it again, or keep the gathered input: P times
        the memory, and no overlap in backward. Compiled graphs and transforms do the latter.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, n)``; with `sequence_sizes`, for the full sequence.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    ColumnParallelLinear, row_parallel_linear

    Notes
    -----
    Adjoint: with respect to `x`, :func:`row_parallel_linear` with the transposed weight.

    Communication: with `sequence_sizes`, an all-gather of `x`, again in backward with
    ``save="input"``. Backward sums the gradient of `x` with an all-reduce or reduce-scatter, while
    it computes the gradient of `weight`. An operand that needs no gradient causes no messages.

    In one process: this rank's columns of ``torch.nn.functional.linear(x, weight, bias)``, also
    under ``torch.autocast``.

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
    with checking("column_parallel_linear", ranks, use_fp32=use_fp32) as where:
        checked_choice(save, "save", where, _SAVED)
        checked_operands(x, weight, bias, where)
        sequence = _checked_sequence(x, sequence_sizes, sequence_dim, ranks, where)
    x, weight, bias = autocast(x, weight, bias)
    before: Before = ReplicatedUse(ranks, use_fp32)
    if sequence is not None:
        before = AllGatherV(ranks, *sequence, use_fp32)
    keeps = sequence is not None and save == "gathered"
    # of a frozen weight, torch's product keeps no input
    if torch.compiler.is_compiling() or in_transform() or keeps or not weight.requires_grad:
        return _product(before, x, weight, bias)
    return _ColumnProduct.apply(before, x, weight, bias, is_recorded(x))  # type: ignore[no-untyped-call, no-any-return]


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_sizes: Sequence[int] | None = None,
    sequence_dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `x` is sharded along its last dimension, and sum the products of all ranks.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, n)``: this rank's columns of the input.
    weight : torch.Tensor
        This rank's columns of the weight, ``(N, n)``.
    bias : torch.Tensor, optional
        The full bias, ``(N,)``, replicated, or None; its gradient is complete on every rank.
    sequence_sizes : sequence of int, optional
        Sequence parallelism: rows of the output along `sequence_dim` per rank; zeros are allowed.
    sequence_dim, use_fp32, group
        As in :func:`column_parallel_linear`.

    Returns
    -------
    torch.Tensor
        ``(*F, N)``, replicated; with `sequence_sizes` this rank's rows.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    RowParallelLinear, column_parallel_linear

    Notes
    -----
    Adjoint: with respect to `x`, :func:`column_parallel_linear` with the transposed weight.

    Communication: an all-reduce of the output; with `sequence_sizes` a reduce-scatter, and in
    backward an all-gather, and an all-reduce of the gradient of `bias`.

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
    with checking("row_parallel_linear", ranks, use_fp32=use_fp32) as where:
        checked_operands(x, weight, bias, where)
        sequence = _checked_sequence(x, sequence_sizes, sequence_dim, ranks, where, whole=True)
    x, weight, bias = autocast(x, weight, bias)
    y = functional.linear(x, weight)
    if sequence is None:
        y = apply(ReplicatedSum(ranks, use_fp32), y)
    else:
        y = apply(ReduceScatterV(ranks, *sequence, use_fp32), y)
        if bias is not None:  # each rank adds it to its own rows
            bias = apply(ReplicatedUse(ranks, use_fp32), bias)
    return y if bias is None else y + bias


def as_rows(x: Tensor) -> Tensor:
    """Return `x` with all dimensions before the last as one, also if one of them is 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _product(before: Before, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(apply(before, x), weight, bias)


class _ColumnProduct(torch.autograd.Function):
    """The product, which keeps no gathered rows; messages overlap with products in backward."""

    @staticmethod
    def forward(
        ctx: Any, before: Before, x: Tensor, weight: Tensor, bias: Tensor | None, recorded: bool
    ) -> Tensor:
        ctx.before, ctx.gathers = before, isinstance(before, AllGatherV)
        ctx.save_for_backward(x, weight, bias)
        rows = send_in_rule(before, x, recorded).wait() if ctx.gathers else x
        return functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, (_, *needed, _) = ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled():
            found = recorded_gradients(partial(_product, ctx.before), saved, needed, gradient)
            return None, *found, None
        x, weight, _ = saved
        gathered = send_in_rule(ctx.before, x, False) if ctx.gathers else None
        of_x = gradient @ weight.conj() if needed[0] else None
        x = x if gathered is None else gathered.wait()
        summed = None if of_x is None else send_in_rule(ctx.before.adjoint, of_x, False)
        x, gradient = as_rows(x), as_rows(gradient)
        of_weight, of_bias = gradient.T @ x.conj(), gradient.sum(0) if needed[2] else None
        return None, None if summed is None else summed.wait(), of_weight, of_bias, None


def checked_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, where: str, name: str = "x"
) -> None:
    """Raise ArgumentError unless ``x @ weight.T + bias`` can be computed; `name` names x."""
    operands = {name: x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for word, operand in operands.items():
        checked_tensor(operand, where, word)
        if _dtype(operand) != _dtype(x) or operand.device != x.device:
            raise ArgumentError(
                f"{where}{name} is {_dtype(x)} on {x.device}, but {word} is {_dtype(operand)} on "
                f"{operand.device}."
            )
    if (
        not (x.is_floating_point() or x.is_complex())
        or x.dim() == 0
        or weight.dim() != 2
        or x.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = ", ".join(f"{word} {tuple(one.shape)}" for word, one in operands.items())
        raise ArgumentError(
            f"{where}{name} must be floats (..., in), weight (out, in) and bias (out,) or None on "
            f"this rank; got {shapes} of {x.dtype}."
        )


def _checked_sequence(
    x: Tensor,
    sequence_sizes: Sequence[int] | None,
    dim: int,
    group: Group,
    where: str,
    whole: bool = False,
) -> tuple[tuple[int, ...], int] | None:
    """Return sizes as ints and dim, if `x` has this rank's rows, or all rows if `whole`."""
    if sequence_sizes is None:
        return None
    if x.dim() < 2 or not 0 <= dim < x.dim() - 1:
        raise ArgumentError(
            f"{where}with sequence_sizes, x must be (sequence, ..., in), or have the sequence at "
            f"sequence_dim, before the last; got {tuple(x.shape)}, sequence_dim={dim!r}."
        )
    checked = checked_whole if whole else checked_shard
    return checked(x, sequence_sizes, dim, group, where, "sequence_sizes")


def autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return operands in the dtype of :class:`torch.autocast`, as torch's linear uses them."""
    cast = None if bias is None else bias.to(_dtype(bias))
    return x.to(_dtype(x)), weight.to(_dtype(weight)), cast


def _dtype(operand: Tensor) -> torch.dtype:
    # autocast leaves fp64 and complex numbers alone
    device, dtype = operand.device.type, operand.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


class _ParallelLinear(ShardedModule):
    """Parameters of both layers, and conversion from and to ``torch.nn.Linear``."""

    _plain = nn.Linear
    _copied = ("in_features", "out_features")
    _fixed = {"bias": False}  # noqa: RUF012

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    use_fp32: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sizes: Sizes | None = None,
        *,
        group: GroupLike = None,
        **options: Any,
    ) -> None:
        def more(_: object) -> dict[str, Any]:
            checked_flag(bias, "bias", "")
            return {"bias": bias}

        shape = {"out_features": out_features, "in_features": in_features}
        names = ("weight", "bias") if bias else ("weight",)
        super().__init__(shape, sizes, group, options, more, names)

    def _fill(self, tile: Tensor, generator: torch.Generator) -> None:
        bound = 1 / sqrt(self.in_features) if self.in_features else 0.0
        tile.uniform_(-bound, bound, generator=generator)

    def _call_options(self, sequence_sizes: Sequence[int] | None) -> dict[str, Any]:
        """Return the options of a call; `sequence_sizes` overrides the layer's sizes in it."""
        return {
            "sequence_sizes": self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            "sequence_dim": self.sequence_dim,
            "use_fp32": self.use_fp32,
            "group": self.group.process_group,
        }

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: GroupLike = None, **options: Any) -> Self:
        """Shard a Linear that is identical on all ranks; collective.

        `linear` shares no memory with the result. `options` are arguments of the constructor beside
        features, bias, init, device and dtype. All ranks raise an error if one passes no plain
        Linear or a wrong option, or if weights differ.
        """
        return cls._replacing("linear", linear, options, group)

    def to_linear(self) -> nn.Linear:
        """Gather the weight and return an equal Linear on every rank; collective."""
        return self._unsharded()  # type: ignore[no-any-return]


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are sharded across ranks.

    Parameters
    ----------
    in_features : int
        Input features of the full layer.
    out_features : int
        Output features of the full layer.
    bias : bool
        Whether the layer has a bias, sharded like the outputs.
    sizes : sequence of int, or of such sequences, optional
        Outputs per rank; zeros are allowed. None means balanced sizes. For several fused blocks
        (queries, keys and values; gate and up), pass the outputs of each block; a rank has its part
        of every block.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    **options
        `gather_output`: return all outputs, replicated. `multiple_of`: shard in units of this
        number of outputs, such as the features of a head. `sequence_sizes`, `sequence_dim`, `save`
        and `use_fp32` as in :func:`column_parallel_linear`; `device` and `dtype` of the parameters.
        ``init(tensor, generator)`` fills pieces of the weight in place. By default, weights are
        drawn as in :class:`torch.nn.Linear`.

    Attributes
    ----------
    weight : torch.nn.Parameter
        This rank's rows of the weight, ``(spec.local, in_features)``.
    bias : torch.nn.Parameter or None
        This rank's part of the bias, ``(spec.local,)``.
    spec : ShardSpec
        The sharding of weight and bias.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one rank.

    See Also
    --------
    RowParallelLinear, column_parallel_linear, parallelize

    Notes
    -----
    The full weight depends on torch's default generator on the group's first rank, not on the
    number of ranks. No rank holds the full weight.

    Communication: per call as :func:`column_parallel_linear`; the constructor is collective.

    In one process: :class:`torch.nn.Linear`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     up, down = ColumnParallelLinear(4, 7), RowParallelLinear(7, 4)
    ...     return up.weight.shape[0], round(down(up(torch.ones(2, 4)).relu()).sum().item(), 4)
    >>> one, two = varcomm.launch(fn, 1), varcomm.launch(fn, 2)
    >>> one[0][1] == two[0][1] == two[1][1], [rows for rows, _ in two]
    (True, [4, 3])
    """

    _options = {"use_fp32": FLAG, "gather_output": FLAG[::-1], "save": _SAVED}  # noqa: RUF012
    _sharded = ("weight", "bias")

    gather_output: bool
    save: Literal["input", "gathered"]

    def forward(self, x: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Return this rank's outputs, or all; `sequence_sizes` overrides the layer's sizes."""
        options = self._call_options(sequence_sizes)
        y = column_parallel_linear(x, self.weight, self.bias, save=self.save, **options)
        if not self.gather_output:
            return y
        sizes, pg = self.spec.sizes, self.group.process_group
        # in the order of the full layer, which may have several blocks
        return self.spec.ordered(gather_from_tensor_model_parallel_region(y, sizes, -1, pg), -1)


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are sharded across ranks.

    Parameters
    ----------
    in_features, out_features, group
        As for :class:`ColumnParallelLinear`, whose example has both layers.
    bias : bool
        Whether the layer has a bias: replicated, with a gradient that is complete on every rank.
    sizes : sequence of int, or of such sequences, optional
        Inputs per rank, of each fused block; zeros are allowed. None means balanced sizes.
    **options
        `input_is_parallel`: False if the input has all features. `multiple_of`: shard in units of
        this number of inputs. `sequence_sizes`, `sequence_dim` and `use_fp32` as in
        :func:`row_parallel_linear`; `init`, `device` and `dtype`.

    Attributes
    ----------
    weight : torch.nn.Parameter
        This rank's columns of the weight, ``(out_features, spec.local)``.
    bias : torch.nn.Parameter or None
        The full bias, ``(out_features,)``.
    spec : ShardSpec
        The sharding of the weight.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one rank.

    Notes
    -----
    Communication: per call as :func:`row_parallel_linear`; the constructor is collective.

    In one process: :class:`torch.nn.Linear`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import RowParallelLinear
    >>> def fn(rank):
    ...     layer = RowParallelLinear(3, 2)
    ...     return layer.weight.shape, layer(torch.ones(4, 2 - rank)).shape
    >>> varcomm.launch(fn, 2)
    [(torch.Size([2, 2]), torch.Size([4, 2])), (torch.Size([2, 1]), torch.Size([4, 2]))]
    """

    _options = {"use_fp32": FLAG, "input_is_parallel": FLAG}  # noqa: RUF012
    _dim = 1

    input_is_parallel: bool

    def forward(self, x: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Return the outputs, or the rank's part; `sequence_sizes` overrides the layer's sizes."""
        if not self.input_is_parallel:
            x, pg = self.spec.by_rank(x, -1), self.group.process_group
            x = scatter_to_tensor_model_parallel_region(x, self.spec.sizes, -1, pg)
        elif x.shape[-1:] == (self.in_features,) != (self.spec.local,):
            with checking("RowParallelLinear", self.group) as where:
                raise ArgumentError(
                    f"{where}x has all {self.in_features} features; this rank has "
                    f"{self.spec.local} of them ({self.spec.sizes}). Pass the outputs of a "
                    "column-parallel layer, or make this layer with input_is_parallel=False."
                )
        return row_parallel_linear(x, self.weight, self.bias, **self._call_options(sequence_sizes))
