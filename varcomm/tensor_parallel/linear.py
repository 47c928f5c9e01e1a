"""Linear layers whose weight is sharded along its outputs (column) or its inputs (row).

Both are one product, ``y = after(before(x) @ weight.T) + bias``. For a column-parallel layer,
`before` uses a replicated input or gathers the parts of a sequence. For a row-parallel layer,
`after` sums the products of all ranks, or sums and scatters them along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.checks import checked_shard, checked_tensor, checked_whole
from varcomm.ops.forward_mode import in_forward_mode
from varcomm.ops.operator import Operator, apply, begin, checking, is_recorded, refuse_vmap
from varcomm.ops.replicated import ReplicatedSum, ReplicatedUse
from varcomm.tensor_parallel.layout import (
    Choices,
    Layout,
    ShardedModule,
    Sizes,
    checked_choice,
)
from varcomm.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linear",
    "row_parallel_linear",
]

Before = ReplicatedUse | AllGatherV

_SAVED = ("input", "gathered")


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    *,
    gather_output: bool = False,
    sequence_sizes: Sequence[int] | None = None,
    save: Literal["input", "gathered"] = "input",
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `x` is replicated or a part of a sequence, and compute this rank's outputs.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, K)``, identical on all ranks; with `sequence_sizes` this rank's part,
        ``(sequence_sizes[rank], *F, K)``.
    weight, bias : torch.Tensor
        This rank's rows of the weight, ``(sizes[rank], K)``, and of the bias, ``(sizes[rank],)`` or
        None.
    sizes : sequence of int, optional
        Outputs per rank; zeros allowed. Used only by `gather_output`; None asks all ranks.
    gather_output : bool
        Return all outputs, replicated.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension of `x` per rank; zeros allowed: sequence parallelism.
    save : {"input", "gathered"}
        Keep this rank's part for backward and gather it again, or keep the gathered input, which
        takes P times the memory. Compiled graphs keep the gathered input.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*F, sizes[rank])``, or ``(sum(sequence_sizes), *F, sizes[rank])``.

    Notes
    -----
    Adjoint: with respect to `x`, :func:`row_parallel_linear` with the transposed weight.

    Communication: with `sequence_sizes` an all-gather of `x`, again in backward with
    ``save="input"``. In backward an all-reduce or reduce-scatter of the gradient of `x`, while that
    of `weight` is computed. Operands without a gradient cause neither.

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
    ranks, flags = resolve(group), {"gather_output": gather_output, "use_fp32": use_fp32}
    with checking("column_parallel_linear", ranks, **flags) as where:
        checked_choice(save, "save", where, _SAVED)
        checked_operands(x, weight, bias, where)
        if sizes is not None:
            checked_shard(weight, sizes, 0, ranks, where)
        sequence = _checked_sequence(x, sequence_sizes, ranks, where)
    x, weight, bias = autocast(x, weight, bias)
    before: Before = ReplicatedUse(ranks, use_fp32)
    length = x.shape[:-1]
    if sequence is not None:
        before = AllGatherV(ranks, _rows_per_rank(sequence, x), 0, use_fp32)
        length = torch.Size((sum(sequence), *x.shape[1:-1]))
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    if torch.compiler.is_compiling():
        y = functional.linear(apply(before, rows), weight, bias)
    else:
        node: Any = _ColumnProduct
        y = node.apply(rows, weight, bias, before, save == "gathered", is_recorded(x))[0]
    y = y.view(*length, weight.shape[0])
    return gather_from_tensor_model_parallel_region(y, sizes, -1, group) if gather_output else y


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    *,
    input_is_parallel: bool = True,
    sequence_sizes: Sequence[int] | None = None,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `x` is sharded along its last dimension, and sum the products of all ranks.

    Parameters
    ----------
    x : torch.Tensor
        Floats ``(*F, sizes[rank])``: this rank's columns of the input, or all columns.
    weight, bias : torch.Tensor
        This rank's columns of the weight, ``(N, sizes[rank])``, and the full bias, ``(N,)``,
        replicated, or None. Its gradient is complete on every rank.
    sizes : sequence of int, optional
        Inputs per rank; zeros allowed. Used only without `input_is_parallel`; None is balanced.
    input_is_parallel : bool
        Whether `x` has this rank's columns only.
    sequence_sizes : sequence of int, optional
        Rows of the output's first dimension per rank; zeros allowed: sequence parallelism.
    use_fp32, group
        As in :func:`column_parallel_linear`.

    Returns
    -------
    torch.Tensor
        ``(*F, N)``, replicated; with `sequence_sizes` this rank's rows.

    Notes
    -----
    Adjoint: with respect to `x`, :func:`column_parallel_linear` with the transposed weight.

    Communication: an all-reduce of the output; with `sequence_sizes` a reduce-scatter, and in
    backward an all-gather, and an all-reduce of the gradient of `bias`. Without
    `input_is_parallel`, backward also gathers the gradient of `x`.

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
    name, ranks = "row_parallel_linear", resolve(group)
    with checking(name, ranks, input_is_parallel=input_is_parallel, use_fp32=use_fp32) as where:
        if sizes is not None:
            checked_shard(weight, sizes, 1, ranks, where)
    if not input_is_parallel:
        x = scatter_to_tensor_model_parallel_region(x, sizes, -1, group)
    with checking(name, ranks) as where:
        checked_operands(x, weight, bias, where)
        sequence = _checked_sequence(x, sequence_sizes, ranks, where, whole=True)
    x, weight, bias = autocast(x, weight, bias)
    y = functional.linear(x.reshape(prod(x.shape[:-1]), x.shape[-1]), weight)
    length = x.shape[:-1]
    if sequence is None:
        y = apply(ReplicatedSum(ranks, use_fp32), y)
    else:
        y = apply(ReduceScatterV(ranks, _rows_per_rank(sequence, x), 0, use_fp32), y)
        length = torch.Size((sequence[ranks.rank], *x.shape[1:-1]))
        if bias is not None:  # each rank adds it to its own rows
            bias = apply(ReplicatedUse(ranks, use_fp32), bias)
    return (y if bias is None else y + bias).view(*length, weight.shape[0])


class _ColumnProduct(torch.autograd.Function):
    """Returns the product, an empty *token*, and the gathered rows if they are kept.

    A derivative that is recorded adds the token, which depends on the operands, to the operands of
    its collectives, so that they are recorded on all ranks or on none.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Before,
        keep: bool,
        recorded: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        gathers = isinstance(before, AllGatherV)
        rows = begin(before, x, recorded).wait() if gathers else x
        token = torch.empty(0, dtype=torch.float32, device=x.device)
        return functional.linear(rows, weight, bias), token, rows if keep and gathers else None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, _, ctx.before, *_ = inputs
        _, token, rows = output
        if rows is not None:
            ctx.mark_non_differentiable(rows)
        of_x, of_weight, ctx.of_bias, *_ = ctx.needs_input_grad
        # nothing is kept for a gradient that is not needed
        kept = (x, rows) if of_weight else (None, None)
        ctx.save_for_backward(*kept, weight if of_x else None, token)
        ctx.save_for_forward(x, weight, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, of_token, _ = gradients
        x, rows, weight, token = ctx.saved_tensors
        recorded, gathers = torch.is_grad_enabled(), isinstance(ctx.before, AllGatherV)

        def begun(operator: Operator, value: Tensor) -> Callable[[], Tensor]:
            if not recorded:
                return begin(operator, value, False).wait
            result = apply(operator, _joined(value, token + of_token))
            return lambda: result

        used = None
        if x is not None and (recorded or (gathers and rows is None)):
            used = begun(ctx.before, x)
        of_rows = None if weight is None else gradient @ weight.conj()
        if used is not None:
            rows = used()
        elif rows is None:
            rows = x
        summed = None if of_rows is None else begun(ctx.before.adjoint, of_rows)
        of_weight = None if rows is None else gradient.T @ rows.conj()
        of_bias = gradient.sum(0) if ctx.of_bias else None
        return None if summed is None else summed(), of_weight, of_bias, None, None, None

    @staticmethod
    @in_forward_mode
    def jvp(ctx: Any, saved: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, *_ = tangents
        x, weight, token = saved
        # ranks communicate identically, whichever tangents exist on this rank
        of_x = torch.zeros_like(x) if of_x is None else of_x
        of_x, x = apply(ctx.before, _joined(torch.stack([of_x, x], 1), token)).unbind(1)
        tangent = of_x @ weight.T
        if of_weight is not None:
            tangent = tangent + x @ of_weight.T
        of_token = tangent.reshape(-1)[:0].real.to(torch.float32)
        return tangent if of_bias is None else tangent + of_bias, of_token, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        refuse_vmap("column_parallel_linear: ")


def _joined(x: Tensor, token: Tensor) -> Tensor:
    """Return the values of `x`, which then depend on `token` as well."""
    return x + token.sum().to(x.dtype)


def checked_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, where: str, name: str = "x"
) -> None:
    """Raise ArgumentError unless ``x @ weight.T + bias`` can be computed; `name` is that of x."""
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
    x: Tensor, sequence_sizes: Sequence[int] | None, group: Group, where: str, whole: bool = False
) -> tuple[int, ...] | None:
    """Return `sequence_sizes` as ints, if `x` has this rank's rows, or all rows if `whole`."""
    if sequence_sizes is None:
        return None
    if x.dim() < 2:
        raise ArgumentError(
            f"{where}with sequence_sizes, x must be (sequence, ..., in); got {tuple(x.shape)}."
        )
    checked = checked_whole if whole else checked_shard
    return checked(x, sequence_sizes, 0, group, where, "sequence_sizes")[0]


def _rows_per_rank(sequence: Sequence[int], x: Tensor) -> tuple[int, ...]:
    """Return the rows of each rank when all dimensions of `x` but the last are flattened."""
    return tuple(size * prod(x.shape[1:-1]) for size in sequence)


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


@dataclass(frozen=True)
class _LinearLayout(Layout):
    bias: bool = True
    use_fp32: bool = True


@dataclass(frozen=True)
class _ColumnLayout(_LinearLayout):
    gather_output: bool = False
    save: str = "input"

    choices: ClassVar[Choices] = {"save": _SAVED}


@dataclass(frozen=True)
class _RowLayout(_LinearLayout):
    input_is_parallel: bool = True


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
        super().__init__()
        layout: Any = self._kind(sizes=sizes, group=group, **{"bias": bias, **options})
        shape = {"out_features": out_features, "in_features": in_features}
        seed = self._agree(layout, shape)
        bound = 1 / sqrt(self.in_features) if self.in_features else 0.0

        def uniform(tile: Tensor, generator: torch.Generator) -> None:
            tile.uniform_(-bound, bound, generator=generator)

        def make() -> None:
            full = self.out_features, self.in_features
            self.weight = layout.draw(full, self.spec, layout.init or uniform, seed)
            self.register_parameter("bias", None)
            if bias:  # from another seed, so that it does not repeat the weight
                spec = self.spec if "bias" in self._sharded else None
                self.bias = layout.draw(full[:1], spec, uniform, seed + 1)

        # a device may be missing or full on one rank, and `init` is the caller's
        agree(type(self).__name__, make, self.group)

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
        linear: nn.Linear = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        for name, own in self.named_parameters(recurse=False):
            whole, values = linear.get_parameter(name), own.detach()
            with torch.no_grad():
                whole.copy_(self.spec.gather(values) if name in self._sharded else values)
            whole.requires_grad_(own.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """Return features and sizes."""
        sizes = [list(block) for block in self.spec.blocks]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sizes={sizes if len(sizes) > 1 else sizes[0]}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are sharded across ranks.

    Parameters
    ----------
    in_features, out_features : int
        Features of the full layer.
    bias : bool
        Whether the layer has a bias, sharded like the outputs.
    sizes : sequence of int, or of such sequences, optional
        Outputs per rank; zeros allowed; None is balanced. For several fused blocks (queries, keys
        and values; gate and up), those of each block: a rank has its part of every block.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    **options
        `gather_output`, `sequence_sizes`, `save` and `use_fp32` as in
        :func:`column_parallel_linear`; `device` and `dtype` of the parameters. ``init(tensor,
        generator)`` draws elements of pieces of the weight in place; None draws as
        :class:`torch.nn.Linear` does.

    Attributes
    ----------
    weight, bias : torch.nn.Parameter or None
        This rank's rows, ``(spec.local, in_features)``, and part, ``(spec.local,)``.
    spec : ShardSpec
        How both are sharded.

    Notes
    -----
    The full weight depends on torch's default generator on the group's first rank, not on the
    number of ranks, and no rank holds it. The constructor is collective: all ranks raise an error
    if arguments are wrong on one of them, or differ.

    Communication: per call as :func:`column_parallel_linear`.

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

    _kind = _ColumnLayout
    _sharded = ("weight", "bias")

    gather_output: bool
    save: Literal["input", "gathered"]

    def forward(self, x: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Return this rank's outputs, or all outputs; see :func:`column_parallel_linear`.

        `sequence_sizes` replace the layer's own in this call.
        """
        y = column_parallel_linear(
            x,
            self.weight,
            self.bias,
            sequence_sizes=self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            save=self.save,
            use_fp32=self.use_fp32,
            group=self.group.process_group,
        )
        if not self.gather_output:
            return y
        sizes, pg = self.spec.sizes, self.group.process_group
        # in the order of the full layer, which may have several blocks
        return self.spec.ordered(gather_from_tensor_model_parallel_region(y, sizes, -1, pg), -1)


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are sharded across ranks.

    Parameters
    ----------
    in_features, out_features : int
        Features of the full layer.
    bias : bool
        Whether the layer has a bias: replicated, with a gradient that is complete on every rank.
    sizes : sequence of int, or of such sequences, optional
        Inputs per rank, of each fused block; zeros allowed; None is balanced.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    **options
        `input_is_parallel`, `sequence_sizes` and `use_fp32` as in :func:`row_parallel_linear`, and
        others of :class:`ColumnParallelLinear`, whose example has both layers.

    Attributes
    ----------
    weight, bias : torch.nn.Parameter or None
        This rank's columns, ``(out_features, spec.local)``, and ``(out_features,)``.
    spec : ShardSpec
        How the weight is sharded.

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

    _kind = _RowLayout
    _dim = 1

    input_is_parallel: bool

    def forward(self, x: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Return the outputs, or this rank's part of the sequence; see :func:`row_parallel_linear`.

        `sequence_sizes` replace the layer's own in this call.
        """
        pg = self.group.process_group
        if not self.input_is_parallel:
            with checking("RowParallelLinear", self.group) as where:
                if x.shape[-1:] != (self.in_features,):
                    raise ArgumentError(
                        f"{where}x must have {self.in_features} features; got {tuple(x.shape)}."
                    )
            x = self.spec.by_rank(x, -1)
            x = scatter_to_tensor_model_parallel_region(x, self.spec.sizes, -1, pg)
        return row_parallel_linear(
            x,
            self.weight,
            self.bias,
            sequence_sizes=self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            use_fp32=self.use_fp32,
            group=pg,
        )
