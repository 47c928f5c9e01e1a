"""Compute activations again in backward, rather than keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.autograd import uncompiled
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.ops.operator import checking
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.random import Replay
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["checkpoint", "run_again_in_backward"]

T = TypeVar("T")


@uncompiled("what is computed again in backward are calls, not a graph; compile inside of it")
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    distribute_saved_activations: bool = False,
    group: GroupLike = None,
    **kwargs: Any,
) -> T:
    """Call `function`, and keep for backward only its arguments; it is run again there.

    This is torch's non-reentrant checkpoint, where dropout in blocks of
    :meth:`RandomStreams.fork` is the same in both runs as well. Nothing is to be passed for that.

    Parameters
    ----------
    function : callable
        Does the same each time it is called, collectives included.
    *args, **kwargs
        What it is called with.
    distribute_saved_activations : bool
        Assume that the first argument, a tensor, is replicated, and keep a balanced ``1 / P`` of
        its elements on each rank, a copy. They are gathered before `function` is run again.
    group : ProcessGroup or DeviceMesh, optional
        The ranks among which it is distributed; None is the whole world. Not used otherwise.

    Returns
    -------
    object
        What `function` returns. Derivatives of any order are those without a checkpoint.

    Raises
    ------
    ArgumentError
        If the first argument is to be distributed and is no dense tensor, or `function` forks other
        streams when it is run again. What else torch's checkpoint finds to differ between runs
        raises its own CheckpointError.

    Notes
    -----
    Communication: none in forward, beside what `function` does; with
    `distribute_saved_activations` each backward begins with :func:`varcomm.all_gather_v` of the
    pieces, in which each rank receives every other piece once. What `function` exchanges is
    exchanged again.

    `function` is run again to its end. torch would stop at the last tensor that is needed, and
    ranks that keep other tensors would stop before a collective where others wait for them.

    Method: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016;
    the distribution is that of Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022.

    In one process: ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import RandomStreams, checkpoint
    >>> def fn(rank):
    ...     streams = RandomStreams(7)
    ...     def block(x):
    ...         with streams.fork("sharded"):
    ...             return torch.nn.functional.dropout(x.exp(), 0.5)
    ...     x = torch.ones(5, requires_grad=True)
    ...     y = checkpoint(block, x, distribute_saved_activations=True)
    ...     y.sum().backward()
    ...     return torch.equal(x.grad, y.detach())
    >>> varcomm.launch(fn, 2)
    [True, True]
    """
    checked_flag(distribute_saved_activations, "distribute_saved_activations", "checkpoint: ")
    ranks = resolve(group) if distribute_saved_activations else None
    if ranks is not None:
        with checking("checkpoint", ranks) as where:
            checked_tensor(args[0] if args else None, where, "the first argument")
    if ranks is None or ranks.size == 1 or not torch.is_grad_enabled():
        return run_again_in_backward(lambda *own: function(*own, **kwargs), args)
    whole, *others = args
    piece = _Piece(whole, ranks)
    whole_at_first = [whole]  # no argument, which would be kept

    def run(values: torch.Tensor, *others: Any) -> T:
        x = whole_at_first.pop() if whole_at_first else piece.gathered(values)
        return function(x, *others, **kwargs)

    return run_again_in_backward(run, (piece.taken(whole), *others))


def run_again_in_backward(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Apply torch's checkpoint to what draws from streams."""
    replay = Replay()

    def run(*args: Any) -> T:
        with replay.run(), set_checkpoint_early_stop(False):
            return function(*args)

    with set_checkpoint_early_stop(False):
        return torch_checkpoint(run, *args, use_reentrant=False)  # type: ignore[no-any-return]


class _Piece:
    """What a rank keeps of a replicated tensor: elements in logical order, and the way back."""

    def __init__(self, whole: torch.Tensor, group: Group) -> None:
        self._sizes = ShardSizes.balanced(whole.numel(), group.size)
        self._group = group
        self._requires_grad = whole.requires_grad
        # with the strides of `whole`, where it has no gaps
        self._like = torch.empty_like(whole, device="meta", requires_grad=False)

    @torch.no_grad()
    def taken(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `whole`, without a copy of others if it is contiguous."""
        mine = self._sizes.range(self._group.rank)
        row = max(1, whole.numel() // max(1, len(whole))) if whole.dim() else 1
        whole = whole if whole.dim() else whole.view(1)
        first, end = mine.start // row, -(-mine.stop // row)
        values = whole[first:end].reshape(-1).narrow(0, mine.start - first * row, len(mine))
        return values.clone()

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor that equals the whole; collective."""
        with torch.no_grad():
            flat = all_gather_v(values, self._sizes, group=self._group.process_group)
            whole = flat.view(self._like.shape)
            if self._like.stride() != whole.stride():
                strided = flat.new_empty_strided(self._like.shape, self._like.stride())
                whole = strided.copy_(whole)
        return whole.requires_grad_(self._requires_grad)
