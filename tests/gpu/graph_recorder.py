"""A stand-in for CUDA graphs on pretended tensors: it records operators, and repeats them.

It replaces the functions of torch.cuda that ``varcomm.capture`` calls. A captured run is recorded
operator by operator and message by message; a replay repeats them on the same memory, and calls no
Python code of the step. As CUDA does, it refuses looks at values in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.pretended import Pretended, _recorders, plain
from tests.transport import strict_nccl
from varcomm.transport.engines import nccl

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
FAILED_BEFORE = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    """A stand-in for torch.cuda.CUDAGraph."""

    def __init__(self, log: list[str]) -> None:
        self.calls: list[Callable[[], object]] = []
        self._log = log

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()

    def reset(self) -> None:
        self._log.append("reset")
        self.calls = []


class Stream:
    """A stand-in for torch.cuda.Stream."""

    def __init__(self, log: list[str], name: str = "side") -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class _Recorder(TorchDispatchMode):
    """Records operators on the GPU; a replay repeats no others.

    The captured run needs results here, but it changes no memory that was there before.
    """

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()
        self._calls = calls
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for memory, before in self._before.values():
            memory.copy_(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs[argument.name]
                self._keep(x for x in tree_leaves(written) if isinstance(x, Pretended))
        out = func(*args, **kwargs)
        if any(isinstance(x, Pretended) for x in tree_leaves((args, kwargs, out))):
            self._calls.append(partial(_repeat, func, args, kwargs, out))
        return out

    def _keep(self, written: Iterable[Tensor]) -> None:
        for x in written:
            memory = plain(x).untyped_storage()
            if memory.data_ptr() not in self._before:
                self._before[memory.data_ptr()] = memory, memory.clone()


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Run an operator, and write its results where those of the captured run were."""
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            plain(old).copy_(plain(new))


class _Work:
    """Messages in flight; their start and their wait are recorded."""

    def __init__(self, calls: list[Callable[[], object]], start: Callable[[], Any]) -> None:
        self._calls, self._start = calls, start
        calls.append(self._again)
        self._again()

    def _again(self) -> None:
        self._work = self._start()

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        self._calls.append(lambda: self._work.wait())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def _no_looks() -> Iterator[list[str]]:
    """Raise at a look at values, and return the list of looks."""
    seen: list[str] = []

    def refuse(look: str) -> None:
        seen.append(look)
        raise RuntimeError(f"{NOT_PERMITTED} ({look})")

    _recorders.append(refuse)
    try:
        yield seen
    finally:
        _recorders.remove(refuse)


def _recorded(calls: list[Callable[[], object]], function: Callable[..., Any]) -> Any:
    return lambda *args, **kwargs: _Work(calls, partial(function, *args, **kwargs))


@contextmanager
def cuda_graphs() -> Iterator[list[str]]:
    """Serve CUDA graphs by recorders, and return the log of what a capture does in which order."""
    log: list[str] = []
    streams = [Stream(log, "current")]

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        before = len(streams)
        streams.append(entered)
        try:
            yield
        finally:
            del streams[before:]

    @contextmanager
    def graph(captured: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        log.append(f"begin on {stream.name}, {capture_error_mode}")
        with ExitStack() as stack:
            seen = stack.enter_context(_no_looks())
            stack.enter_context(strict_nccl.capturing())
            if nccl.dist is not torch.distributed:
                functions = {k: _recorded(captured.calls, f) for k, f in vars(nccl.dist).items()}
                stack.enter_context(mock.patch.multiple(nccl.dist, **functions))
                single = _recorded(captured.calls, nccl._all_gather_single)
                stack.enter_context(mock.patch.object(nccl, "_all_gather_single", single))
            is_capturing = {"is_current_stream_capturing": lambda: True}
            stack.enter_context(mock.patch.multiple(torch.cuda, **is_capturing))
            stack.enter_context(_Recorder(captured.calls))
            streams.append(stream)  # torch leaves it in place after a failed capture
            try:
                yield
            finally:
                log.append("end")
                if seen:
                    raise RuntimeError(FAILED_BEFORE)
        streams.pop()

    replaced = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "Stream": partial(Stream, log),
        "stream": stream,
        "current_stream": lambda: streams[-1],
        "CUDAGraph": partial(Graph, log),
        "graph": graph,
    }
    with mock.patch.multiple(torch.cuda, **replaced):
        yield log
