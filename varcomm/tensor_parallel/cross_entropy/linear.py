"""``linear_cross_entropy``: the loss from hidden states and a sharded head, without the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.autograd import apply
from varcomm.ops.checks import checked_shard
from varcomm.ops.operator import checking
from varcomm.ops.replicated import ReplicatedSum
from varcomm.sizes import exact_int
from varcomm.tensor_parallel.cross_entropy.checks import (
    checked_floats,
    checked_head,
    checked_options,
    checked_targets,
    checked_weights,
    compared,
    known_sizes,
)
from varcomm.tensor_parallel.cross_entropy.loss import Reduction, SmoothOver, Targets
from varcomm.tensor_parallel.cross_entropy.statistics import computed_in
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    sizes: Sequence[int] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    bias: torch.Tensor | None = None,
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    smooth_over: SmoothOver = "all",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Assume that `hidden` and `target` are replicated, and give the loss of a sharded head.

    :func:`vocab_parallel_cross_entropy` of ``hidden @ weight.T + bias``, of which never more exists
    than of a chunk of tokens. The loss is replicated: each rank calls ``backward`` on its own, and
    it counts once.

    Parameters
    ----------
    hidden : torch.Tensor
        ``(*T, H)`` of floats, the same on all ranks; with `sequence_sizes`, this rank's part.
    weight : torch.Tensor
        ``(sizes[rank], H)``: the head's rows for this rank's classes, in the dtype of `hidden`.
    target : torch.Tensor
        ``(*T)`` of int64: the class of each token, of all classes; whole, the same on all ranks,
        also with `sequence_sizes`.
    sizes : sequence of int, optional
        Classes of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a
        round of messages.
    label_smoothing, ignore_index, reduction, z_loss, smooth_over
        As in :func:`vocab_parallel_cross_entropy`.
    class_weight : torch.Tensor, optional
        ``(sum(sizes),)``: a weight for each class, as its `weight`.
    bias : torch.Tensor, optional
        ``(sizes[rank],)``: the head's bias for this rank's classes.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension of `hidden` on each rank, zeros allowed. They are gathered, and
        the gradient is scattered.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    chunk_rows : int, optional
        Tokens whose logits exist together. By default as many as let them take no more memory, by
        the number of their elements, than `hidden` does, or than what keeps a processor busy.

    Returns
    -------
    torch.Tensor
        ``(*T)``, or a scalar, as of :func:`vocab_parallel_cross_entropy`.

    Raises
    ------
    ArgumentError
        Before any data move, if arguments do not fit.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if sizes, options, targets or weights differ.
    GroupError
        If this rank is not in `group`, or the group does not communicate on the tensors' device.

    Notes
    -----
    Communication: one all-gather of three numbers a token. In backward an all-reduce of the
    gradient of `hidden`; with `sequence_sizes` an all-gather of `hidden` before, and a
    reduce-scatter in its place.

    Memory: `hidden` (gathered) and `weight` are kept, and some numbers a token. Beside gradients,
    what is as large as a chunk's logits exists two or three times at once. Backward computes them
    again, so that there are four matrix products in place of three. Derivatives of any order are
    computed in chunks as well. The loss in chunks is that of [1]_.

    Under ``torch.autocast``, `hidden`, `weight` and `bias` are cast as for a linear layer.

    In one process: ``torch.nn.functional.cross_entropy`` of ``torch.nn.functional.linear(hidden,
    weight, bias)``.

    References
    ----------
    .. [1] E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", ICLR 2025.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.cross_entropy import linear_cross_entropy
    >>> def fn(rank):
    ...     sizes = [2, 1]
    ...     head = torch.zeros(sizes[rank], 4)
    ...     return linear_cross_entropy(torch.ones(2, 4), head, torch.tensor([2, 0]), sizes).exp()
    >>> varcomm.launch(fn, 2)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    name, ranks = "linear_cross_entropy", resolve(group)
    with checking(name, ranks) as where:
        options = checked_options(
            where, label_smoothing, ignore_index, reduction, z_loss, smooth_over
        )
        if chunk_rows is not None and (exact_int(chunk_rows) or 0) < 1:
            raise ArgumentError(f"{where}chunk_rows must be a positive int; got {chunk_rows!r}.")
    asked = sizes_of_shard(name, weight, sizes, 0, ranks)
    with checking(name, ranks) as where:
        checked_floats(hidden, where, "hidden", 1)
        checked_head(hidden, weight, bias, where)
        what = f"weight, of shape {tuple(weight.shape)},"
        known = known_sizes(asked, weight.shape[0], what, ranks, where)
        tokens = hidden.shape[:-1]
        if sequence_sizes is not None:
            parts, _ = checked_shard(hidden, sequence_sizes, 0, ranks, where, "sequence_sizes")
            tokens = torch.Size((sum(parts), *tokens[1:]))
        target = checked_targets(target, tokens, hidden.device, known, options, name, ranks)
        checked_weights(class_weight, "class_weight", hidden.device, known, where)
    compared(name, known, options, target, class_weight, ranks)

    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        cast = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    if sequence_sizes is None:
        use = _Use if torch.compiler.is_compiling() else _UseInForwardMode
        hidden = use.apply(hidden, ranks)  # type: ignore[no-untyped-call]
    else:
        hidden = all_gather_v(hidden, parts, 0, group=ranks.process_group)
    targets = Targets(target, known, class_weight, options, computed_in(hidden.dtype), ranks)
    return targets.loss(hidden, weight, bias, None if chunk_rows is None else int(chunk_rows))


class _Use(torch.autograd.Function):
    """Use a replicated value on each rank in another way: ReplicatedUse, without its copy.

    The operator gives what may be written into; this gives a view, which is only read here, and
    which autograd guards. Its gradient depends on the weight, on every rank, so that what sums it
    is recorded on all of them or on none.
    """

    @staticmethod
    def forward(x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return apply(ReplicatedSum(ctx.group, use_fp32=True), gradient), None


class _UseInForwardMode(_Use):
    """The same with what torch.compile does not take."""

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, group: Group) -> tuple[torch.Tensor, int]:
        return _Use.apply(x, group), in_dims[0]  # type: ignore[no-untyped-call]
