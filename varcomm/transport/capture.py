"""Training steps in CUDA graphs: :func:`capture`, and the step that it returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch

from varcomm.errors import ArgumentError, GroupError, VarcommError, at_least
from varcomm.transport.agreement import agree
from varcomm.transport.debug import debugging
from varcomm.transport.engine import Route, recording
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import GroupLike, resolve

T = TypeVar("T")


class CapturedStep(Generic[T]):
    """A training step in a CUDA graph.

    Attributes
    ----------
    outputs : object
        The result of the captured run. Each replay overwrites its tensors.

    See Also
    --------
    capture, Handle

    Examples
    --------
    >>> import torch, varcomm
    >>> x = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    >>> def step():
    ...     return x * 2
    >>> run = varcomm.capture(step).replay if x.is_cuda else step
    >>> run().tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(self, cuda_graph: torch.cuda.CUDAGraph, step: Callable[[], T], outputs: T) -> None:
        self.outputs = outputs
        self._graph = cuda_graph
        self._step = step  # whose tensors the graph reads and writes

    def replay(self) -> T:
        """Run the captured step on the current stream, and return `outputs`."""
        self._graph.replay()
        return self.outputs

    def reset(self) -> None:
        """Delete the graph. Call it before ``torch.distributed.destroy_process_group``."""
        self._graph.reset()


def capture(step: Callable[[], T], warmup: int = 3, group: GroupLike = None) -> CapturedStep[T]:
    """Capture a training step in a CUDA graph, which repeats it at the cost of one launch.

    The call runs `step` `warmup` times, which makes communicators, plans and optimizer states, and
    records the next run. Each replay repeats the recorded kernels and messages on the same memory:
    write new data into the tensors that the step reads. All ranks replay equally often.

    Parameters
    ----------
    step : callable
        Function without arguments: forward, backward, sum of gradients, optimizer. It reads no
        values of tensors and creates no plan or partition. Return ``loss.detach()`` rather than
        the loss, which keeps its graph of autograd in memory.
    warmup : int
        Runs before the captured run; at least 1. They update parameters as any step does.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that capture the step, by default all.

    Returns
    -------
    CapturedStep
        The step with its `outputs`, which are empty before the first ``replay()``.

    Raises
    ------
    ArgumentError
        If `step` cannot be captured, because it reads values or copies tensors from the CPU; or
        inside :func:`debug`. All ranks raise the error.
    DisagreementError
        If ranks have different values of `warmup`.
    GroupError
        If torch finds no GPU, or a collective of the step moves CPU tensors or uses another engine
        than NCCL. All ranks raise the error.

    See Also
    --------
    CapturedStep, debug, trace

    Notes
    -----
    Communication: three agreements, and the calls of each run of the step.

    In one process: captured in the same way; collectives are copies.

    Examples
    --------
    >>> import torch, varcomm
    >>> x = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    >>> def step():
    ...     return x * 2
    >>> run = varcomm.capture(step).replay if x.is_cuda else step
    >>> run().tolist()
    [2.0, 2.0, 2.0]
    """
    ranks = resolve(group)
    runs = at_least(1, warmup, "warmup")
    what = f"capture(warmup={runs})"
    agree(what, _require_gpu, ranks)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Also the stream of the capture, so that gradients are accumulated on one stream. The block
    # restores the caller's stream after a failed capture, which torch does not.
    with torch.cuda.stream(side):
        agree(what, partial(_run, step, runs), ranks)
        captured = agree(what, partial(_captured, step, side), ranks)
    torch.cuda.current_stream().wait_stream(side)
    resolve(None).captured.add(captured)
    return captured


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise GroupError(
            "torch finds no GPU on this rank, and a CUDA graph needs one. Call the step itself."
        )
    if debugging():
        raise ArgumentError(
            "inside varcomm.debug() ranks compare each call on the CPU, which a CUDA graph cannot "
            "repeat. Capture outside the block, and unset VARCOMM_DEBUG."
        )


def _run(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _require_graphs(name: str, route: Route, device: torch.device) -> None:
    """Raise GroupError for a call that a CUDA graph cannot repeat."""
    if device.type != "cuda":
        moves = f"on the {device.type}"
    elif route.group.size > 1 and not engine_for(route.group, device).in_cuda_graphs:
        moves = f"on the GPU with {route.group.backends()[device.type]}, through the CPU"
    else:
        return
    raise GroupError(
        f"{name} moves tensors {moves}, and a CUDA graph repeats only work on the GPU. Use NCCL, "
        "and keep the tensors of the step on the GPU."
    )


def _captured(step: Callable[[], T], stream: torch.cuda.Stream) -> CapturedStep[T]:
    graph, errors = torch.cuda.CUDAGraph(), list[Exception]()
    try:
        # NCCL's watchdog queries events in a thread of its own, which "global" refuses.
        with (
            recording(_require_graphs),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                outputs = step()
            except Exception as error:
                errors.append(error)  # the end of the capture raises another error
                raise
    except Exception as error:
        first = errors[0] if errors else error
        if isinstance(first, VarcommError):
            raise first from None
        raise ArgumentError(
            f"the step cannot be captured: {str(first).partition(chr(10))[0]}. A step must not "
            "read values of tensors (item, tolist, print, a mask as an index), copy from the CPU, "
            "or create a plan. See docs/how_to/capture_a_step.md."
        ) from first
    return CapturedStep(graph, step, outputs)
