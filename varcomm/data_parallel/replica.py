"""The copy of a module that one rank has: hooks that sum gradients while backward goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.bucket_sum import BucketSum
from varcomm.data_parallel.buckets import Bucket, cut, gradient_dtype
from varcomm.data_parallel.leaf import accumulator, notes
from varcomm.data_parallel.tie import tie
from varcomm.errors import ArgumentError, DisagreementError, GroupError
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.transport.agree import compare, debugging
from varcomm.transport.group import Group, resolve
from varcomm.transport.lane import Lane, weakly

__all__ = ["CopyOfReplica", "Replica", "replica_of"]

_MARK = "varcomm.replicate"


class Replica:
    """Sums the gradients of a module's parameters over ranks; the module's forward hook.

    The node of the graph that adds to a parameter's ``grad`` runs once in a backward, when all that
    the parameter gets is there, and never in ``torch.autograd.grad``. A hook before it takes the
    increment away. So ``grad`` stays as it was until the sums are added at the end of backward, and
    a backward that fails leaves nothing behind in it.

    Nothing keeps it but the module, and graphs through which backward may still go.
    """

    def __init__(
        self, module: torch.nn.Module, group: Group, lane: Lane | None, bucket_bytes: int
    ) -> None:
        self.group, self.lane = weakly(group), lane
        self.module = weakref.ref(module)
        self.names = [name for name, _ in module.named_parameters()]
        self.parameters = list(module.parameters())
        self._identities = _identities(module)
        self._bucket_bytes = bucket_bytes
        self._buckets: tuple[list[bool], list[Bucket]] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self._running: weakref.ref[_Backward] | None = None
        self._failed = False
        # parameters on CPU and GPU arrive in threads of their own
        self._lock = threading.Lock()
        self._removals: list[Callable[[], object]] = []
        # autograd itself keeps neither the nodes nor, with them, their hooks
        self._nodes = [self._watch(self._anchor, None)]
        for index, parameter in enumerate(self.parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                self._nodes.append(self._watch(parameter, index))
        handle = module.register_forward_hook(self, with_kwargs=True)
        self._removals.append(handle.remove)
        if lane is not None:
            self._removals.append(weakref.finalize(self, lane.give_back))

    def _watch(self, leaf: torch.Tensor, index: int | None) -> Node:
        # weakly: a node is nothing that the garbage collector could see through
        me = weakref.ref(self)
        node = accumulator(leaf)
        notes(node)[_MARK] = me
        hook = node.register_prehook(partial(_arrived, me, index))
        self._removals += [hook.remove, partial(notes(node).pop, _MARK)]
        return node

    def close(self) -> None:
        """Leave the module as it was."""
        for remove in self._removals:
            remove()

    @property
    def buckets(self) -> list[Bucket]:
        """What is summed, in the order in which it is: the last parameters come first."""
        trained = [parameter.requires_grad for parameter in self.parameters]
        if self._buckets is None or self._buckets[0] != trained:
            order = [i for i in reversed(range(len(trained))) if trained[i]]
            lists = cut(self.parameters, order, self._bucket_bytes)
            buckets = [Bucket({i: self.parameters[i] for i in members}) for members in lists]
            self._buckets = trained, buckets
        return self._buckets[1]

    @property
    def frozen(self) -> list[str]:
        """The names of the parameters that do not learn."""
        both = zip(self.names, self.parameters, strict=True)
        return [name for name, parameter in both if not parameter.requires_grad]

    @kept_from_compilation
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Tie the module's output to the sums."""
        if not torch.is_grad_enabled():
            return output
        self._check_sound()
        self._check_parameters(module)
        if DistributedDataParallel._active_ddp_module is not None:
            self.refuse(
                "DistributedDataParallel around a replicated module would add its gradients to the "
                "sums. Take either it, with data_parallel.sum_hook, or replicate."
            )
        if not any(parameter.requires_grad for parameter in self.parameters):
            return output
        return tie(output, (args, kwargs), self._anchor, self, self.refuse)

    def arrived(self, index: int | None, gradient: torch.Tensor | None) -> tuple[None] | None:
        """Take what backward brings to a parameter, or its coming by the anchor."""
        if index is not None and not self.parameters[index].requires_grad:
            return None  # frozen since forward; torch leaves its gradient alone
        with self._lock:
            task = torch._C._current_graph_task_id()
            backward = self._running() if self._running is not None else None
            if backward is None or self._failed:
                self._check_sound()
                self._check_backward()
                backward = _Backward(self, task)
                self._running = weakref.ref(backward)
                # which keeps it, until backward has ended in one way or the other
                torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
            if index is not None and gradient is not None:
                try:
                    backward.add(index, gradient, nested=task != backward.task)
                except BaseException:
                    self._failed = True
                    raise
        return (None,)

    def ended(self, failed: bool) -> None:
        """Be ready for the next backward, or refuse it."""
        self._running, self._failed = None, failed

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError; inside :func:`varcomm.debug` on all ranks."""
        with checking("replicate", self.group()) as where:
            raise ArgumentError(where + reason)

    def _check_sound(self) -> None:
        died = self._running is not None and self._running() is None
        if self._failed or died:
            raise DisagreementError(
                f"replicate on {self.group()}: an earlier backward ended in an error on this rank, "
                "and what other ranks have summed since is not known. Call replicate(module) "
                "again, on all ranks."
            )

    def _check_parameters(self, module: torch.nn.Module) -> None:
        now = _identities(module)
        if now == self._identities:
            return
        names = [name for name, _ in module.named_parameters()]
        before = dict(zip(self.names, self._identities, strict=True))
        after = dict(zip(names, now, strict=True))
        name = next(n for n in [*self.names, *names] if before.get(n) != after.get(n))
        self.refuse(
            f"parameter {name!r} has been replaced, converted, added or removed since "
            "replicate(module) was called. Call it again, on all ranks."
        )

    def _check_backward(self) -> None:
        if torch.is_grad_enabled():
            self.refuse(
                "backward(create_graph=True) would need derivatives of what has been summed. Take "
                "torch.autograd.grad(..., create_graph=True) for forces and penalties, and "
                "backward() from the loss that is made of them."
            )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter._post_accumulate_grad_hooks:
                self.refuse(
                    f"parameter {name!r} has a hook of register_post_accumulate_grad_hook, which "
                    "would run before the gradient is summed. Do its work after backward()."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return CopyOfReplica, ()


class _Backward:
    """One backward: what has arrived, and the sums that are under way."""

    def __init__(self, replica: Replica, task: int) -> None:
        self.replica = replica
        self.task = task
        self.group = replica.group()
        self.lane = replica.lane
        self._sum_over = self.group if self.lane is None else self.lane.group()
        self.buckets = replica.buckets
        self._bucket_of = {i: n for n, bucket in enumerate(self.buckets) for i in bucket.parameters}
        self._missing = [len(bucket) for bucket in self.buckets]
        self._gradients: dict[int, torch.Tensor] = {}
        self._own: set[int] = set()
        self._sums: list[BucketSum] = []
        # Comparing blocks, and ranks are not at the same place of their backward. On a group that
        # is used for other things, they would not even make their calls in the same order.
        self._overlaps = self.lane is not None and not debugging()

    def add(self, index: int, gradient: torch.Tensor, nested: bool) -> None:
        """Take an increment; start the sum of what is complete.

        A `nested` one comes from a backward that runs within this one (reentrant checkpoints), and
        may be followed by others of the same parameter.
        """
        bucket, name = self._bucket_of[index], self.replica.names[index]
        if bucket < len(self._sums):
            self.replica.refuse(
                f"parameter {name!r} gets another gradient, from within a checkpoint, after "
                "its sum was started. Use checkpoint(..., use_reentrant=False)."
            )
        dtype = gradient_dtype(self.replica.parameters[index])
        if gradient.dtype != dtype:
            self.replica.refuse(
                f"the gradient of parameter {name!r} is of {gradient.dtype}, and not of "
                f"{dtype} as on the other ranks. Set its grad_dtype before replicate(module)."
            )
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        held = self._gradients.get(index)
        self._gradients[index] = dense if held is None else held + dense
        self._own.add(index)
        self._missing[bucket] -= not nested
        while self._overlaps and self._next_is_complete():
            self._start()

    def _next_is_complete(self) -> bool:
        number = len(self._sums)
        return number < len(self.buckets) and self._missing[number] == 0

    def _start(self) -> None:
        bucket = self.buckets[len(self._sums)]
        flat = bucket.flatten(self._gradients)
        for index in bucket.parameters:
            self._gradients.pop(index, None)
        if self.lane is not None:
            self.lane.under_way = True
        self._sums.append(BucketSum(flat, self._sum_over))

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what is left, and add the sums to the gradients; at the end of backward."""
        replica, failed = self.replica, True
        try:
            if debugging():
                call = {"operation": "replicate, at the end of backward"}
                compare(self.group, call | {"frozen parameters": replica.frozen})
            while len(self._sums) < len(self.buckets):
                self._start()
            for pending in self._sums:
                pending.begin_second_round()
            totals = [pending.wait() for pending in self._sums]
            for bucket, total in zip(self.buckets, totals, strict=True):
                bucket.deliver(total, self._own)
            if self.lane is not None:
                self.lane.under_way = False
            failed = False
        finally:
            replica.ended(failed)


class CopyOfReplica:
    """What a copied or loaded module has in the place of its :class:`Replica`.

    Its parameters are its own, and nobody sums their gradients.
    """

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Refuse to train a copy as if it were replicated; alone, it is like any other module."""
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        try:
            group = resolve(None)
        except GroupError:
            return
        with checking("replicate", group) as where:
            raise ArgumentError(
                f"{where}this module is a copy of one that was replicated, and its gradients are "
                "not summed. Call replicate on it too, or use it under torch.no_grad() or with "
                "requires_grad_(False)."
            )


def replica_of(parameter: torch.Tensor) -> Replica | None:
    """Return who sums the gradient of a parameter, if anybody does."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    mark = notes(accumulator(parameter)).get(_MARK)
    return mark() if mark is not None else None


def _arrived(
    me: weakref.ref[Replica], index: int | None, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[None] | None:
    replica = me()
    if replica is None:
        raise ArgumentError(
            "replicate: the module that was replicated has been deleted before backward, and its "
            "gradients are not summed. Keep it."
        )
    return replica.arrived(index, gradients[0])


def _identities(module: torch.nn.Module) -> list[tuple[object, ...]]:
    return [(id(p), p.dtype, p.device, p.shape) for p in module.parameters()]
