"""``vocab_parallel_cross_entropy``: the loss from logits whose classes are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.operator import checking
from varcomm.tensor_parallel.cross_entropy.checks import (
    checked_floats,
    checked_options,
    checked_targets,
    checked_weights,
    compared,
    known_sizes,
)
from varcomm.tensor_parallel.cross_entropy.loss import Reduction, SmoothOver, Targets
from varcomm.tensor_parallel.cross_entropy.statistics import computed_in
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard
from varcomm.transport.group import GroupLike, resolve

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    sizes: Sequence[int] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    group: GroupLike = None,
    *,
    smooth_over: SmoothOver = "all",
) -> torch.Tensor:
    """Assume that `target` is replicated, and give the loss, replicated: every rank's is the same.

    :func:`torch.nn.functional.cross_entropy` on the logits of all ranks together, side by side.
    Every rank calls ``backward`` on the loss that it gets, or on what all compute alike from it,
    and it counts once.

    Parameters
    ----------
    logits : torch.Tensor
        ``(*T, sizes[rank])``: this rank's classes along the *last* dimension, floats. Not changed.
    target : torch.Tensor
        ``(*T)`` of int64: the class of each token, of all classes; the same on all ranks.
    sizes : sequence of int, optional
        Classes of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a
        round of messages: a rank must know where its classes begin before it can look for targets.
    label_smoothing : float
        In [0, 1): the part of the target's mass that goes to all classes.
    ignore_index : int
        Tokens of this target have loss and gradient 0 and do not count in a mean.
    reduction : {"none", "mean", "sum"}
        The mean is the sum of all tokens' losses over the sum of the weights of their targets. It
        is NaN where all are ignored.
    weight : torch.Tensor, optional
        ``(sum(sizes),)`` of floats: a weight for each class; whole, and the same on all ranks.
    z_loss : float
        Add ``z_loss * logsumexp(logits) ** 2`` to the loss of each token that is not ignored, which
        keeps the logits from drifting [1]_. The weights of classes do not multiply it.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    smooth_over : {"all", "wrong"}
        Whether smoothing gives its mass to all K classes, as torch does, the target included; or
        to the K - 1 others.

    Returns
    -------
    torch.Tensor
        ``(*T)``, or a scalar; the same on all ranks bit for bit. fp32 for logits of fewer bytes,
        else of their dtype.

    Raises
    ------
    ArgumentError
        Before any data move, if arguments do not fit: a last dimension that is not
        ``sizes[rank]``, targets of another dtype or shape, or that are neither a class nor
        `ignore_index`, smoothing outside [0, 1).
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if sizes, options, targets or weights differ.
    GroupError
        If this rank is not in `group`, or the group does not communicate on the logits' device.

    Notes
    -----
    Communication: one all-gather of three numbers a token, of 4 bytes for logits of up to 4 bytes;
    nothing in backward. A second derivative gathers once more.

    Memory: beside logits and their gradient, some numbers a token of each rank, and 4 MiB on a CPU:
    the local statistics and their derivatives, of any order, are computed on chunks of rows.

    Accuracy: logits narrower than 4 bytes are computed in fp32. What travels are differences
    within the shards, so large logits that are nearly equal lose nothing.

    In one process: :func:`torch.nn.functional.cross_entropy` of the logits of all classes, one
    token a row.

    References
    ----------
    .. [1] A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    >>> def fn(rank):
    ...     sizes = [2, 1]
    ...     logits = torch.zeros(2, sizes[rank], requires_grad=True)
    ...     loss = vocab_parallel_cross_entropy(logits, torch.tensor([2, 0]), sizes)
    ...     loss.sum().backward()
    ...     return loss.exp().tolist(), (3 * logits.grad).round().tolist()
    >>> for answer in varcomm.launch(fn, 2):
    ...     print(*answer)
    [3.0, 3.0] [[1.0, 1.0], [-2.0, 1.0]]
    [3.0, 3.0] [[-2.0], [1.0]]
    """
    name, ranks = "vocab_parallel_cross_entropy", resolve(group)
    with checking(name, ranks) as where:
        options = checked_options(
            where, label_smoothing, ignore_index, reduction, z_loss, smooth_over
        )
    asked = sizes_of_shard(name, logits, sizes, -1, ranks)
    with checking(name, ranks) as where:
        checked_floats(logits, where, "logits", 1)
        what = f"the last dimension of logits, of shape {tuple(logits.shape)},"
        known = known_sizes(asked, logits.shape[-1], what, ranks, where)
        target = checked_targets(
            target, logits.shape[:-1], logits.device, known, options, name, ranks
        )
        checked_weights(weight, "weight", logits.device, known, where)
    compared(name, known, options, target, weight, ranks)
    targets = Targets(target, known, weight, options, computed_in(logits.dtype), ranks)
    return targets.loss(logits)
