"""A checkpoint of which not even the output is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from varcomm.errors import ArgumentError
from varcomm.ops.autograd import uncompiled
from varcomm.tensor_parallel.checkpoint import run_again_in_backward

__all__ = ["CheckpointWithoutOutput"]

T = TypeVar("T", bound="torch.Tensor | tuple[torch.Tensor, ...]")

_NAME = "CheckpointWithoutOutput"

_CALLS = "what is computed again in backward are calls, not a graph; compile inside of it"

# torch's number where none is under way, and somebody looks at what the graph has kept.
_NO_BACKWARD = -1


class CheckpointWithoutOutput:
    """Keep not even the output of a function: it is computed again when a gradient needs it.

    An activation that is cheap to compute and that a matrix product keeps for the gradient of its
    weight (a norm before a linear, an activation function between two) need not stay in memory.
    Surround the function and those who use its output::

        with CheckpointWithoutOutput() as keep:
            hidden = keep.checkpoint(norm, x)
            y = linear(hidden)
        del hidden

    Whatever is kept for backward inside the block and is the output, or a view of it, is replaced
    by a note, so the memory is free when no variable refers to the output any more. The first
    gradient that needs it runs the function again, once a backward; the gradients of the function
    itself come from the same run. To use the output outside of the block is right as well, and
    keeps it.

    Several functions may be called in one block, also on outputs of others. The rest is as for
    :func:`checkpoint`: streams, collectives, derivatives of any order, checkpoints around.

    Raises
    ------
    ArgumentError
        If the block is entered twice, or :meth:`checkpoint` is called outside of it.

    Notes
    -----
    Others free the memory under the tensors that share it and fill it again when a gradient
    arrives. Who reads such a tensor too early ends the process, or reads what is not its own.

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

    @uncompiled(_CALLS)
    def __init__(self) -> None:
        self._outputs: list[_Output] | None = None
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        if self._outputs is not None:
            raise ArgumentError(f"{_NAME}: this block is under way. Make one for each.")
        self._outputs = []
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        self._outputs = None

    @uncompiled(_CALLS)
    def checkpoint(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function whose output others in this block are not to keep.

        Parameters
        ----------
        function : callable
            Returns a tensor or a tuple of tensors, and does the same each time it is called.
        *args, **kwargs
            What it is called with. They are kept.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            What `function` returns.

        Raises
        ------
        ArgumentError
            Outside of the block, and if `function` returns something else. In backward, if its
            output has another layout when it is run again.
        """
        if self._outputs is None:
            raise ArgumentError(
                f"{_NAME}.checkpoint: called outside of its block, where those who use the output "
                "would keep it. Call it, and them, inside."
            )
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run = _Run()
        known = weakref.ref(run)  # it owns a node of the graph, which owns the function below

        def recorded(*args: Any) -> tuple[T, torch.Tensor]:
            result = function(*args, **kwargs)
            if (own := known()) is not None:
                own.computed(result)
            return result, _kept(torch.empty(0, device="cpu"))

        result, anchor = run_again_in_backward(recorded, args)
        run.anchor = anchor
        for index, output in enumerate(_tensors(result)):
            self._outputs.append(_Output(run, index, output))
            if output.grad_fn is not None:
                output.register_hook(_Forget(known, index))
        return result

    def _pack(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        for output in self._outputs or ():
            if output.covers(x):
                return output.note(x)
        # keep it as if this block were not there: by the hooks around it, or torch's own checks
        self._hooks.__exit__()
        try:
            kept = _kept(x.detach())
        finally:
            self._hooks.__enter__()
        return lambda: kept.grad_fn.saved_tensors[0]  # type: ignore[union-attr]


def _unpack(noted: Callable[[], torch.Tensor]) -> torch.Tensor:
    return noted()


class _Output:
    """An output, told by the memory that it has, which is not kept."""

    def __init__(self, run: _Run, index: int, output: torch.Tensor) -> None:
        self._run, self._index = run, index
        # while this is here, no other memory gets the same number
        self._memory = StorageWeakRef(output.untyped_storage())
        self._dtype, self._version = output.dtype, output._version

    def covers(self, x: torch.Tensor) -> bool:
        """Tell whether `x` is a view of the output, as it was computed."""
        return (
            x.layout == torch.strided
            and x.untyped_storage()._cdata == self._memory.cdata
            and x.dtype == self._dtype
            and x._version == self._version
            and not (x.is_conj() or x.is_neg())
        )

    def note(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what gives `x` back, from the next run."""
        run, index = self._run, self._index
        view = x.shape, x.stride(), x.storage_offset()
        return lambda: run.output(index).as_strided(*view)


class _Run:
    """What a function computes when it is run again in a backward.

    The notes own it, and it owns, by a node of the graph, all that torch's checkpoint has kept.
    """

    # Its node, asked for what it has saved, lets torch's checkpoint run the function. Before torch
    # 2.13, a node is gone with its tensor, whoever else holds it.
    anchor: Any

    def __init__(self) -> None:
        self._layouts: list[tuple[object, ...]] | None = None
        # of each backward that is under way; None for an output whose gradient is complete
        self._found: dict[int, dict[int, torch.Tensor | None]] = {}

    def computed(self, result: object) -> None:
        """Take the outputs of a run; of the first only what they look like."""
        outputs = _tensors(result)
        layouts: list[tuple[object, ...]] = [
            (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in outputs
        ]
        if self._layouts is None:
            self._layouts = layouts
            return
        if layouts != self._layouts:
            raise ArgumentError(
                f"{_NAME}: the function's output was {self._layouts} (shape, strides, offset, "
                f"dtype, device), and {layouts} when it was run again. It must do the same each "
                "time."
            )
        found = self._in_this_backward()
        for index, output in enumerate(outputs):
            found.setdefault(index, output.detach())

    def output(self, index: int) -> torch.Tensor:
        """Return an output in a backward."""
        found = self._in_this_backward()
        if index not in found:
            _ = self.anchor.grad_fn.saved_tensors
        output = found[index]
        self._end(_NO_BACKWARD)
        if output is None:
            raise ArgumentError(
                f"{_NAME}: the output is needed after its gradient is complete. Only a function on "
                "another device, to which its gradient does not go, can be as late. Call that "
                "outside of the block."
            )
        return output

    def forget(self, index: int) -> None:
        """Let go of an output, since all who need it in this backward have had it.

        A device's thread runs nodes in the reverse order of their recording.
        """
        self._in_this_backward()[index] = None

    def _in_this_backward(self) -> dict[int, torch.Tensor | None]:
        task = torch._C._current_graph_task_id()
        if task not in self._found:
            self._found[task] = {}
            if task != _NO_BACKWARD:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: self._end(task))
        return self._found[task]

    def _end(self, task: int) -> None:
        self._found.pop(task, None)


class _Forget:
    """A hook of an output, which must not own the run."""

    def __init__(self, known: weakref.ref[_Run], index: int) -> None:
        self._known, self._index = known, index

    def __call__(self, gradient: torch.Tensor) -> None:
        if (run := self._known()) is not None:
            run.forget(self._index)


class _Kept(torch.autograd.Function):
    """A node that keeps a tensor, and is no part of any backward."""

    @staticmethod
    def forward(leaf: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose node in the graph keeps `x`."""
    with torch.enable_grad():
        leaf = torch.empty(0, device="cpu", requires_grad=True)
        return _Kept.apply(leaf, [x])  # type: ignore[no-any-return, no-untyped-call]


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise ArgumentError(
                f"{_NAME}: the function must return a tensor or a tuple of tensors; got "
                f"{type(output).__name__}."
            )
    return outputs
