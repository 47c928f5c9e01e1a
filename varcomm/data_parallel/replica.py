"""The copy of a module that one rank has: hooks by which its gradients come to be summed."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.backward import Backward, Part
from varcomm.data_parallel.copied import CopyOfReplica
from varcomm.data_parallel.ending import LOCK, is_reached
from varcomm.data_parallel.global_count import GlobalCount, Reduce
from varcomm.data_parallel.leaf import accumulator, accumulators
from varcomm.data_parallel.routes import Route, alive, routes
from varcomm.data_parallel.tie import tie
from varcomm.data_parallel.unsummed import Unsummed
from varcomm.data_parallel.values import check_backward, check_entry
from varcomm.data_parallel.watching import bereave, marks_at, replicas_at
from varcomm.errors import ArgumentError, DisagreementError, GroupError
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.transport.agreement import debugging, fail
from varcomm.transport.group import Group
from varcomm.transport.auxiliary_group import Lane, weakly

__all__ = ["Options", "Replica", "replicas_in"]

_numbers = itertools.count()


@dataclass(frozen=True)
class Options:
    """How the gradients of a module are summed.

    Attributes
    ----------
    reduce : "sum", "mean" or GlobalCount
        What is made of the gradients of all ranks.
    use_fp32 : bool
        Whether narrow floats are summed in fp32.
    bucket_bytes : int
        How much travels in a message.
    recurse : bool
        Whether parameters of modules within the module belong to it.
    marked : bool
        Whether :func:`mark_module_as_shared` was called, and not :func:`replicate`.
    dimension : str, optional
        The name of the dimension of a mesh that the group is.
    """

    reduce: Reduce
    use_fp32: bool
    bucket_bytes: int
    recurse: bool = True
    marked: bool = False
    dimension: str | None = None


class Replica:
    """Sums the gradients of a module's parameters over a group; the module's forward hook.

    The node of the graph that adds to a parameter's ``grad`` runs once in a backward, when all that
    the parameter gets is there, and never in ``torch.autograd.grad``. A hook before it takes the
    increment away. So ``grad`` stays as it was until the sums are added at the end of backward, and
    a backward that fails leaves nothing behind in it.

    Nothing keeps it but the module, and graphs through which backward may still go. Without it,
    gradients of the parameters that are left are an error.

    Parameters
    ----------
    token : int
        By which all ranks of the group know it.
    number : int, optional
        Its place among those that sum the same parameters; None is after all that there are.
    """

    # How often one has come or gone: as long as it stays, so does who sums what.
    changes: ClassVar[int] = 0

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        lane: Lane | None,
        options: Options,
        token: int,
        number: int | None = None,
    ) -> None:
        self.group, self.ranks, self.lane, self.options = weakly(group), group.ranks, lane, options
        self.number, self.token = next(_numbers) if number is None else number, token
        self.module = weakref.ref(module)
        self.names = [name for name, _ in module.named_parameters(recurse=options.recurse)]
        self.parameters = list(module.parameters(recurse=options.recurse))
        self.left_out: set[int] = set()
        self._on_cpu = all(value.device.type == "cpu" for value in self.parameters)
        self.unsummed = Unsummed(self.parameters, partial(_refuse_gradient, weakref.ref(self)))
        self.paused = 0
        self._identities = _identities(module, options.recurse)
        self._routes: tuple[object, list[Route]] | None = None
        self._connected: tuple[int, list[weakref.ref[Replica]]] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self._running: weakref.ref[Part] | None = None
        self._failed = False
        self._removals: list[Callable[[], object]] = []
        # autograd itself keeps neither the nodes nor, with them, their hooks
        self._nodes: dict[int | None, Node] = {}
        self._unwatch: dict[int | None, Callable[[], None]] = {}
        self._watch(self._anchor, None)
        for index, parameter in enumerate(self.parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                self._watch(parameter, index)
        handle = module.register_forward_hook(self, with_kwargs=True)
        self._removals.append(handle.remove)
        if lane is not None:
            self._removals.append(weakref.finalize(self, lane.give_back))
        if self.count is not None:
            self.count.users.add(self)
        self._left = {i: weakref.ref(p) for i, p in enumerate(self.parameters) if i in self._nodes}
        self._end = weakref.finalize(self, bereave, self._left, self.ranks)
        self._end.atexit = False
        Replica.changes += 1

    def _watch(self, leaf: torch.Tensor, index: int | None) -> None:
        # weakly: a node is nothing that the garbage collector could see through
        me = weakref.ref(self)
        node = accumulator(leaf)
        marks = marks_at(node)
        marks.append(me)
        hook = node.register_prehook(partial(_arrived, me, index))

        def unwatch() -> None:
            hook.remove()
            marks.remove(me)

        self._nodes[index], self._unwatch[index] = node, unwatch

    def close(self) -> None:
        """Leave the module as it was."""
        for remove in (*self._unwatch.values(), *self._removals, self._end.detach):
            remove()
        if self.count is not None:
            self.count.users.discard(self)
        Replica.changes += 1

    def leave_out(self, indices: set[int]) -> None:
        """Sum the gradients of some parameters no longer."""
        for index in indices:
            self._unwatch.pop(index, lambda: None)()
            self._nodes.pop(index, None)
            self._left.pop(index, None)
        self.left_out |= indices
        Replica.changes += 1
        if len(self.left_out) == len(self.parameters):
            self.close()

    @property
    def count(self) -> GlobalCount | None:
        """What its sums are divided by, if that is a count."""
        return self.options.reduce if isinstance(self.options.reduce, GlobalCount) else None

    def has_unsummed(self) -> bool:
        """Return whether there are gradients to be summed of those that sum with it."""
        return any(replica.unsummed.any() for replica in self.connected())

    @property
    def exists(self) -> bool:
        """Whether its group does."""
        try:
            self.group()
        except GroupError:
            return False
        return True

    @property
    def label(self) -> str:
        """What it is called among ranks."""
        return f"module {self.token}, of {len(self.names)} parameters: {', '.join(self.names[:2])}"

    @property
    def routes(self) -> list[Route]:
        """What it sums first of all, in the order in which it does: the last parameters first."""
        key = Replica.changes, [parameter.requires_grad for parameter in self.parameters]
        if self._routes is None or self._routes[0] != key:
            self._routes = key, routes(self)
        return self._routes[1]

    def summing(self, index: int) -> list[Replica]:
        """Return who sums the gradient of a parameter, in their order."""
        return replicas_at(self._nodes[index]) if index in self._nodes else []

    def connected(self) -> list[Replica]:
        """Return all that share parameters with it, or with one that does; in their order."""
        if self._connected is None or self._connected[0] != Replica.changes:
            found, new = {self.number: self}, [self]
            while new:
                for node in new.pop()._nodes.values():
                    for other in replicas_at(node):
                        if other.number not in found:
                            found[other.number] = other
                            new.append(other)
            references = [weakref.ref(found[number]) for number in sorted(found)]
            self._connected = Replica.changes, references
        return alive(self._connected[1])

    def counting(self) -> list[Replica]:
        """Return those over whose groups its count is summed, one for each group."""
        of_groups: dict[tuple[int, ...], Replica] = {}
        for replica in self.connected():
            if replica.options.reduce is self.options.reduce:
                of_groups.setdefault(replica.ranks, replica)
        return list(of_groups.values())

    def over(self) -> Group:
        """Return the group on which sums travel.

        Ranks that differ are to find each other there, while they compare.
        """
        return self.group() if self.lane is None or debugging() else self.lane.group()

    @property
    def frozen(self) -> list[str]:
        """The names of the parameters that do not learn."""
        both = zip(self.names, self.parameters, strict=True)
        return [name for name, parameter in both if not parameter.requires_grad]

    @property
    def unmarked(self) -> list[str]:
        """The names of the parameters that it sums no longer."""
        return [self.names[index] for index in sorted(self.left_out)]

    @kept_from_compilation
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Tie the module's output to the sums."""
        if not torch.is_grad_enabled():
            return output
        self.check_sound()
        self._check_parameters(module)
        if DistributedDataParallel._active_ddp_module is not None:
            self.refuse(
                "DistributedDataParallel around a replicated module would add its gradients to the "
                "sums. Take either it, with data_parallel.sum_hook, or replicate."
            )
        if not any(parameter.requires_grad for parameter in self.parameters):
            return output
        self._check_nodes()
        if self.options.recurse:
            for part in module.modules():
                if isinstance(part, DistributedDataParallel):
                    self.refuse(
                        "DistributedDataParallel around a part of a replicated module would keep "
                        "its gradients from the sums. Take either it, with data_parallel.sum_hook, "
                        "or replicate."
                    )
        return tie(output, (args, kwargs), self._anchor, self, self.refuse)

    def arrived(
        self, index: int | None, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None] | None:
        """Take what backward brings to a parameter, or its coming by the anchor.

        Returns what goes on in its place; None is the gradient itself.
        """
        if index is not None and not self.parameters[index].requires_grad:
            return None  # frozen since forward; torch leaves its gradient alone
        # parameters on CPU and GPU arrive in threads of their own
        with LOCK:
            task = torch._C._current_graph_task_id()
            part = self.part
            if part is None or self._failed:
                self._check_entry(index)
                part = Backward.of(task).enter(self)
            elif part.thread != threading.get_ident() and self._on_cpu:
                self.refuse(
                    "two threads run backward through one module at the same time, and nobody "
                    "knows which of them other ranks are in. Run one after the other."
                )
            if index is None:
                return (None,)
            if gradient is None or not part.takes(index):
                return None
            try:
                return part.add(index, gradient, nested=task != part.task)
            except BaseException:
                self._failed = True
                raise

    @property
    def part(self) -> Part | None:
        """What it has in the backward that runs."""
        return self._running() if self._running is not None else None

    def started(self, part: Part) -> None:
        """Take part in a backward."""
        self._running = weakref.ref(part)

    def ended(self, failed: bool) -> None:
        """Be ready for the next backward, or refuse it."""
        self._running, self._failed = None, failed

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError; inside :func:`varcomm.debug` on all ranks."""
        with checking("replicate", self.group()) as where:
            raise ArgumentError(where + reason)

    def check_sound(self) -> None:
        """Raise if this rank may be elsewhere than others."""
        died = self._running is not None and self._running() is None
        if self._failed or died:
            group = self.group()
            error = DisagreementError(
                f"replicate on {group}: an earlier backward ended in an error on this rank, "
                "and what other ranks have summed since is not known. Call replicate(module) "
                "again, on all ranks."
            )
            if debugging():
                fail(group, "replicate", error)
            raise error

    def _check_entry(self, index: int | None) -> None:
        """Raise if a gradient arrives in a backward to which other ranks may not come."""
        self.check_sound()
        if index is None or self.paused > 0:
            return
        reached = any(is_reached(replica._nodes[None]) for replica in self.connected())
        check_entry(reached, self.names[index], self.refuse)

    def _check_nodes(self) -> None:
        """Raise if torch has given a parameter another node, which nobody watches."""
        for index, node in enumerate(accumulators(self.parameters)):
            if node is not None and self._nodes.get(index, node) is not node:
                self._refuse_change(self.names[index])

    def _check_parameters(self, module: torch.nn.Module) -> None:
        now = _identities(module, self.options.recurse)
        if now == self._identities:
            return
        names = [name for name, _ in module.named_parameters(recurse=self.options.recurse)]
        before = dict(zip(self.names, self._identities, strict=True))
        after = dict(zip(names, now, strict=True))
        self._refuse_change(next(n for n in [*self.names, *names] if before.get(n) != after.get(n)))

    def _refuse_change(self, name: str) -> NoReturn:
        self.refuse(
            f"parameter {name!r} has been replaced, converted, added or removed since "
            "replicate(module) was called. Call it again, on all ranks."
        )

    def check_backward(self) -> None:
        """Raise if what this backward brings cannot be summed."""
        check_backward(zip(self.names, self.parameters, strict=True), self.refuse)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopyOfReplica, ()


def replicas_in(module: torch.nn.Module) -> list[Replica]:
    """Return those of a module and of all modules within it."""
    hooks = (hook for part in module.modules() for hook in part._forward_hooks.values())
    return [hook for hook in hooks if isinstance(hook, Replica)]


def _arrived(
    me: weakref.ref[Replica], index: int | None, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None] | None:
    (replica,) = alive([me])
    return replica.arrived(index, gradients[0])


def _refuse_gradient(me: weakref.ref[Replica], index: int, reason: str) -> NoReturn:
    (replica,) = alive([me])
    replica.refuse(f"the gradient of parameter {replica.names[index]!r} {reason}")


def _identities(module: torch.nn.Module, recurse: bool) -> list[tuple[object, ...]]:
    return [(id(p), p.dtype, p.device, p.shape) for p in module.parameters(recurse=recurse)]
