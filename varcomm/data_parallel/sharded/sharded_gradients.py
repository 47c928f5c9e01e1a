"""``ShardedGradients``: each rank owns a piece of the gradients and of the optimizer's states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from varcomm.data_parallel.global_count import Reduce
from varcomm.data_parallel.sharded.arrivals import NAME
from varcomm.data_parallel.sharded.gathering import Gathering
from varcomm.data_parallel.sharded.guards import AfterForward, Guard, OnlyWithinStep
from varcomm.data_parallel.sharded.inner_optimizer import Factory, Held, options
from varcomm.data_parallel.sharded.making import make
from varcomm.data_parallel.sharded.norm import clip_
from varcomm.data_parallel.sharded.settings import Settings
from varcomm.data_parallel.sharded.shard import Piece
from varcomm.data_parallel.sharded.states import States
from varcomm.errors import ArgumentError
from varcomm.sharding import shard_spec
from varcomm.transport.agreement import agree, compare, debugging
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["ShardedGradients"]


class ShardedGradients:
    """An optimizer of which each rank runs a part: its piece of the parameters, and their states.

    Every rank has the whole model. Backward sums the gradients over ranks, and leaves each rank
    those of its own piece; :meth:`step` updates the piece and gathers the pieces of all. So
    gradients, states and fp32 masters take ``n`` elements a rank rather than all ``N``, and both
    together send no more than an all-reduce of gradients would. Pieces may be of any sizes.

    Collective: every rank makes it of a model with the same parameters, and all raise if one has
    to. Parameters and buffers get the values of rank 0; later on, statistics of batch norms are
    each rank's own. Parameters become contiguous views of one row a bucket; they stay the same
    objects.

    Parameters
    ----------
    params : Module or iterable
        A Module; or an iterable of parameters, of ``(name, parameter)``, or of dicts with
        ``"params"`` and options, as torch's optimizers take them; no sets. Those that are frozen
        are only made equal. Shared ones count once. Without a module or names, states are saved by
        numbers, ``"group.place"``, which no other optimizer knows.
    optimizer_factory : callable
        Is called as ``optimizer_factory(groups)`` and makes the optimizer of this rank's pieces:
        ``lambda groups: torch.optim.AdamW(groups, lr=1e-3)``. The groups are those of `params`,
        with the pieces in place of parameters, and may be empty on a rank. Updates of an element
        must depend on nothing else in its parameter, unless `sizes` is ``"whole-parameters"``.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    sizes : "balanced", "whole-parameters" or sequence of int
        How many elements each rank owns. ``"balanced"``: as many as any other. A list: one int a
        rank, zeros allowed, that sum to the number of trained elements; more where there is more
        memory. Of each bucket a rank gets its share, so that every message is spread over all.
        ``"whole-parameters"``: each parameter has one owner, whose optimizer gets it in its own
        shape, as Muon needs it.
    module : torch.nn.Module, optional
        The module in which the parameters are, where `params` is not that module itself. All that
        it has is made equal, but for what others sum, who have made that equal. A backward from its
        output takes part in the sums on every rank, even if the loss reaches no parameter there;
        other backwards are an error outside of :meth:`no_sync`. Without it, each must reach one on
        every rank, and those of reentrant checkpoints sum by themselves.
    reduce : "mean", "sum" or GlobalCount
        ``"mean"`` divides by the number of ranks; ``"sum"`` does not; a
        :class:`varcomm.data_parallel.GlobalCount` divides by what all ranks have counted since the
        last sum.
    fp32_reduce_scatter : bool
        Sum and divide gradients narrower than 4 bytes in fp32. They travel narrow, and the
        receiver casts them: the numbers are those of a cast before, at half the bytes. If False,
        they are divided before they are sent, in their own dtype, to which the sum (in fp32) is
        rounded before it is divided by the rest. Wider ones keep their dtype.
    gradient_predivide_factor : float, optional
        What each rank's part is divided by before it is added; the sum is divided by the rest. By
        default a power of two near ``sqrt(P)`` for a mean, else 1.
    fp32_masters : bool
        Let the optimizer work on fp32 copies of the pieces of parameters narrower than 4 bytes,
        which are rounded for the model after each step. What is written into the model's
        parameters between steps, by whatever way, is taken over: a step compares all ``n``.
    cpu_offload : bool
        Keep gradients, masters and states of the pieces on the CPU. Gradients move there through
        pinned memory beside backward, which waits for them at its end.
    overlap_forward : bool
        Let :meth:`step` return while pieces are being gathered; each module in `module` waits in
        its forward for the parameters that it holds itself, modules of torch.nn for all in them.
        Until then it is an error to use a parameter otherwise; :meth:`wait` waits for all, and so
        does ``state_dict()`` of a module.
    bucket_bytes : int
        Gradients travel in messages of about so many bytes.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        What the factory has made. Learning rate schedulers take it, and its hooks may be used; its
        ``step`` may not.

    Raises
    ------
    ArgumentError
        On every rank, if `params` holds no trained parameter, or one that is lazy, sparse, sharded
        as a DTensor, on another device than the others, replicated by
        :func:`varcomm.data_parallel.replicate` or in another ShardedGradients; if one shares
        memory with another parameter or buffer, or has a gradient; if `sizes` do not fit; if a
        group of the optimizer holds other tensors than it was given; if another argument is wrong.
        In backward, on the rank where it happens, for ``create_graph=True``, for gradients that
        require a gradient, for hooks after accumulation, and for parameters that have been moved;
        inside :func:`varcomm.debug` on all. On every rank at the end of backward, if all have
        counted 0.
    DisagreementError
        On every rank, if parameters, arguments or options of the optimizer differ. After a backward
        that has failed.
    GroupError
        If this rank is not in `group`; on every rank, if a parameter is where the group has no
        engine.

    Notes
    -----
    Every rank calls ``backward()`` equally often. Each one that is not within :meth:`no_sync` sums
    what it brings, and adds it to the gradients of the pieces, which :meth:`zero_grad` drops:
    micro-batches accumulate there. Their storage is all that gradients take between backward and
    step; the ``grad`` of a parameter stays None. What no rank has used keeps no gradient, as in one
    process.

    A batch is skipped on all ranks or on none. A backward that fails after it has come to the
    module (or the first parameter) is noticed on its rank, which raises from then on, while others
    wait. One that fails before, in the loss, is not noticed where its error is caught, nor is one
    that a rank leaves out, in :func:`varcomm.debug` neither: the others wait for the next one of
    that rank, and sum it with theirs.

    Buckets are filled from the last parameters to the first. As soon as the gradients of one are
    there, and of all before it, they are packed, freed, and sent while backward goes on, on a group
    of its own; where there can be none, and inside :func:`varcomm.debug`, when backward is done.
    What was sent is freed when it has arrived.

    Communication: of ``N`` elements this rank owns ``n``. A backward sends ``N - n`` elements of
    the gradients' dtype, and one value for each parameter in each peer's piece of a bucket; it
    receives ``(P - 1) n``, and a value for each parameter in its own from each peer. A GlobalCount
    adds 16 bytes to each peer. :meth:`step` sends ``(P - 1) n`` elements of the parameters' dtype
    and receives ``N - n``. Nothing is padded. Sums are in rank order, the same at every run, and
    parameters are equal on all ranks bit for bit.

    Accuracy: sums in fp32 of gradients ``g_r`` that are narrow are within ``(P + 1) 2**-24 sum_r
    |g_r|`` of the exact sum, divided.

    Sharding of optimizer states is that of ZeRO, of gradients its second stage [1]_.

    In one process: ``optimizer_factory(params)``, and backward from the mean of the losses of all
    ranks.

    References
    ----------
    .. [1] S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, ZeRO: memory optimizations toward training
       trillion parameter models, SC20, 2020, https://arxiv.org/abs/1910.02054

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel.sharded import ShardedGradients
    >>> def fn(rank):
    ...     model = torch.nn.Linear(2, 3, bias=False)
    ...     torch.nn.init.ones_(model.weight)
    ...     optimizer = ShardedGradients(
    ...         model, lambda groups: torch.optim.SGD(groups, lr=0.5), sizes=[4, 2]
    ...     )
    ...     model(torch.full((1, 2), rank + 1.0)).sum().backward()
    ...     own = optimizer.pieces["weight"]
    ...     optimizer.step()
    ...     return (own.start, own.stop), own.value.grad.tolist(), model.weight.tolist()[0]
    >>> varcomm.launch(fn, 2)[0]
    ((0, 4), [1.5, 1.5, 1.5, 1.5], [0.25, 0.25])
    >>> varcomm.launch(fn, 2)[1]
    ((4, 6), [1.5, 1.5], [0.25, 0.25])
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any],
        optimizer_factory: Factory,
        group: GroupLike = None,
        sizes: str | Sequence[int] = "balanced",
        *,
        module: torch.nn.Module | None = None,
        reduce: Reduce = "mean",
        fp32_reduce_scatter: bool = True,
        gradient_predivide_factor: float | None = None,
        fp32_masters: bool = True,
        cpu_offload: bool = False,
        overlap_forward: bool = False,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        ranks = resolve(group)
        asked = Settings(
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
            made = make(params, optimizer_factory, ranks, module, asked)
        self._given, self._shards, self._pieces = made.given, made.shards, made.pieces
        self._arrivals = arrivals = made.arrivals
        whole = made.given.module
        overlapped = whole if overlap_forward else None
        self._gathering = Gathering(made.shards, arrivals.traffic, overlapped)
        self.optimizer = made.optimizer
        self._guard = Guard(made.given, arrivals, self._gathering, Held(self.optimizer))
        self._within_step = OnlyWithinStep()
        self.optimizer.register_step_pre_hook(self._within_step)
        self._states = States(self.optimizer, made.given, made.shards, made.settings.whole)
        if whole is not None:
            hook = AfterForward(made.given, arrivals)
            arrivals.on_close(whole.register_forward_hook(hook, with_kwargs=True).remove)

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """What this rank owns, by the name of the parameter of which it is a part.

        ``pieces[name].value.grad`` is the reduced gradient, or None. Only those of which the rank
        owns an element are here; and, on one rank each, parameters without elements.
        """
        self._guard.settle("pieces")
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
        self._guard.check("no_sync")
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
            If parameters have been moved, converted or unfrozen since this was made, the optimizer
            has other groups, or gradients of ``no_sync`` have not been summed.
        DisagreementError
            After a failed backward. Inside :func:`varcomm.debug`, on every rank, if the options of
            the optimizer differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._guard.settle("step")
        self._guard.check_summed("step")
        for shard in self._shards:
            shard.take_over()
        self._within_step.stepping = True
        try:
            if debugging():
                compare(self._group(), {"operation": f"{NAME}.step", **options(self.optimizer)})
                agree(f"{NAME}.step", self.optimizer.step, self._group())
            else:
                self.optimizer.step()
        finally:
            self._within_step.stepping = False
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

        As :func:`torch.nn.utils.clip_grad_norm_` does for the whole model in one process; here that
        would find no gradient in the parameters, and clip nothing.
        Parameters that are sharded besides, over the other axis of a mesh, count with all their
        shards; then all ranks of the mesh make this call. One number of each rank is gathered.

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
            The norm before: a scalar of float64, the same on all ranks.

        Raises
        ------
        ArgumentError
            If `max_norm` or `norm_type` is no number, or too small.
        DisagreementError
            Inside :func:`varcomm.debug`, on every rank, if they differ.
        """
        self._guard.settle("clip_grad_norm_")
        return clip_(
            [(piece.name, piece.value.grad) for piece in self._pieces.values()],
            {name: shard_spec(parameter) for name, parameter in self._given.parameters.items()},
            max_norm,
            norm_type,
            self._group(),
            error_if_nonfinite,
        )

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
        self._guard.check_groups("state_dict")
        return self._states.get()

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to load a saved state into, where the optimizer has made none of its own yet.

        `saved` has the structure of what :meth:`state_dict` returned, with any tensors.
        """
        self._guard.check_groups("state_dict_for")
        return self._states.get_for(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned for the same pieces; collective.

        For other pieces, and on other numbers of ranks, :func:`varcomm.checkpoint.load` loads it.

        Raises
        ------
        ArgumentError
            On every rank, if it is no such state, or one of other groups, names or pieces. Then
            nothing is changed.
        """
        self._guard.settle("load_state_dict")
        agree(f"{NAME}.load_state_dict", lambda: self._states.check(state), self._group())
        self._states.load(state)

    def close(self) -> None:
        """Sum no gradients any more, and leave the parameters to another that is made then."""
        self._gathering.close()
        self._arrivals.close()
        self._guard.closed = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ArgumentError(
            f"{NAME}: a GradScaler looks for infinities in this rank's gradients alone, and ranks "
            "would scale and skip differently. Train in bfloat16, or scale the loss by a constant."
        )

    def _group(self) -> Group:
        return self._arrivals.group()
