"""Work that goes on beside what is computed: a stream of its own on a GPU, nothing on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """Where gradients are packed and summed while backward goes on.

    Parameters
    ----------
    device : torch.device
        Of the gradients. On the CPU everything here does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run what is inside there, after what the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep memory of other streams' tensors from being used again before this one is done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
