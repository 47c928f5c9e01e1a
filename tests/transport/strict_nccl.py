"""NCCL's process group for tests: its checks and its rules, with messages over Gloo.

:func:`strict_nccl` puts these functions below ``varcomm/transport/engines/nccl.py``, which runs
unchanged. Other calls of torch.distributed stay as they are.
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu import pretended
from varcomm.transport import group
from varcomm.transport.engine import NO_LIMIT
from varcomm.transport.engines import choose, nccl

GARBAGE = 0xFF  # each byte of an output until `wait()`

# Tags of Gloo's messages: users' are smaller, and those of varcomm's Gloo engine begin at 2 ** 30.
_HEADER, _DATA, _TAGS = 1 << 28, 1 << 29, 1 << 28

_OPERATIONS = ("refused", "broadcast", "all_to_all_single", "all_gather", "all_gather_single")

# as in torch/csrc/distributed/c10d/NCCLUtils.cpp
_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}


class Refused(RuntimeError):
    """NCCL's process group refuses the call on this rank."""


class Misuse(AssertionError):
    """NCCL would hang or return wrong bytes, without an error."""


_state = SimpleNamespace(served=(), capturing=False)  # kinds of devices; of a CUDA graph


@contextmanager
def strict_nccl(device_types: Sequence[str] = ("cpu", "cuda")) -> Iterator[None]:
    """Let the NCCL engine serve tensors on these kinds of devices in all groups of this process.

    It refuses tensors on others.
    """
    backends = group.Group.backends

    def replaced(self: group.Group) -> dict[str, str]:
        found = backends(self)
        simulated = "fake" in found.values()
        return found if simulated else found | dict.fromkeys(device_types, "nccl")

    functions = SimpleNamespace(
        broadcast=broadcast, all_to_all_single=all_to_all_single, all_gather=all_gather
    )
    with (
        mock.patch.object(nccl, "dist", functions),
        mock.patch.object(nccl, "_all_gather_single", all_gather_single),
        mock.patch.object(group.Group, "backends", replaced),
        mock.patch.dict(choose._SERVED, nccl=tuple(device_types)),
        mock.patch.object(_state, "served", tuple(device_types)),
    ):
        _forget_engines()
        try:
            yield
        finally:
            _forget_engines()


def _forget_engines() -> None:
    """Let groups choose their engines again, and drop the calls that are prepared for one.

    Communicators get a device again: each block stands for a process that has one.
    """
    for known in [*group._groups.values()]:
        known.engines.clear()
        known.calls.clear()
    for communicator in _communicators.values():
        communicator.device = None


@contextmanager
def capturing() -> Iterator[None]:
    """Refuse what a CUDA graph cannot capture: tests of completion, and waits of the host."""
    with mock.patch.object(_state, "capturing", True):
        yield


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    call = _Call("broadcast", group, [tensor])
    root = dist.get_group_rank(call.pg, src) if group_src is None else group_src
    with call.checked():
        _require(0 <= root < call.size, f"no rank {root} in a group of {call.size}")
        data, at_root = call.bytes_of(tensor), call.rank == root
        recv = [data if rank == root and not at_root else data[:0] for rank in range(call.size)]
        send = [data if rank != root and at_root else data[:0] for rank in range(call.size)]
    return call.start(data if at_root else data[:0], send, recv, root, async_op)


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    call = _Call("all_to_all_single", group, [output, input])
    with call.checked():
        recv = call.split(output, output_split_sizes, "output")
        send = call.split(input, input_split_sizes, "input")
        _require_apart(call.bytes_of(output), call.bytes_of(input))
    return call.start(call.bytes_of(input), send, recv, -1, async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    call = _Call("all_gather", group, [*tensor_list, tensor])
    with call.checked():
        data, recv = call.bytes_of(tensor), [call.bytes_of(out) for out in tensor_list]
        _require(len(recv) == call.size, f"{len(recv)} outputs for {call.size} ranks")
        _require(
            len(recv[call.rank]) == len(data),
            f"this rank sends {len(data)} bytes, but its output has {len(recv[call.rank])}",
        )
        for rank, piece in enumerate(recv):
            _require_apart(piece, data, in_place=rank == call.rank)
    return call.start(data, [data] * call.size, recv, -1, async_op)


def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    call = _Call("all_gather_single", group, [output_tensor, input_tensor])
    with call.checked():
        out, data = call.bytes_of(output_tensor), call.bytes_of(input_tensor)
        _require(
            len(out) == len(data) * call.size,
            f"the output has {len(out)} bytes, not {call.size} times {len(data)}",
        )
        recv = np.split(out, call.size)
        for rank, piece in enumerate(recv):
            _require_apart(piece, data, in_place=rank == call.rank)
    return call.start(data, [data] * call.size, recv, -1, async_op)


def _require(fulfilled, message):
    if not fulfilled:
        raise Refused(message)


def _require_apart(out, data, in_place=False):
    """NCCL's calls may be in place only where this rank's part is sent from its own output."""
    same = _address(out) == _address(data) and len(out) == len(data)
    if np.may_share_memory(out, data) and not (in_place and same):
        raise Misuse("the output overlaps the sent tensor")


def _address(data):
    return data.__array_interface__["data"][0]


class _Communicator:
    """The calls of one process group on this rank."""

    def __init__(self):
        self.calls = 0
        self.device = None
        self.broken = ""
        self.in_flight = set()  # works, also those that no caller waits for


_communicators: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

# Gloo fails when a message arrives for a buffer that is gone.
_given_up: list = []


class _Call:
    """One call on one communicator: its checks, and its start."""

    def __init__(self, name, group, tensors):
        self.name, self.pg = name, group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.pg), dist.get_world_size(self.pg)
        self.communicator = _communicators.setdefault(self.pg, _Communicator())
        self.communicator.calls += 1
        self.number, self.tensors = self.communicator.calls, tensors
        self.label = f"{name}, call {self.number} of {self.pg.group_name!r} on rank {self.rank}"

    @contextmanager
    def checked(self):
        """Check the tensors, and tell the other ranks if this rank refuses the call."""
        try:
            self._check_tensors()
            yield
        except (Refused, Misuse) as error:
            _Work(self, "refused", [], [], -1)
            self.communicator.broken = self.communicator.broken or str(error)
            raise type(error)(f"{self.label}: {error}") from None

    def _check_tensors(self):
        communicator, first = self.communicator, self.tensors[-1]
        _require(not communicator.broken, f"an earlier call has failed: {communicator.broken}")
        for device in (tensor.device for tensor in self.tensors):
            known = device.type in _state.served
            _require(known, f"a tensor on {device}; NCCL serves {' and '.join(_state.served)}")
        for tensor in self.tensors:
            _require(tensor.device == first.device, f"{tensor.device} beside {first.device}")
            _require(tensor.dtype == first.dtype, f"{tensor.dtype} beside {first.dtype}")
            _require(tensor.dtype in _DTYPES, f"NCCL has no {tensor.dtype}")
            _require(tensor.is_contiguous(), "a tensor is not contiguous")
        known = communicator.device = communicator.device or first.device
        _require(known == first.device, f"{first.device}, but earlier calls were on {known}")

    def bytes_of(self, tensor):
        """Return the memory of a contiguous tensor, by no operator that a transform could see."""
        data = tensor if type(tensor) is Tensor else pretended.plain(tensor)
        memory = ctypes.c_uint8 * (data.numel() * data.element_size())
        return np.frombuffer(memory.from_address(data.data_ptr()), dtype=np.uint8)

    def split(self, tensor, sizes, name):
        """Return the memory of each rank's part, by the checks of torch."""
        rows, data = tensor.shape[0], self.bytes_of(tensor)
        if not sizes:
            _require(rows % self.size == 0, f"dim 0 of the {name} does not divide equally")
            sizes = [rows // self.size] * self.size
        _require(len(sizes) == self.size, f"{len(sizes)} {name} splits for {self.size} ranks")
        _require(min(sizes) >= 0, f"a negative {name} split: {sizes}")
        _require(sum(sizes) == rows, f"{name} splits {sizes} do not sum to dim 0, {rows}")
        width = len(data) // rows if rows else 0
        return np.split(data, np.cumsum(sizes[:-1], dtype=int) * width)

    def start(self, sent, send, recv, root, async_op):
        """Start the call; `sent` is the memory that the caller must not change."""
        work = _Work(self, self.name, send, recv, root, sent)
        if async_op:
            return work
        work.wait()
        return None


class _Work:
    """A call in flight, which delivers its bytes in `wait()`.

    Each rank sends the operation, the root and its counts to each other rank; then its data, with a
    tag that depends on their length, so that no message has another length than expected.
    """

    def __init__(self, call, name, send, recv, root, sent=None):
        self.call, self._recv, self._sent = call, recv, sent
        self._done, self._arrival = False, None
        self._copy = copy = None if sent is None else sent.copy()
        send = [_same_part(piece, sent, copy) for piece in send]
        pg, size, rank = call.pg, call.size, call.rank
        self._headers = np.zeros((size, 2 + 2 * size), dtype=np.int64)
        lengths = [len(piece) for piece in (*send, *recv)] or [0] * (2 * size)
        self._headers[rank] = [_OPERATIONS.index(name), root, *lengths]
        self._header_works, self._works, self._buffers = [], [], []
        for peer in (peer for peer in range(size) if peer != rank):
            for function, part in ((pg.recv, self._headers[peer]), (pg.send, self._headers[rank])):
                self._post(self._header_works, function, part, peer, _HEADER + call.number)
        self._arrived = {}
        for peer, piece in enumerate(recv):
            if not np.may_share_memory(piece, sent):
                piece.fill(GARBAGE)
            if peer == rank:
                self._arrived[peer] = send[peer]
            elif len(piece):
                self._arrived[peer] = np.empty_like(piece)
                self._post(self._works, pg.recv, self._arrived[peer], peer)
        for peer, piece in enumerate(send):
            if peer != rank and len(piece):
                self._post(self._works, pg.send, piece, peer)
        call.communicator.in_flight.add(self)
        call.pg = None  # else a work that no caller waits for keeps its group alive

    def _post(self, works, function, piece, peer, tag=None):
        """Start a message; the tags of data differ by call and length."""
        if tag is None:
            tag = _DATA + (1_000_003 * self.call.number + len(piece)) % _TAGS
        self._buffers.append(torch.from_numpy(piece))
        works.append(function([self._buffers[-1]], peer, tag))

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Deliver the bytes."""
        if _state.capturing and timeout != NO_LIMIT:
            raise Refused(f"{self.call.label}: a wait with a timeout stops the host in a capture")
        if self._done:
            return True
        try:
            if self._arrival is None:
                self._receive(timeout)
            else:
                self._arrival.result(timeout.total_seconds() or None)
            if not np.array_equal(self._sent, self._copy):
                raise Misuse(f"{self.call.label}: the sent tensor has changed before wait()")
        except (RuntimeError, TimeoutError, Misuse) as error:
            self.call.communicator.broken = str(error)
            _given_up.append(self)
            raise
        for peer, piece in enumerate(self._recv):
            if len(piece):
                piece[:] = self._arrived[peer]
        self._done = True
        self.call.communicator.in_flight.discard(self)
        self.call.tensors = self._header_works = self._works = self._buffers = ()
        return True

    def is_completed(self) -> bool:
        """Return whether all messages have arrived; a thread waits for them from now on."""
        if _state.capturing:
            raise Refused(f"{self.call.label}: is_completed() is not permitted in a capture")
        if self._arrival is None and not self._done:
            self._arrival = Future()
            Thread(target=self._arrive, daemon=True).start()
        return self._done or self._arrival.done()

    def _arrive(self):
        try:
            self._arrival.set_result(self._receive(NO_LIMIT))
        except BaseException as error:  # wait() raises it
            self._arrival.set_exception(error)

    def _receive(self, timeout):
        try:
            for work in self._header_works:
                work.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{self.call.label}: a rank has not come: {error}") from error
        self._compare()
        for work in self._works:
            work.wait(timeout)

    def _compare(self):
        """Raise unless all ranks have come with the same operation and matching counts."""
        call, size, headers = self.call, self.call.size, self._headers
        names = [_OPERATIONS[n] for n in headers[:, 0]]
        if "refused" in names:
            raise Misuse(f"{call.label}: rank {names.index('refused')} has refused its call")
        if len({*names}) > 1 or len({*headers[:, 1].tolist()}) > 1:
            calls = [f"{name} of root {headers[rank, 1]}" for rank, name in enumerate(names)]
            raise Misuse(f"{call.label}: ranks call {', '.join(calls)}")
        send, recv = headers[:, 2 : 2 + size], headers[:, 2 + size :].T
        for src, dst in np.argwhere(send != recv):
            raise Misuse(
                f"{call.label}: rank {src} sends {send[src, dst]} bytes to rank {dst}, which "
                f"expects {recv[src, dst]}"
            )


def _same_part(piece, whole, copy):
    """Return the part of `copy` that lies as `piece` does in `whole`."""
    if not len(piece):
        return copy[:0]
    first = _address(piece) - _address(whole)
    return copy[first : first + len(piece)]
