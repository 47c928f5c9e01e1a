"""The backend "mpi4py" of torch.distributed: all of its calls, for every dtype, by mpi4py.

Data move as bytes; ranks reduce by themselves, in rank order. A group has a communicator of its
own, so that messages of two groups never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from varcomm.transport.mpi import communicators, rounds
from varcomm.transport.mpi.buffers import second_round, users
from varcomm.transport.mpi.progress import all_finished
from varcomm.transport.mpi.work import Message, Steps, Work, joint

__all__ = ["ProcessGroupMPI4Py", "register_backend"]

Tensors: TypeAlias = Sequence[torch.Tensor]

# What torch's classes of options say, each a part of it.
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)
_DEFAULT = SimpleNamespace(rootRank=0, reduceOp=_SUM, timeout=timedelta(-1))

if TYPE_CHECKING:
    # whose stub knows other forms of each call as well, which torch.distributed does not use
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...
else:
    _ProcessGroup = dist.ProcessGroup


def register_backend(name: str) -> None:
    """Make the backend known to torch.distributed, once."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _make, extended_api=True, devices=["cpu", "cuda"])
        # torch 2.15 attaches its flight recorder to each new group of a backend that does not
        # record for itself, and cannot to one that is written in Python.
        recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(name)


def _make(options: Any, _: object) -> ProcessGroupMPI4Py:
    """Make the group that torch.distributed describes; collective over its members."""
    seconds = options.timeout.total_seconds()
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    if ranks:
        communicator = communicators.of_members(ranks, options.group_id, seconds)
    else:
        communicator = communicators.of_world(rank, size, seconds)
    return ProcessGroupMPI4Py(communicator, rank, size, options.timeout, options.group_id)


class ProcessGroupMPI4Py(_ProcessGroup):
    """The ranks of a communicator, as torch.distributed calls them.

    Attributes
    ----------
    communicator : mpi4py.MPI.Intracomm
        Of this group alone. Its errors are raised.
    seconds : float
        Time limit of each wait.
    """

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def __init__(
        self, communicator: MPI.Intracomm, rank: int, size: int, timeout: timedelta, name: str
    ) -> None:
        super().__init__(rank, size)
        self.communicator = communicator
        self.options = SimpleNamespace(_timeout=timeout)
        self.seconds = timeout.total_seconds()
        self._rank, self._size, self._name, self._description = rank, size, name, ""
        self._coalesced: list[Work] | None = None
        self._calls = 0  # that have a second round; the same on all ranks

    # What torch.distributed asks of a group

    def getBackendName(self) -> str:
        """Return the name that the backend is registered by."""
        return "mpi4py"

    def getGroupName(self) -> str:
        """Return the name by which functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Give it that name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return what the user said of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Keep what the user said of the group."""
        self._description = description

    @property
    def group_name(self) -> str:
        """That name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the user said of the group."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, _: torch.device) -> ProcessGroupMPI4Py:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of what is called from now on."""
        self.options._timeout, self.seconds = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Free the communicator, unless something on this rank is still under way."""
        if self.communicator != MPI.COMM_NULL and all_finished():
            self.communicator.Free()

    # Collectives: each on a list of tensors, mostly of one

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Overwrite by what the root has."""
        comm, root = self.communicator, opts.rootRank
        steps = (rounds.broadcast(comm, tensor, root) for tensor in tensors)
        return self._start("broadcast", steps, tensors, opts)

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Overwrite on every rank by what the operator makes of all ranks' tensors."""
        steps = (self._reduce(tensor, opts.reduceOp) for tensor in tensors)
        return self._start("all_reduce", steps, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Do the same on the root alone."""
        steps = (self._reduce(tensor, opts.reduceOp, opts.rootRank) for tensor in tensors)
        return self._start("reduce", steps, tensors, opts)

    def allgather(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any = _DEFAULT,
    ) -> Work:
        """Fill a list of tensors, which may differ in size, by what each rank has."""
        comm, pairs = self.communicator, zip(outputs, inputs, strict=True)
        steps = (rounds.all_gather(comm, places, tensor) for places, tensor in pairs)
        return self._start("all_gather", steps, _flat(outputs), opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any = _DEFAULT,
    ) -> Work:
        """Do the same, with a list for each rank rather than for each tensor."""
        by_tensor = [list(places) for places in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> Work:
        """Fill each output by what each rank has, of one size."""
        comm, pairs = self.communicator, zip(outputs, inputs, strict=True)
        steps = (rounds.all_gather_single(comm, out, tensor) for out, tensor in pairs)
        return self._start("all_gather_single", steps, outputs, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> Work:
        """Fill one output by what each rank has, of one size."""
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def gather(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any = _DEFAULT,
    ) -> Work:
        """Fill the root's list of tensors by what each rank has."""
        comm, root = self.communicator, opts.rootRank
        lists = outputs if self._rank == root else [[] for _ in inputs]
        pairs = zip(lists, inputs, strict=True)
        steps = (rounds.gather(comm, places, tensor, root) for places, tensor in pairs)
        return self._start("gather", steps, _flat(outputs), opts)

    def scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        opts: Any = _DEFAULT,
    ) -> Work:
        """Fill the output by what the root's list has for this rank."""
        comm, root = self.communicator, opts.rootRank
        lists = inputs if self._rank == root else [[] for _ in outputs]
        pairs = zip(outputs, lists, strict=True)
        steps = (rounds.scatter(comm, out, parts, root) for out, parts in pairs)
        return self._start("scatter", steps, outputs, opts)

    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        opts: Any = _DEFAULT,
    ) -> Work:
        """Fill the output by what the operator makes of the parts that all have for this rank."""
        comm, pairs = self.communicator, zip(outputs, inputs, strict=True)
        steps = (rounds.reduce_scatter(comm, out, parts, opts.reduceOp) for out, parts in pairs)
        return self._start("reduce_scatter", steps, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> Work:
        """Do the same with a tensor whose parts are of one size."""
        for out, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != self._size * out.numel():
                raise RuntimeError(
                    f"an input of {tensor.numel()} elements has no {self._size} parts of "
                    f"{out.numel()}, which is what the output takes."
                )
        parts = [
            list(tensor.reshape(-1).split([out.numel()] * self._size))
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> Work:
        """Do the same with one tensor."""
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Send a tensor to each rank, and fill one by what each sends."""
        steps = rounds.all_to_all(self.communicator, outputs, inputs)
        return self._start("all_to_all", [steps], outputs, opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        recv: Sequence[int] | None,
        send: Sequence[int] | None,
        opts: Any = _DEFAULT,
    ) -> Work:
        """Send rows to each rank, and fill `out` by what each sends."""
        steps = rounds.all_to_all_single(self.communicator, out, tensor, recv or (), send or ())
        return self._start("all_to_all_single", [steps], [out], opts)

    def barrier(self, opts: Any = _DEFAULT) -> Work:
        """Be done when all ranks have called."""
        return self._start("barrier", [rounds.barrier(self.communicator)], (), opts)

    # These names are torch's before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Send to one rank."""
        steps = rounds.send(self.communicator, tensors, peer, users(tag))
        return self._start(f"send to rank {peer}", [steps], ())

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Receive from one rank."""
        status = MPI.Status()
        steps = rounds.receive(self.communicator, tensors, peer, users(tag), status)
        name = "recv from any rank" if peer == MPI.ANY_SOURCE else f"recv from rank {peer}"
        return self._started(Message(name, self.where, self.seconds, steps, tensors, status=status))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive from whoever sends first."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # Several calls made one

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Work("calls coalesced", self.where, self.seconds, joint(works))

    def _reduce(self, tensor: torch.Tensor, op: Any, root: int | None = None) -> Steps:
        self._calls += 1
        return rounds.reduce(self.communicator, tensor, op, second_round(self._calls), root)

    def _start(
        self, name: str, steps: Iterable[Steps], result: Tensors, opts: Any = _DEFAULT
    ) -> Work:
        """Start the collective on each tensor of the list, and return one work for all."""
        own = opts.timeout.total_seconds()  # negative: the group's
        seconds = own if own > 0 else self.seconds
        works = [Work(name, self.where, seconds, each, result) for each in steps]
        if len(works) == 1:
            return self._started(works[0])
        return self._started(Work(name, self.where, seconds, joint(works), result))

    def _started(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def where(self) -> str:
        """Return what messages say of this rank."""
        return f"rank {self._rank} of {self._size} of group {self._name!r}"


def _flat(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]
