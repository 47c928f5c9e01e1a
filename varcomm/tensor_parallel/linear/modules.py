"""Modules over the functions: :class:`torch.nn.Linear` with its weight sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.tensor_parallel.initial import Fill
from varcomm.tensor_parallel.linear.functional import column_parallel_linear, row_parallel_linear
from varcomm.tensor_parallel.linear.parallel_linear import ParallelLinear, Sizes
from varcomm.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from varcomm.transport.group import GroupLike

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class ColumnParallelLinear(ParallelLinear):
    """A linear layer of whose outputs each rank computes its own.

    Parameters
    ----------
    in_features, out_features : int
        Of the whole layer.
    bias : bool
        Whether there is one; it is sharded as the outputs are.
    sizes : sequence of int, or of such sequences, optional
        Outputs of each rank, one int a rank, zeros allowed; None is balanced. Of several fused
        blocks (queries, keys and values; gate and up) those of each block: a rank then has its part
        of the first block, of the second, and so on.
    gather_output : bool
        Return all outputs, replicated.
    sequence_sizes : sequence of int, optional
        Rows of the input's first dimension on each rank: sequence parallelism.
    init : callable, optional
        ``init(tensor, generator)`` draws elements of the weight in place, all from the same
        distribution; it is called for pieces. None draws as :class:`torch.nn.Linear` does.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    device, dtype : optional
        Of the parameters.
    skip_bias_add : bool
        Return ``(output, bias)`` and leave the addition to the caller, who fuses it.
    save : {"input", "gathered"}
        What backward keeps in sequence parallelism; see :func:`column_parallel_linear`.
    use_fp32 : bool
        Sum narrow gradients in fp32; see :func:`column_parallel_linear`.
    allocate_weight : bool
        Whether the layer has a weight of its own. Else each call brings one, as tied heads do.

    Attributes
    ----------
    weight : torch.nn.Parameter or None
        This rank's rows, ``(spec.local, in_features)``.
    bias : torch.nn.Parameter or None
        This rank's part, ``(spec.local,)``.
    spec : ShardSpec
        How both are sharded.

    Raises
    ------
    ArgumentError
        On every rank, if arguments are wrong on one of them.
    DisagreementError
        On every rank, if they differ.

    Notes
    -----
    Making one is collective: ranks compare arguments. The whole weight depends on torch's default
    generator on the group's first rank and not on the number of ranks, and no rank holds it.

    Communication: a call, as :func:`column_parallel_linear`; making one, short messages.

    In one process: :class:`torch.nn.Linear`, whose outputs the ranks have.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     up = ColumnParallelLinear(4, 7)
    ...     down = RowParallelLinear(7, 4)
    ...     return up.weight.shape[0], round(down(up(torch.ones(2, 4)).relu()).sum().item(), 4)
    >>> one, two = varcomm.launch(fn, 1), varcomm.launch(fn, 2)
    >>> one[0][1] == two[0][1] == two[1][1], [rows for rows, _ in two]
    (True, [4, 3])
    """

    _dim = 0
    _usual: ClassVar[dict[str, Any]] = {
        "gather_output": False,
        "skip_bias_add": False,
        "save": "input",
        "use_fp32": True,
    }

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sizes: Sizes | None = None,
        gather_output: bool = False,
        sequence_sizes: Sequence[int] | None = None,
        init: Fill | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        skip_bias_add: bool = False,
        save: Literal["input", "gathered"] = "input",
        use_fp32: bool = True,
        allocate_weight: bool = True,
    ) -> None:
        flags = {
            "bias": bias,
            "gather_output": gather_output,
            "skip_bias_add": skip_bias_add,
            "use_fp32": use_fp32,
            "allocate_weight": allocate_weight,
        }
        super().__init__(
            in_features,
            out_features,
            bias,
            sizes,
            sequence_sizes,
            init,
            group,
            device,
            dtype,
            flags,
            {"save": save},
        )
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.save, self.use_fp32 = save, use_fp32

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        gather_output: bool | None = None,
        sequence_sizes: Sequence[int] | None = None,
    ) -> Output:
        """Return this rank's outputs, or all; see :func:`column_parallel_linear`.

        Parameters
        ----------
        x : torch.Tensor
            ``(*F, in_features)``, replicated; in sequence parallelism this rank's part.
        weight : torch.Tensor, optional
            To be used in place of the layer's own, ``(spec.local, in_features)``.
        gather_output, sequence_sizes : optional
            In place of what the layer was made with.

        Returns
        -------
        torch.Tensor, or (torch.Tensor, torch.Tensor or None)
            With `skip_bias_add` the bias as well, gathered if the output is.
        """
        gather = self.gather_output if gather_output is None else gather_output
        with checking(type(self).__name__, self.group, gather_output=gather) as where:
            weight = self._weight(weight, where)
        y = column_parallel_linear(
            x,
            weight,
            None if self.skip_bias_add else self.bias,
            self.spec.sizes,
            sequence_sizes=self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            save=self.save,
            use_fp32=self.use_fp32,
            group=self.group.process_group,
        )
        bias: torch.Tensor | None = self.bias
        if gather:
            y = self._gathered(y)
            bias = bias if bias is None or not self.skip_bias_add else self._gathered(bias)
        return (y, bias) if self.skip_bias_add else y

    def _gathered(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return all outputs, in the order of the whole layer."""
        sizes, pg = self.spec.sizes, self.group.process_group
        return self.spec.ordered(
            gather_from_tensor_model_parallel_region(outputs, sizes, -1, pg), -1
        )


class RowParallelLinear(ParallelLinear):
    """A linear layer of whose inputs each rank has its own.

    Parameters
    ----------
    in_features, out_features : int
        Of the whole layer.
    bias : bool
        Whether there is one; it is replicated, and its gradient is complete on every rank.
    sizes : sequence of int, or of such sequences, optional
        Inputs of each rank, one int a rank, zeros allowed; None is balanced. Of several fused
        blocks those of each block, as in :class:`ColumnParallelLinear`.
    input_is_parallel : bool
        Whether calls bring this rank's inputs; else all of them, replicated.
    sequence_sizes : sequence of int, optional
        Rows of the output's first dimension for each rank: sequence parallelism.
    init, group, device, dtype, skip_bias_add, use_fp32, allocate_weight
        As in :class:`ColumnParallelLinear`.

    Attributes
    ----------
    weight : torch.nn.Parameter or None
        This rank's columns, ``(out_features, spec.local)``.
    bias : torch.nn.Parameter or None
        ``(out_features,)``.
    spec : ShardSpec
        How the weight is sharded.

    Raises
    ------
    ArgumentError
        On every rank, if arguments are wrong on one of them.
    DisagreementError
        On every rank, if they differ.

    Notes
    -----
    Made as :class:`ColumnParallelLinear` is, whose example has one of these as well.

    Communication: a call, as :func:`row_parallel_linear`; making one, short messages.

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

    _dim = 1
    _usual: ClassVar[dict[str, Any]] = {
        "input_is_parallel": True,
        "skip_bias_add": False,
        "use_fp32": True,
    }

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sizes: Sizes | None = None,
        input_is_parallel: bool = True,
        sequence_sizes: Sequence[int] | None = None,
        init: Fill | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        skip_bias_add: bool = False,
        use_fp32: bool = True,
        allocate_weight: bool = True,
    ) -> None:
        flags = {
            "bias": bias,
            "input_is_parallel": input_is_parallel,
            "skip_bias_add": skip_bias_add,
            "use_fp32": use_fp32,
            "allocate_weight": allocate_weight,
        }
        super().__init__(
            in_features,
            out_features,
            bias,
            sizes,
            sequence_sizes,
            init,
            group,
            device,
            dtype,
            flags,
            {},
        )
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.use_fp32 = use_fp32

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        sequence_sizes: Sequence[int] | None = None,
    ) -> Output:
        """Return the outputs, or this rank's part of the sequence; see :func:`row_parallel_linear`.

        Parameters
        ----------
        x : torch.Tensor
            ``(*F, spec.local)``; all inputs unless `input_is_parallel`.
        weight : torch.Tensor, optional
            To be used in place of the layer's own, ``(out_features, spec.local)``.
        sequence_sizes : sequence of int, optional
            In place of what the layer was made with.

        Returns
        -------
        torch.Tensor, or (torch.Tensor, torch.Tensor or None)
            With `skip_bias_add` the bias as well, to be added to the output on each rank.
        """
        with checking(type(self).__name__, self.group) as where:
            weight = self._weight(weight, where)
            if not self.input_is_parallel:
                checked_tensor(x, where, "x")
                if tuple(x.shape[-1:]) != (self.in_features,):
                    raise ArgumentError(
                        f"{where}x must have all {self.in_features} inputs in its last dimension; "
                        f"got shape {tuple(x.shape)}."
                    )
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(
                self.spec.by_rank(x, -1), self.spec.sizes, -1, self.group.process_group
            )
        sequence = self.sequence_sizes if sequence_sizes is None else sequence_sizes
        y = row_parallel_linear(
            x,
            weight,
            None if self.skip_bias_add else self.bias,
            self.spec.sizes,
            sequence_sizes=sequence,
            use_fp32=self.use_fp32,
            group=self.group.process_group,
        )
        if not self.skip_bias_add:
            return y
        if sequence is None or self.bias is None:
            return y, self.bias
        # each rank adds it to its own part, so gradients are to be summed
        return y, copy_to_tensor_model_parallel_region(self.bias, group=self.group.process_group)
