"""``ShardedGradients``: each rank owns a piece of the parameters' gradients and optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from varcomm.data_parallel.sharded.arrivals import NAME, Counts, moved
from varcomm.data_parallel.sharded.gathering import Gathering, Nothing
from varcomm.data_parallel.sharded.inner_optimizer import Factory, options, part_of
from varcomm.data_parallel.sharded.making import make
from varcomm.data_parallel.sharded.norm import checked_number, total_norm
from varcomm.data_parallel.sharded.settings import Settings
from varcomm.data_parallel.sharded.shard import Piece
from varcomm.data_parallel.tie import tie
from varcomm.errors import ArgumentError
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.sharding import shard_spec
from varcomm.sharding.optimizer_state import (
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)
from varcomm.transport.agree import agree, compare, debugging
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["ShardedGradients"]


class ShardedGradients:
    """DOC"""

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any],
        optimizer_factory: Factory,
        group: GroupLike = None,
        sizes: str | Sequence[int] = "balanced",
        *,
        module: torch.nn.Module | None = None,
        reduce: str | Counts = "mean",
        fp32_reduce_scatter: bool = True,
        gradient_predivide_factor: float | None = None,
        fp32_masters: bool = True,
        cpu_offload: bool = False,
        overlap_forward: bool = False,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        ranks = resolve(group)
        self._settings = Settings(
            sizes,
            reduce,
            fp32_reduce_scatter,
            gradient_predivide_factor,
            fp32_masters,
            cpu_offload,
            overlap_forward,
            bucket_bytes,
        )
        with torch.no_grad():
            made = make(params, optimizer_factory, ranks, module, self._settings)
        self._given, self._shards, self._pieces = made.given, made.shards, made.pieces
        self._arrivals = arrivals = made.arrivals
        whole = made.given.module
        self._gathering = Gathering(
            made.shards, arrivals.sums_over, made.lane, whole if overlap_forward else None
        )
        self._stepping = self._closed = False
        self.optimizer = made.optimizer
        self.optimizer.register_step_pre_hook(_OnlyWithin(self))
        self._parts = {
            piece.value: part_of(
                piece, self._settings.whole, shard_spec(self._given.parameters[name])
            )
            for name, piece in self._pieces.items()
        }
        self._removals: list[Callable[[], object]] = []
        if whole is not None:
            handle = whole.register_forward_hook(_AfterForward(self), with_kwargs=True)
            self._removals.append(handle.remove)
        weakref.finalize(self, _call_all, self._removals).atexit = False

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """What this rank owns, by the name of the parameter of which it is a part.

        ``pieces[name].value.grad`` is the reduced gradient, or None. Only those of which the rank
        owns an element are here.
        """
        self._settle("pieces")
        return dict(self._pieces)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of :attr:`optimizer`, whose options may be changed, on all ranks alike."""
        return self.optimizer.param_groups

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards leave their gradients, whole, in ``grad`` of the parameters.

        The next backward outside adds its own to them, and what is summed is both. All ranks do so
        for the same backwards.
        """
        self._check("no_sync")
        before, self._arrivals.summing = self._arrivals.summing, False
        try:
            yield
        finally:
            self._arrivals.summing = before

    def wait(self) -> None:
        """Wait until the parameters have their new values, with ``overlap_forward=True``."""
        self._gathering.wait()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces, and gather those of all ranks; collective.

        Parameters
        ----------
        closure : callable, optional
            Called once before, with gradients enabled: evaluates the loss and its backward.

        Returns
        -------
        What `closure` returns, or None.

        Raises
        ------
        ArgumentError
            If parameters have been moved, converted or unfrozen since this was made, or gradients
            of ``no_sync`` have not been summed.
        DisagreementError
            After a failed backward. Inside :func:`varcomm.debug`, on every rank, if the options of
            the optimizer differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle("step")
        with checking(f"{NAME}.step", self._group()) as where:
            for name, parameter in self._given.parameters.items():
                if parameter.grad is not None:
                    raise ArgumentError(
                        f"{where}parameter {name!r} has a gradient of no_sync that has not been "
                        "summed. Run the last backward outside of it."
                    )
        for shard in self._shards:
            shard.take_over()
        self._stepping = True
        try:
            if debugging():
                told = {"operation": f"{NAME}.step", **options(self.optimizer)}
                compare(self._group(), told)
                agree(f"{NAME}.step", self.optimizer.step, self._group())
            else:
                self.optimizer.step()
        finally:
            self._stepping = False
        self._gathering.start()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the pieces, and those that ``no_sync`` has left in parameters.

        ``model.zero_grad()`` drops only the latter.
        """
        for shard in self._shards:
            shard.drop_gradients(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them is at most `max_norm`; collective.

        As :func:`torch.nn.utils.clip_grad_norm_` does for the whole model in one process.
        Parameters that are sharded besides, over the other axis of a mesh, count with all their
        shards; then all ranks of the mesh make this call.

        Parameters
        ----------
        max_norm : float
        norm_type : float
            The order ``p > 0``; ``inf`` is the largest absolute value.
        error_if_nonfinite : bool
            Raise torch's RuntimeError, on every rank, where the norm is NaN or infinite.

        Returns
        -------
        torch.Tensor
            The norm before: a scalar of float64, the same on all ranks, bit for bit.

        Raises
        ------
        ArgumentError
            If `max_norm` or `norm_type` is no number, or too small.
        DisagreementError
            Inside :func:`varcomm.debug`, on every rank, if they differ.

        Notes
        -----
        Communication: one number of each rank, gathered by all; one more a kind of sharding.
        """
        self._settle("clip_grad_norm_")
        group = self._group()
        with checking(
            f"{NAME}.clip_grad_norm_", group, error_if_nonfinite=error_if_nonfinite
        ) as where:
            most = checked_number(max_norm, "max_norm", where, zero=True)
            order = checked_number(norm_type, "norm_type", where)
        if debugging():
            told = {"max_norm": most, "norm_type": order, "error_if_nonfinite": error_if_nonfinite}
            compare(group, {"operation": f"{NAME}.clip_grad_norm_", **told})
        parameters = self._given.parameters
        gradients = [
            (piece.value.grad, shard_spec(parameters[name]))
            for name, piece in self._pieces.items()
            if piece.value.grad is not None
        ]
        specs = [shard_spec(parameter) for parameter in parameters.values()]
        total = total_norm(gradients, specs, order, group, error_if_nonfinite)
        factor = (most / (total + 1e-6)).clamp(max=1.0)  # as torch has it
        for gradient, _ in gradients:
            gradient.mul_(factor.to(gradient.device))
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer by the names of parameters, whatever its pieces.

        Returns
        -------
        dict
            ``"state"`` and ``"param_groups"``, as of any other optimizer whose states are kept by
            name, and ``"masters"``, by name, where the optimizer works on others than the
            parameters. Tensors like a parameter are :class:`varcomm.sharding.Sharded`, of its whole
            shape, with this rank's elements: for ``varcomm.checkpoint``, which loads them on any
            number of ranks and for other `sizes`. They are the optimizer's own, not copies.
        """
        self._check("state_dict")
        own = optimizer_state(self.optimizer, self._parts, self._group_names())
        return own | self._masters()

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to load a saved state into, where the optimizer has made none of its own yet.

        Parameters
        ----------
        saved : mapping
            The structure of what :meth:`state_dict` returned, with any tensors.
        """
        self._check("state_dict_for")
        own = optimizer_state_for(self.optimizer, self._parts, self._group_names(), saved)
        masters = self._masters().get("masters", {})
        if "masters" in saved and masters:
            own["masters"] = {n: value for n, value in masters.items() if n in saved["masters"]}
        return own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned for the same pieces; collective.

        Raises
        ------
        ArgumentError
            On every rank, if groups or names are others.
        """
        self._settle("load_state_dict")

        def load() -> None:
            load_optimizer_state(self.optimizer, self._parts, self._group_names(), state)
            for name, value in state.get("masters", {}).items():
                piece = self._pieces.get(name)
                local = getattr(value, "local", value)
                if piece is not None and local is not None:
                    piece.value.detach().copy_(local.view(piece.value.shape))

        agree(f"{NAME}.load_state_dict", load, self._group())

    def close(self) -> None:
        """Sum no gradients any more, and leave the parameters to whoever comes next.

        Another may be made of them then, as has to be done on all ranks after a failed backward.
        """
        self._gathering.close()
        self._arrivals.close()
        for remove in self._removals:
            remove()
        self._closed = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ArgumentError(
            f"{NAME}: a GradScaler looks for infinities in this rank's gradients alone, and ranks "
            "would scale and skip differently. Train in bfloat16, or scale the loss by a constant."
        )

    def _group(self) -> Group:
        return self._arrivals.group()

    def _group_names(self) -> list[list[str]]:
        return [names for names, _ in self._given.groups]

    def _masters(self) -> dict[str, dict[str, torch.Tensor]]:
        own = {
            piece.name: self._parts[piece.value].wrap(piece.value.detach())
            for shard in self._shards
            for piece in shard.pieces
            if shard.has_masters
        }
        return {"masters": own} if any(shard.has_masters for shard in self._shards) else {}

    def _check(self, what: str) -> None:
        if self._closed:
            self._refuse(what, "close() was called before. Make another one, on all ranks.")
        self._arrivals.check_sound()

    def _settle(self, what: str) -> None:
        """Check that all is as it was, and wait for whatever is on its way."""
        self._check(what)
        self._gathering.wait()
        if (wrong := self._found_wrong()) is not None:
            self._refuse(what, wrong)
        for shard in self._shards:
            shard.settle()

    def _found_wrong(self) -> str | None:
        for name, parameter in self._given.frozen.items():
            if parameter.requires_grad:
                return (
                    f"parameter {name!r} was frozen when {NAME} was made, and nobody owns it. Call "
                    "close() and make another, on all ranks."
                )
        for shard in self._shards:
            if (index := shard.moved()) is not None:
                return moved(self._arrivals.names[index])
        return None

    def _refuse(self, what: str, reason: str) -> NoReturn:
        with checking(f"{NAME}.{what}", self._group()) as where:
            raise ArgumentError(where + reason)

    def after_forward(self, module: torch.nn.Module, given: Any, output: Any) -> Any:
        """Tie the module's output to the sums; for its forward hook."""
        arrivals = self._arrivals
        arrivals.check_sound()
        now = dict(module.named_parameters())
        for name, parameter in self._given.parameters.items():
            if now.get(name) is not parameter:
                arrivals.refuse(moved(name))
        if (wrong := self._found_wrong()) is not None:
            arrivals.refuse(wrong)
        if DistributedDataParallel._active_ddp_module is not None:
            arrivals.refuse(
                "DistributedDataParallel around this module would add its gradients to the sums. "
                "Leave it out."
            )
        if not any(parameter.requires_grad for parameter in arrivals.parameters):
            return output
        return tie(output, given, arrivals.anchor, arrivals, arrivals.refuse)


class _AfterForward:
    """The forward hook of the module; in a copy of it, none."""

    def __init__(self, sharded: ShardedGradients) -> None:
        self._sharded = weakref.ref(sharded)

    @kept_from_compilation
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        sharded = self._sharded()
        if sharded is None or not torch.is_grad_enabled():
            return output
        return sharded.after_forward(module, (args, kwargs), output)

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()


class _OnlyWithin:
    """Keeps the inner optimizer from making a step of which other ranks would not know."""

    def __init__(self, sharded: ShardedGradients) -> None:
        self._sharded = weakref.ref(sharded)

    def __call__(self, *_: Any) -> None:
        sharded = self._sharded()
        if sharded is not None and not sharded._stepping:
            raise ArgumentError(
                f"{NAME}: the inner optimizer updates pieces, and nobody would gather them. Call "
                "step() of the ShardedGradients."
            )


def _call_all(removals: Iterable[Callable[[], object]]) -> None:
    for remove in removals:
        remove()
