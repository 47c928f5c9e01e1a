"""Activation checkpointing: compute activations again in backward instead of keeping them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from varcomm._torch_private import version_of
from varcomm.errors import ArgumentError
from varcomm.ops.compilation import uncompiled
from varcomm.tensor_parallel.random import Replay

T = TypeVar("T")
Outputs = TypeVar("Outputs", bound="Tensor | tuple[Tensor, ...]")

_CALLS = "a checkpoint runs calls again, not a graph; compile inside of it"


@uncompiled(_CALLS)
def checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function`, keep only its arguments, and run it again in backward.

    Blocks of :meth:`RandomStreams.fork` draw the same numbers in both runs.

    Parameters
    ----------
    function : callable
        A function with the same operations in each call, collectives included. In backward, it
        runs to its end on every rank.
    *args, **kwargs
        Arguments of `function`. The first must not be a bool, because Megatron-Core has a bool
        there for ``distribute_saved_activations``; pass a flag by keyword.

    Returns
    -------
    object
        The result of `function`.

    Raises
    ------
    ArgumentError
        If the first of `args` is a bool.

    See Also
    --------
    CheckpointWithoutOutput, RandomStreams

    Notes
    -----
    In one process: ``torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)``.

    To keep ``1 / P`` of a replicated argument `x` per rank, checkpoint ``lambda piece:
    function(gather_split_1d_tensor(piece, x.numel()).view(x.shape))`` with
    ``split_tensor_into_1d_equal_chunks(x)``.

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
    ...     y = checkpoint(block, x)
    ...     y.sum().backward()
    ...     return torch.equal(x.grad, y.detach())
    >>> varcomm.launch(fn, 2)
    [True, True]
    """
    if args and isinstance(args[0], bool):
        raise ArgumentError(
            f"checkpoint: the first argument of function is {args[0]}, as Megatron-Core passes "
            "distribute_saved_activations. Leave it out: checkpoint(function, *args). Pass a flag "
            "of your function by keyword."
        )
    return _checkpointed(function, *args, **kwargs)


def _checkpointed(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    run = Replay().around(lambda *own: function(*own, **kwargs))
    # torch would stop at the last tensor that is needed, maybe before a collective
    return torch_checkpoint(run, *args, use_reentrant=False, early_stop=False)  # type: ignore[no-any-return]


class CheckpointWithoutOutput:
    """Drop the output of a function, and compute it again when a gradient needs it.

    The block contains a function that is cheap to compute, such as a norm, and the users of its
    output. Operations inside the block do not keep the output or its views; the first gradient
    that needs them runs the function again. If code outside the block uses the output, the output
    is kept. Streams, collectives and derivatives work as in :func:`checkpoint`.

    Without a ``with`` block, as in Megatron-Core, :meth:`checkpoint` begins the block and
    :meth:`discard_output_and_register_recompute` ends it; if the code in between raises, the block
    stays open.

    See Also
    --------
    checkpoint, RandomStreams

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
        self._in_block = False
        self._hooks = _hooks_of_notes(self._pack)

    def __enter__(self) -> Self:
        if self._runs is not None:
            raise ArgumentError("CheckpointWithoutOutput: the block is open. Make another object.")
        self._begin()
        self._in_block = True
        return self

    def _begin(self) -> None:
        self._runs = []
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._runs, self._in_block = None, False

    @uncompiled(_CALLS)
    def checkpoint(self, function: Callable[..., Outputs], *args: Any, **kwargs: Any) -> Outputs:
        """Call a function; operations in this block do not keep its output.

        `function` returns a tensor or a tuple of tensors and does the same each time; its arguments
        are kept. If no block is open, all operations up to
        :meth:`discard_output_and_register_recompute` are the block.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        began = self._runs is None
        if began:
            self._begin()
        try:
            return self._recorded(function, *args, **kwargs)
        except BaseException:
            if began:
                self.__exit__(None, None, None)
            raise

    def _recorded(self, function: Callable[..., Outputs], *args: Any, **kwargs: Any) -> Outputs:
        run = _Run()
        known = weakref.ref(run)  # the run owns the graph, which owns the function below

        def recorded(*args: Any) -> tuple[Outputs, Tensor]:
            result = function(*args, **kwargs)
            if (own := known()) is not None:
                own.computed(_listed(result))
            return result, _kept(torch.empty(0, device="cpu"))

        result, run.anchor = _checkpointed(recorded, *args)
        run.outputs = [(weakref.ref(x), version_of(x)) for x in _listed(result)]
        if self._runs is not None:
            self._runs.append(run)
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """End the block that :meth:`checkpoint` began; call it after the users of the output.

        `hook_tensor` is the last result of these users, as in Megatron-Core; here any gradient that
        needs the output runs the function again. ArgumentError inside a ``with`` block, and if
        :meth:`checkpoint` was not called before.
        """
        if not torch.is_grad_enabled() and self._runs is None:
            return
        if self._in_block or self._runs is None or not isinstance(hook_tensor, Tensor):
            raise ArgumentError(
                "CheckpointWithoutOutput.discard_output_and_register_recompute ends the block that "
                "checkpoint() begins without a with statement, and gets a tensor. Call checkpoint "
                "before; inside a with block, leave this call out."
            )
        self.__exit__(None, None, None)

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        for run in self._runs or ():
            if note := run.note(x):
                return note
        # kept as without this block: by the hooks around it, with torch's own checks
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
            if output is None or (x.dtype, version_of(x)) != (output.dtype, version):
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
