"""Hooks that tie a module to the sums, and keep it and the inner optimizer from being misused."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.sharded.arrivals import NAME, Arrivals, moved
from varcomm.data_parallel.sharded.gathering import Gathering, Nothing
from varcomm.data_parallel.sharded.given import Given
from varcomm.data_parallel.sharded.inner_optimizer import Held
from varcomm.data_parallel.tie import tie
from varcomm.errors import ArgumentError
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["AfterForward", "Guard", "OnlyWithinStep", "what_is_wrong"]


def what_is_wrong(given: Given, arrivals: Arrivals) -> str | None:
    """Return what has been done to the parameters that they cannot be trained any more."""
    for name, parameter in given.frozen.items():
        if parameter.requires_grad:
            return (
                f"parameter {name!r} was frozen when {NAME} was made, and nobody owns it. Call "
                "close() and make another, on all ranks."
            )
    for shard in arrivals.shards:
        if (index := shard.moved()) is not None:
            return moved(arrivals.names[index])
    if (index := arrivals.converted()) is not None:
        return moved(arrivals.names[index])
    return None


class Guard:
    """Refuses calls of a ShardedGradients that is not as it was made, or may not be used."""

    def __init__(self, given: Given, arrivals: Arrivals, gathering: Gathering, held: Held) -> None:
        self._given, self._arrivals = given, arrivals
        self._gathering, self._held = gathering, held
        self.closed = False

    def check(self, what: str) -> None:
        """Raise if it has been closed, or a backward has failed."""
        if self.closed:
            self.refuse(what, "close() was called before. Make another one, on all ranks.")
        self._arrivals.check_sound()

    def check_groups(self, what: str) -> None:
        """Raise if the optimizer has got other groups."""
        if (wrong := self._held.what_is_wrong()) is not None:
            self.refuse(what, wrong)

    def settle(self, what: str) -> None:
        """Check that all is as it was, and wait for whatever is on its way."""
        self.check(what)
        self._gathering.wait()
        if (wrong := what_is_wrong(self._given, self._arrivals)) is not None:
            self.refuse(what, wrong)
        self.check_groups(what)

    def check_summed(self, what: str) -> None:
        """Raise if there are gradients that have not been summed."""
        name = self._given.with_gradient()
        if name is not None or self._arrivals.has_unsummed():
            which = "a parameter" if name is None else f"parameter {name!r}"
            self.refuse(
                what,
                f"{which} has a gradient of no_sync that has not been summed. Run the last "
                "backward outside of it.",
            )

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise ArgumentError; inside :func:`varcomm.debug` on all ranks."""
        with checking(f"{NAME}.{what}", self._arrivals.group()) as where:
            raise ArgumentError(where + reason)


class AfterForward:
    """The forward hook of the module: ties its output to the sums. In a copy of it, none."""

    def __init__(self, given: Given, arrivals: Arrivals) -> None:
        self._given, self._arrivals = given, weakref.ref(arrivals)

    @kept_from_compilation
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return `output`, tied, if gradients are wanted and the module is as it was."""
        arrivals = self._arrivals()
        if arrivals is None or not torch.is_grad_enabled():
            return output
        arrivals.check_sound()
        now = dict(module.named_parameters())
        for name, parameter in self._given.parameters.items():
            if now.get(name) is not parameter:
                arrivals.refuse(moved(name))
        if (wrong := what_is_wrong(self._given, arrivals)) is not None:
            arrivals.refuse(wrong)
        if DistributedDataParallel._active_ddp_module is not None:
            arrivals.refuse(
                "DistributedDataParallel around this module would wait for gradients that are "
                "taken away. Leave it out."
            )
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            arrivals.refuse(
                "DistributedDataParallel around a part of this module would keep its gradients "
                "from the sums. Leave it out."
            )
        if not any(parameter.requires_grad for parameter in arrivals.parameters):
            return output
        return tie(output, (args, kwargs), arrivals.anchor, arrivals, arrivals.refuse)

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()


class OnlyWithinStep:
    """Keeps the inner optimizer from making a step of which other ranks would not know."""

    def __init__(self) -> None:
        self.stepping = False

    def __call__(self, *_: Any) -> None:
        """Raise outside of ``ShardedGradients.step``; before each step of the inner optimizer."""
        if not self.stepping:
            raise ArgumentError(
                f"{NAME}: the inner optimizer updates pieces, and nobody would gather them. Call "
                f"step() of the {NAME}."
            )
