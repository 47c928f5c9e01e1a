"""Activation checkpointing: compute activations again in backward instead of keeping them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.checks import checked_flag, checked_tensor
from varcomm.ops.compilation import uncompiled
from varcomm.ops.operator import checking
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.mappings import split_tensor_into_1d_chunks
from varcomm.tensor_parallel.random import Replay
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["CheckpointWithoutOutput", "checkpoint"]

T = TypeVar("T")
Outputs = TypeVar("Outputs", bound="Tensor | tuple[Tensor, ...]")

_CALLS = "a checkpoint runs calls again, not a graph; compile inside of it"


@uncompiled(_CALLS)
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    distribute_saved_activations: bool = False,
    group: GroupLike = None,
    **kwargs: Any,
) -> T:
    """Call `function`, keep only its arguments, and run it again in backward.

    Blocks of :meth:`RandomStreams.fork` draw the same numbers in both runs.

    Parameters
    ----------
    function : callable
        Does the same each time it is called, collectives included.
    *args, **kwargs
        Arguments of `function`.
    distribute_saved_activations : bool
        Assume that the first argument is a replicated tensor, and keep ``1 / P`` of it per rank.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that share the first argument; None is the whole world.

    Returns
    -------
    object
        The result of `function`.

    Notes
    -----
    Communication: that of `function`, again in backward, to its end on every rank; with
    `distribute_saved_activations` also an all-gather of the pieces.

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
        return _run_again_in_backward(lambda *own: function(*own, **kwargs), args)
    whole, *others = args
    gathered = _gather_of(whole, ranks)
    first = [whole]  # not an argument, which torch's checkpoint would keep

    def run(piece: Tensor, *others: Any) -> T:
        return function(first.pop() if first else gathered(piece), *others, **kwargs)

    with torch.no_grad():
        piece = split_tensor_into_1d_chunks(whole, ranks.process_group)
    return _run_again_in_backward(run, (piece, *others))


def _run_again_in_backward(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call torch's checkpoint on a function that draws from streams."""

    # torch would stop at the last tensor that is needed, maybe before a collective
    def to_the_end(*args: Any) -> T:
        with set_checkpoint_early_stop(False):
            return function(*args)

    with set_checkpoint_early_stop(False):
        run = Replay().around(to_the_end)
        return torch_checkpoint(run, *args, use_reentrant=False)  # type: ignore[no-any-return]


def _gather_of(whole: Tensor, group: Group) -> Callable[[Tensor], Tensor]:
    """Return the function from this rank's piece to a copy of `whole`, which is not kept."""
    sizes, requires_grad = ShardSizes.balanced(whole.numel(), group.size), whole.requires_grad
    like = torch.empty_like(whole, device="meta", requires_grad=False)  # its shape and strides

    def gathered(piece: Tensor) -> Tensor:
        with torch.no_grad():
            flat = all_gather_v(piece, sizes, group=group.process_group).view(like.shape)
            if like.stride() != flat.stride():
                flat = flat.new_empty_strided(like.shape, like.stride()).copy_(flat)
        return flat.requires_grad_(requires_grad)

    return gathered


class CheckpointWithoutOutput:
    """Keep not even a function's output: it is computed again when a gradient needs it.

    Surround a function that is cheap to compute, as a norm, and the users of its output. Operations
    inside the block keep a note in place of the output or a view of it, and the first gradient that
    needs it runs the function again. A use outside the block keeps the output. Streams, collectives
    and derivatives work as in :func:`checkpoint`.

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel import CheckpointWithoutOutput
    >>> x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    >>> with CheckpointWithoutOutput() as keep:
    ...     y = keep.checkpoint(torch.exp, x) * w
    >>> y.sum().backward()
    >>> x.grad
    tensor([2.7183, 2.7183, 2.7183])
    """

    def __init__(self) -> None:
        self._runs: list[_Run] | None = None
        self._hooks = _hooks_of_notes(self._pack)

    def __enter__(self) -> Self:
        if self._runs is not None:
            raise ArgumentError("CheckpointWithoutOutput: the block is open. Make another object.")
        self._runs = []
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._runs = None

    @uncompiled(_CALLS)
    def checkpoint(self, function: Callable[..., Outputs], *args: Any, **kwargs: Any) -> Outputs:
        """Call a function whose output is not kept by other operations in this block.

        `function` returns a tensor or a tuple of tensors and does the same each time; its arguments
        are kept. Raises ArgumentError outside the block.
        """
        if self._runs is None:
            raise ArgumentError(
                "CheckpointWithoutOutput.checkpoint: called outside of its block, where users of "
                "the output would keep it. Call the function and its users inside."
            )
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run = _Run()
        known = weakref.ref(run)  # the run owns the graph, which owns the function below

        def recorded(*args: Any) -> tuple[Outputs, Tensor]:
            result = function(*args, **kwargs)
            if (own := known()) is not None:
                own.computed(_listed(result))
            return result, _kept(torch.empty(0, device="cpu"))

        result, run.anchor = _run_again_in_backward(recorded, args)
        run.outputs = [(weakref.ref(x), x._version) for x in _listed(result)]
        self._runs.append(run)
        return result

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        for run in self._runs or ():
            if note := run.note(x):
                return note
        # kept as outside of this block: by the hooks around it, with torch's own checks
        self._hooks.__exit__()
        try:
            kept = _kept(x.detach())
        finally:
            self._hooks.__enter__()
        return lambda: kept.grad_fn.saved_tensors[0]  # type: ignore[union-attr]


@uncompiled(_CALLS)
def _hooks_of_notes(pack: Callable[[Tensor], Callable[[], Tensor]]) -> saved_tensors_hooks:
    return saved_tensors_hooks(pack, lambda note: note())


class _Run:
    """The runs of a function, owned by the notes of its outputs."""

    # A tensor whose node asks torch's checkpoint for a saved tensor, so that the function runs.
    anchor: Tensor

    def __init__(self) -> None:
        # outputs of the first run, which are not kept, and their versions
        self.outputs: list[tuple[weakref.ref[Tensor], int]] = []
        self._again: list[Tensor] = []  # those of the last run, freed with the notes
        self._layouts: list[tuple[object, ...]] | None = None

    def note(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Return the function that gets `x` back from the next run, if `x` views an output.

        The output is recognised by its memory, and must be unchanged since it was computed.
        """
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            return None
        place = x.untyped_storage().data_ptr()
        for index, (known, version) in enumerate(self.outputs):
            output = known()
            if output is None or (x.dtype, x._version) != (output.dtype, version):
                continue
            if 0 != place == output.untyped_storage().data_ptr():
                view = x.shape, x.stride(), x.storage_offset()
                return lambda: self._output(index).as_strided(*view)
        return None

    def computed(self, outputs: Sequence[Tensor]) -> None:
        """Record the layouts of the first run; keep the outputs of a later run."""
        layouts: list[tuple[object, ...]] = [
            (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in outputs
        ]
        if self._layouts is None:
            self._layouts = layouts
            return
        if layouts != self._layouts:
            raise ArgumentError(
                f"CheckpointWithoutOutput: the output was {self._layouts} (shape, strides, offset, "
                f"dtype, device), and {layouts} when it was run again. It must do the same each "
                "time."
            )
        self._again = [x.detach() for x in outputs]

    def _output(self, index: int) -> Tensor:
        if not self._again:
            _ = self.anchor.grad_fn.saved_tensors  # type: ignore[union-attr]
        return self._again[index]


class _Kept(torch.autograd.Function):
    """A node that keeps a tensor, and takes part in no backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _kept(x: Tensor) -> Tensor:
    """Return an empty tensor whose node in the graph keeps `x`."""
    with torch.enable_grad():
        leaf = torch.empty(0, device="cpu", requires_grad=True)
        return _Kept.apply(leaf, [x])  # type: ignore[no-any-return, no-untyped-call]


def _listed(result: Any) -> Sequence[Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(each, Tensor) for each in found):
        raise ArgumentError(
            "CheckpointWithoutOutput: function must return a tensor or a tuple of tensors; got "
            f"{type(result).__name__}."
        )
    return found
