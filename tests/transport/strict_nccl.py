"""A strict stand-in for NCCL, over Gloo: it refuses what NCCL's process group refuses.

It replaces the functions of torch.distributed that ``varcomm/transport/nccl.py`` calls, so the
engine itself runs unchanged. Each communicator has one thread, as NCCL has one stream: calls run in
their order, and the host does not wait. An output holds garbage until ``wait()``. A sent tensor
must not change before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.pretended import plain
from varcomm.transport import auxiliary_group, engine, group, nccl

GARBAGE = 0xFF
LIMIT = 60  # seconds after which a wait without a timeout fails
_CALLS = ("broadcast", "all_to_all_single", "all_gather", "all_gather_single")


class StrictNCCLError(RuntimeError):
    """NCCL or its watchdog would refuse the call, or return other values."""


class Communicator:
    """The calls of this rank in one group: a thread, and a Gloo group of its own."""

    def __init__(self, ranks: group.Group) -> None:
        made = auxiliary_group._made(ranks, "gloo", f"varcomm.strict_nccl.{ranks.name}")()
        self.gloo, self.rank, self.size = made.process_group, made.rank, made.size
        self.thread = ThreadPoolExecutor(1)
        self.calls = 0

    def start(
        self,
        name: str,
        out: Sequence[Tensor],
        data: Tensor,
        counts: Sequence[int],
        root: int,
        move: Callable[[list[Tensor], Tensor], None],
    ) -> Work:
        """Begin a call that receives into `out` and sends ``counts[r]`` bytes to rank r."""
        self.calls += 1
        sent, own = plain(data).clone(), [plain(x) for x in out]
        got = [torch.empty_like(x) for x in own]
        header = [[self.calls, _CALLS.index(name), root, n] for n in counts]

        def run() -> None:
            self._compare(header, [len(x) for x in own])
            move(got, sent)

        future = self.thread.submit(run)
        kept = plain(data)
        for place in own:
            if not _shares(place, kept):
                place.fill_(GARBAGE)
        return Work(name, future, list(zip(own, got, strict=True)), kept, sent)

    def _compare(self, header: list[list[int]], expected: list[int]) -> None:
        """Raise if another rank is in another call, or sends another number of bytes."""
        theirs = torch.empty(self.size, 4, dtype=torch.int64)
        dist.all_to_all_single(theirs, torch.tensor(header), group=self.gloo)
        number, call, root, _ = header[self.rank]
        for rank, (other_number, other, other_root, sent) in enumerate(theirs.tolist()):
            if (other_number, other, other_root) != (number, call, root):
                raise StrictNCCLError(
                    f"call {number} of this communicator is {_CALLS[call]} with root {root} on "
                    f"rank {self.rank}, and {_CALLS[other]} with root {other_root} on rank {rank}"
                )
            if sent != expected[rank % len(expected)]:
                raise StrictNCCLError(
                    f"{_CALLS[call]}: rank {rank} sends {sent} bytes to rank {self.rank}, which "
                    f"expects {expected[rank % len(expected)]}"
                )


class Work:
    """A call in flight, which delivers its output when the caller waits."""

    capturing = False  # whether a CUDA graph is recorded, in which NCCL refuses is_completed()

    def __init__(
        self,
        name: str,
        future: Future[None],
        parts: list[tuple[Tensor, Tensor]],
        data: Tensor,
        sent: Tensor,
    ) -> None:
        self.name, self.future, self.parts = name, future, parts
        self.data, self.sent = data, sent

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the output readable, or raise."""
        try:
            self.future.result(timeout.total_seconds() or LIMIT)
        except TimeoutError:
            raise StrictNCCLError(f"{self.name}: the watchdog ends the process") from None
        parts, self.parts = self.parts, []
        if parts and not torch.equal(self.data, self.sent):
            raise StrictNCCLError(f"{self.name}: the sent tensor changed before wait()")
        for place, values in parts:
            place.copy_(values)
        return True

    def is_completed(self) -> bool:
        """Return whether the call is done; not during a capture."""
        if self.capturing:
            raise StrictNCCLError("is_completed() queries an event, which a capture refuses")
        return self.future.done() and self.wait()


def _shares(place: Tensor, data: Tensor) -> bool:
    """Return whether two tensors share memory."""
    first, other = place.data_ptr(), data.data_ptr()
    return first < other + len(data) and other < first + len(place)


class StrictNCCL:
    """The functions of torch.distributed that the engine calls."""

    def __init__(self, device_types: Sequence[str]) -> None:
        self._device_types = device_types
        self._communicators: dict[str, Communicator] = {}

    def broadcast(
        self, tensor: Tensor, *, group: dist.ProcessGroup, group_src: int, async_op: bool
    ) -> Work:
        """Overwrite the tensor by that of `group_src`."""
        ranks = self._of(group)
        self._check("broadcast", ranks, [tensor], async_op)
        if not 0 <= group_src < ranks.size:
            raise StrictNCCLError(f"broadcast: no rank {group_src} in a group of {ranks.size}")

        def move(got: list[Tensor], sent: Tensor) -> None:
            got[0].copy_(sent)
            dist.broadcast(got[0], group=ranks.gloo, group_src=group_src)

        counts = [len(tensor)] * ranks.size
        work = ranks.start("broadcast", [tensor], tensor, counts, group_src, move)
        if ranks.rank != group_src:  # these bytes are not sent
            plain(tensor).fill_(GARBAGE)
            work.sent = plain(tensor).clone()
        return work

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Work:
        """Send a part of `input` to each rank."""
        ranks = self._of(group)
        self._check("all_to_all_single", ranks, [output, input], async_op)
        for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
            if len(sizes) != ranks.size or min(sizes) < 0 or sum(sizes) != len(tensor):
                raise StrictNCCLError(
                    f"Split sizes doesn't match total dim 0 size: {sizes} of {len(tensor)} bytes, "
                    f"on rank {ranks.rank} of {ranks.size}"
                )
        if _shares(plain(output), plain(input)):
            raise StrictNCCLError("all_to_all_single: output and input share memory")

        def move(got: list[Tensor], sent: Tensor) -> None:
            arrived = torch.cat(got)
            splits = output_split_sizes, input_split_sizes
            dist.all_to_all_single(arrived, sent, *splits, group=ranks.gloo)
            for place, values in zip(got, arrived.split(output_split_sizes), strict=True):
                place.copy_(values)

        parts = output.split(output_split_sizes)
        return ranks.start("all_to_all_single", parts, input, input_split_sizes, 0, move)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Work:
        """Gather the tensors of all ranks, of any sizes."""
        return self._gathered("all_gather", tensor_list, tensor, group, async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> Work:
        """Gather tensors of one size."""
        size = dist.get_world_size(group)
        if len(output) != size * len(input):
            raise StrictNCCLError(f"{len(output)} bytes are not {size} times {len(input)}")
        parts = output.view(size, -1).unbind()
        return self._gathered("all_gather_single", parts, input, group, async_op)

    def _gathered(
        self,
        name: str,
        parts: Sequence[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Work:
        ranks = self._of(group)
        self._check(name, ranks, [*parts, tensor], async_op)
        if len(parts) != ranks.size or len(parts[ranks.rank]) != len(tensor):
            raise StrictNCCLError(f"{name}: {len(parts)} outputs on {ranks.size} ranks")

        def move(got: list[Tensor], sent: Tensor) -> None:
            got[ranks.rank].copy_(sent)
            for src, part in enumerate(got):
                dist.broadcast(part, group=ranks.gloo, group_src=src)

        return ranks.start(name, parts, tensor, [len(tensor)] * ranks.size, 0, move)

    def _check(
        self, name: str, ranks: Communicator, tensors: Sequence[Tensor], async_op: bool
    ) -> None:
        """Raise for tensors that NCCL refuses."""
        for tensor in tensors:
            if tensor.device.type not in self._device_types:
                raise StrictNCCLError(f"{name}: no backend type associated with {tensor.device}")
            if tensor.device != tensors[0].device or tensor.dtype != torch.uint8:
                raise StrictNCCLError(f"{name}: tensors of {tensor.dtype} on {tensor.device}")
            if not tensor.is_contiguous() or tensor.dim() != 1:
                raise StrictNCCLError(f"{name}: Tensors must be contiguous")
        if not async_op:
            raise StrictNCCLError(f"{name}: a call without async_op keeps no temporary alive")

    def _of(self, pg: dist.ProcessGroup) -> Communicator:
        ranks = group.resolve(pg)
        if ranks.name not in self._communicators:
            self._communicators[ranks.name] = Communicator(ranks)
        return self._communicators[ranks.name]


_functions = cache(StrictNCCL)  # a communicator lives as long as the process


@contextmanager
def strict_nccl(device_types: Sequence[str] = ("cpu", "cuda")) -> Iterator[None]:
    """Let groups of Gloo use the engine of NCCL for tensors on these kinds of devices."""
    functions, backends = _functions(tuple(device_types)), group.Group.backends

    def replaced(self: group.Group) -> dict[str, str]:
        found = backends(self)
        ours = dict.fromkeys(device_types, "nccl")
        return found if "fake" in found.values() else found | ours

    with (
        mock.patch.object(nccl, "dist", functions),
        mock.patch.object(nccl, "_all_gather_single", functions.all_gather_single),
        mock.patch.object(group.Group, "backends", replaced),
        mock.patch.dict(engine._SERVED, nccl=tuple(device_types)),
    ):
        _forget_engines()
        try:
            yield
        finally:
            _forget_engines()


def _forget_engines() -> None:
    """Let groups choose their engines again, and drop the calls that are prepared for one."""
    for known in group._groups.values():
        known.engines.clear()
        vars(known).pop("operators", None)
