"""``ShardedGradients``: each rank owns a piece of the gradients and of the optimizer's states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from varcomm.data_parallel.buckets import BUCKET_BYTES
from varcomm.data_parallel.global_count import GlobalCount, Reduce, described, total_rows
from varcomm.data_parallel.sharded.arguments import ANOTHER, NAME, Given
from varcomm.data_parallel.sharded.optimizer import (
    Factory,
    Options,
    held,
    made,
    norms,
    numbers,
    options,
    states_of,
)
from varcomm.data_parallel.sharded.reducer import Reducer
from varcomm.data_parallel.sharded.shard import WHOLE, Piece, Shard, settle, splits
from varcomm.errors import ArgumentError
from varcomm.ops.broadcast_module import overwrite
from varcomm.ops.digest import require_equal
from varcomm.sharding import shard_spec
from varcomm.sizes import at_least, checked_sizes
from varcomm.transport.agreement import agree, agree_and_share, debugging, share
from varcomm.transport.auxiliary_group import free_lanes, take_lane
from varcomm.transport.group import GroupLike, resolve, weakly


class ShardedGradients(torch.optim.Optimizer):
    """Optimizer with sharded states: each rank updates its own pieces of the parameters.

    Gradients are summed over ranks, each piece on the rank that owns it. :meth:`step` updates the
    pieces and gathers them: all ranks have all parameters.

    The constructor is collective: every rank passes the same model. Parameters, and buffers of a
    Module, get the values of rank 0. Parameters become contiguous views of one row per bucket.

    Parameters
    ----------
    params : Module or iterable
        A Module; or parameters, ``(name, parameter)`` pairs, or dicts with ``"params"`` and
        options, as for torch's optimizers. Frozen parameters only receive the values of rank 0.
        Parameters without names are saved by numbers, ``"group.place"``.
    optimizer_factory : callable
        ``optimizer_factory(groups)`` returns the optimizer of this rank's pieces. Each group
        contains this rank's pieces of the parameters in the same group of ``params``, and may be
        empty. The update of an element must not depend on the rest of its parameter, unless `sizes`
        is ``"whole-parameters"``.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    sizes : "balanced", "whole-parameters" or sequence of int
        Elements per rank. The sum of a list is the number of trained elements; zeros are allowed.
        ``"whole-parameters"``: each parameter has one owner, whose optimizer gets the parameter in
        its own shape, as Muon requires.
    reduce : "mean", "sum" or GlobalCount
        Divisor of the sum: the number of ranks, none, or the number of rows that all ranks have
        counted since the last sum.
    bucket_bytes : int
        Size of a message of gradients.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        The result of the factory, which updates pieces; its ``step`` raises. The result shares
        options and states with the ShardedGradients. Pass the ShardedGradients to schedulers and
        trainers.

    Raises
    ------
    ArgumentError
        On every rank, if no parameter is trained, or an argument is wrong. Also raised if a
        parameter is lazy, sparse, a DTensor, in another ShardedGradients, or shares memory with
        another tensor. Also raised in backward, on one rank, for ``create_graph=True`` and for
        gradients whose dtype is not the parameter's.
    DisagreementError
        On every rank, if parameters, arguments, options of the optimizer or called methods differ.

    See Also
    --------
    sum_gradients, varcomm.checkpoint.save

    Notes
    -----
    Backward is not collective: a rank may run it any number of times, and may leave out parameters.
    A bucket is sent during backward, as soon as its gradients and all buckets before it are
    complete; the first collective method sums the rest. The optimizer updates fp32 masters of
    parameters narrower than 4 bytes. The next step copies values that were written into parameters
    to the masters.

    On NCCL, these sums have a communicator of their own; :doc:`/gradients` has the rules for the
    order of calls. ``grad`` of a parameter stands for the sum over ranks, and has no memory: only a
    ``GradScaler`` accepts it.

    Communication: of ``N`` elements this rank owns ``n``. A sum sends ``N - n`` elements of the
    gradients' dtype and receives ``(P - 1) n``, and one value per peer for each parameter in a
    piece of a bucket. :meth:`step` sends ``(P - 1) n`` elements and receives ``N - n``. Each
    collective method begins with a gather and a broadcast of 1 KiB per rank. Sums are in rank
    order, in fp32 for narrow gradients; parameters are equal on all ranks bit for bit.

    On a rank that left out a parameter, the host waits for the GPU once per sum, and a CUDA graph
    cannot capture the step.

    In one process: ``optimizer_factory(params)``, and backward of the mean of all ranks' losses.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import ShardedGradients
    >>> def fn(rank):
    ...     model = torch.nn.Linear(2, 3, bias=False)
    ...     optimizer = ShardedGradients(model, torch.optim.SGD, sizes=[4, 2])
    ...     model(torch.full((1, 2), rank + 1.0)).sum().backward()
    ...     optimizer.step()
    ...     own = optimizer.pieces["weight"]
    ...     return own.start, own.stop, own.value.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [(0, 4, [1.5, 1.5, 1.5, 1.5]), (4, 6, [1.5, 1.5])]
    """

    @torch.no_grad()
    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any],
        optimizer_factory: Factory,
        group: GroupLike = None,
        sizes: str | Sequence[int] = "balanced",
        *,
        reduce: Reduce = "mean",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        ranks, what = resolve(group), f"data_parallel.{NAME}"

        def begin() -> tuple[Given, list[Shard], dict[str, str]]:
            given = Given.of(params)
            split = sizes if isinstance(sizes, str) else checked_sizes(sizes, "sizes", ranks.size)
            words = {"sizes": str(split), "reduce": described(reduce)}
            words["bucket_bytes"] = str(at_least(1, bucket_bytes, "bucket_bytes"))
            given.check(ranks)
            found = splits(given.trained, split, ranks.size, bucket_bytes)
            shards = [Shard(each, given.trained, ranks.rank) for each in found]
            return given, shards, words | given.describe()

        (given, shards, _), received = agree_and_share(
            what, begin, lambda one: {"words": one[2], "lanes": free_lanes(ranks)}, ranks
        )
        require_equal(what, [rank["words"] for rank in received])
        self._given, self._shards = given, shards
        others = [value for _, value in sorted(given.others.items())]  # in one order on all ranks
        overwrite([*(shard.row for shard in shards), *others], 0, ranks)
        whole = isinstance(sizes, str) and sizes == WHOLE
        for shard in shards:
            shard.cut_pieces(whole)
        self._pieces = {piece.name: piece for shard in shards for piece in shard.pieces}
        self.optimizer, same = agree_and_share(
            f"{what}: optimizer_factory",
            lambda: made(optimizer_factory, given, self._pieces, whole),
            lambda one: {"the optimizer": type(one).__name__, **options(one)},
            ranks,
        )
        require_equal(what, same)
        params = [[given.trained[name] for name in names] for names, _ in given.groups]
        super().__init__([{"params": own} for own in params], {})
        # options and states are shared with the inner optimizer, so both see each change
        self.defaults, self.state = self.optimizer.defaults, self.optimizer.state
        groups: list[Any] = [Options(self.optimizer, *each) for each in enumerate(params)]
        self.param_groups = groups
        self._held, self._closed, self._reduce_by = self._now_held(), False, reduce
        self._group = weakly(ranks)
        self._states = states_of(self.optimizer, given, shards, whole)
        lane = take_lane(ranks, [rank["lanes"] for rank in received])
        self._reducer = Reducer(shards, ranks, lane, weakref.WeakMethod(self._unscale))
        # parameters and the optimizer have hooks, which must not keep this
        self.optimizer.register_step_pre_hook(self._reducer.refuse_alone)
        self._end = weakref.finalize(self, self._reducer.close)
        self._end.atexit = False

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """Pieces of this rank, by the names of their parameters.

        ``pieces[name].value.grad`` is the sum after :meth:`reduce`, or None. Parameters without
        elements on this rank are absent. A parameter without any elements is on one rank.
        """
        return dict(self._pieces)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep gradients on each rank inside the block; backward sends nothing.

        The next sum includes these gradients, so several micro-batches send the bytes of one.
        Inside the block, methods that sum raise ArgumentError on all ranks.
        """
        before, self._reducer.syncing = self._reducer.syncing, False
        try:
            yield
        finally:
            self._reducer.syncing = before

    def reduce(self) -> None:
        """Sum all gradients since the last sum, and add them to the pieces' ``grad``; collective.

        :meth:`step`, :meth:`clip_grad_norm_` and :meth:`clip_grad_value_` begin with this sum.
        ArgumentError on every rank, if one rank is inside :meth:`accumulate`, has closed the
        optimizer, changed its groups, or moved, converted or unfrozen parameters. With a
        GlobalCount, the error is also raised if a rank has not called ``add``, or if all counts are
        0; the gradients are then dropped.
        """
        self._reduce("reduce")

    @torch.no_grad()
    def _reduce(
        self, what: str, drop: bool = False, compared: Callable[[], dict[str, object]] = dict
    ) -> None:
        """Agree on the method, and bring the gradients of all ranks to the pieces, or drop them."""
        reducer, reduce = self._reducer, self._reduce_by
        count = reduce if isinstance(reduce, GlobalCount) else None

        def ready() -> dict[str, Any]:
            self._check()
            if not drop:
                if not reducer.syncing:
                    raise ArgumentError(
                        "gradients are not summed inside accumulate(). Leave the block on all "
                        "ranks first."
                    )
                reducer.refuse_replaced()
            same = compared()
            if what == "step":  # a scheduler of a rank's own loss sets another lr
                same["numbers in the groups, such as lr"] = numbers(self.optimizer)
            if debugging():
                frozen = [n for n, p in self._given.trained.items() if not p.requires_grad]
                same |= {"frozen parameters": str(frozen)}
                same |= options(self.optimizer) if what == "step" else {}
            had = reducer.needed_rounds() > 0
            if drop:
                reducer.drop_unstarted()
            rows = None if count is None else count.local()
            return {"rounds": reducer.needed_rounds(), "had": had, "count": rows, "same": same}

        name, group = f"{NAME}.{what}", self._group()
        received = share(name, ready, group)
        require_equal(name, [rank["same"] for rank in received])
        had = any(rank["had"] for rank in received)
        if count is not None and (had or what == "step"):
            count.reset()
        divisor = None  # the gradients are dropped
        try:
            if count is not None and had and not drop:
                divisor = total_rows([rank["count"] for rank in received], f"{name} on {group}: ")
            elif not drop:
                divisor = group.size if reduce == "mean" else 1
        finally:
            reducer.finish(max(rank["rounds"] for rank in received))
            settle(self._shards, divisor)

    def _check(self) -> None:
        if self._closed:
            raise ArgumentError("close() was called before. Make another one, on all ranks.")
        for what, value in self._given.others.items():
            if isinstance(value, torch.nn.Parameter) and value.requires_grad:
                raise ArgumentError(
                    f"{what} was frozen when {NAME} was made, and has no owner. Call close() and "
                    "make another, on all ranks."
                )
        module, moved = self._given.module, [n for shard in self._shards for n in shard.moved()]
        if module is not None:
            now = {id(parameter) for parameter in module.parameters()}
            moved += [name for name, p in self._given.trained.items() if id(p) not in now]
        if moved:
            raise ArgumentError(
                f"parameter {moved[0]!r} has been moved, converted or replaced since {NAME} was "
                "made. Move and convert the model before, or call close() and make another, on all "
                "ranks."
            )
        if self._now_held() != self._held:
            raise ArgumentError(
                "the optimizer has other groups or tensors than it was made with, as by "
                "add_param_group(), and their gradients would not be summed. Make another, on all "
                "ranks, of all parameters."
            )

    def _now_held(self) -> list[list[int]]:
        return held(self.optimizer) + held(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients, update this rank's pieces, and gather all pieces; collective.

        Returns the result of `closure`, which is called once before, with gradients enabled.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._reduce("step")
        for shard in self._shards:
            shard.take_over()
        self._reducer.stepping = True
        try:
            if debugging():
                agree(f"{NAME}.step", self.optimizer.step, self._group())
            else:
                self.optimizer.step()
        finally:
            self._reducer.stepping = False
        traffic = self._reducer.traffic()
        for message in [shard.start_gather(traffic) for shard in reversed(self._shards)]:
            message.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the pieces, and gradients that are not summed yet; collective.

        The ``zero_grad`` of the inner optimizer drops only the gradients of the pieces.
        ``model.zero_grad()`` drops nothing, and the next step raises ArgumentError.
        """
        self._reduce("zero_grad", drop=True)
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; collective.

        Arguments are as in :func:`torch.nn.utils.clip_grad_norm_`. Parameters that are sharded over
        the other axis of a mesh count with all their shards; then all ranks of the mesh make this
        call. Returns the norm before scaling, a float64 scalar that is equal on all ranks.
        """

        def compared() -> dict[str, object]:
            if not (max_norm >= 0 and norm_type > 0):
                raise ArgumentError(
                    "max_norm must not be negative, and norm_type must be positive; got "
                    f"{max_norm!r} and {norm_type!r}."
                )
            return {"max_norm": float(max_norm), "norm_type": float(norm_type)}

        self._reduce("clip_grad_norm_", compared=compared)
        pieces = list(self._pieces.values())
        norms = list(self._norms(pieces, norm_type))
        total: torch.Tensor = torch.nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
        torch.nn.utils.clip_grads_with_norm_([piece.value for piece in pieces], max_norm, total)
        return total

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp each element of the gradients to ``[-clip_value, clip_value]``; collective.

        In one process: ``torch.nn.utils.clip_grad_value_(parameters, clip_value)``.
        """

        def compared() -> dict[str, object]:
            if not clip_value >= 0:
                raise ArgumentError(f"clip_value must not be negative; got {clip_value!r}.")
            return {"clip_value": float(clip_value)}

        self._reduce("clip_grad_value_", compared=compared)
        for piece in self._pieces.values():
            if piece.value.grad is not None:
                piece.value.grad.clamp_(-clip_value, clip_value)

    def _norms(self, pieces: Sequence[Piece], order: float) -> torch.Tensor:
        """Return norms over all ranks, one per group over which parameters are sharded."""
        specs = {name: shard_spec(parameter) for name, parameter in self._given.trained.items()}
        groups = {name: None if spec is None else spec.group for name, spec in specs.items()}
        return norms(pieces, groups, order, self._group(), self._shards[0].row)

    def _unscale(self, names: set[str], inverse: torch.Tensor) -> torch.Tensor:
        """Multiply gradients; return whether all were finite, equal on all ranks; collective.

        ``grad`` of parameters calls this for a GradScaler.
        """

        def compared() -> dict[str, object]:
            self._reducer.refuse_absent()
            return {"the scale of the GradScaler": 1 / inverse.item()}

        self._reduce("unscale_", compared=compared)
        pieces = [piece for piece in self._pieces.values() if piece.name in names]
        finite = self._norms(pieces, torch.inf).isfinite().all()
        for piece in pieces:
            if piece.value.grad is not None:
                piece.value.grad.mul_(inverse)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer by the names of parameters.

        ``"state"`` and ``"param_groups"`` have the form of other optimizers in a checkpoint;
        ``"masters"`` has the masters. Tensors like a parameter are
        :class:`varcomm.sharding.Sharded`, with this rank's elements. These tensors share memory
        with the optimizer. ``varcomm.checkpoint`` saves and loads them for any number of ranks and
        any sizes.
        """
        return self._states.state_dict()

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load a saved state into, if the optimizer has no state yet.

        `saved` has the same structure as the result of :meth:`state_dict`; its tensors may have any
        values.
        """
        return self._states.state_dict_for(saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict` for the same pieces; collective.

        For other pieces, and on other numbers of ranks, use :func:`varcomm.checkpoint.load`.
        ArgumentError on every rank, if state_dict has other groups, names or pieces; then nothing
        is changed.
        """

        def check() -> None:
            self._check()
            self._states.check(state_dict)

        agree(f"{NAME}.load_state_dict", check, self._group())
        self._states.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ArgumentError: the parameters are already divided among the ranks."""
        if "_reducer" in vars(self):
            raise ArgumentError(f"{NAME}.add_param_group: parameters cannot be added. {ANOTHER}")
        super().add_param_group(param_group)

    def _refuse_hook(self, *_: object, **__: object) -> NoReturn:
        """Raise ArgumentError: hooks of states are not called."""
        raise ArgumentError(
            f"{NAME}: hooks of state_dict and load_state_dict are not called. Change the result of "
            "state_dict() instead."
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __getstate__(self) -> NoReturn:
        raise ArgumentError(
            f"{NAME}: the optimizer cannot be copied or pickled. Save its state_dict() with "
            "varcomm.checkpoint."
        )

    def close(self) -> None:
        """Release the parameters, so that another optimizer can use them.

        Gradients in flight are lost.
        """
        self._end()
        self._closed = True
