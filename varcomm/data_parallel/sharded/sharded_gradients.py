"""``ShardedGradients``: each rank owns a piece of the gradients and of the optimizer's states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from varcomm.data_parallel.buckets import BUCKET_BYTES, cut
from varcomm.data_parallel.global_count import Reduce, total_rows
from varcomm.data_parallel.sharded.arguments import NAME, OTHERS, Given, Settings, read
from varcomm.data_parallel.sharded.optimizer import Factory, States, clip_, held, made, options
from varcomm.data_parallel.sharded.reducer import Reducer
from varcomm.data_parallel.sharded.shard import WHOLE, Piece, Shard, splits, wait_in
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops import packing
from varcomm.ops.operator import checking
from varcomm.sharding import shard_spec
from varcomm.transport.agreement import agree, agree_and_share, debugging, share
from varcomm.transport.auxiliary_group import free_lanes, take_lane, weakly
from varcomm.transport.engine import wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["ShardedGradients"]


class ShardedGradients:
    """Optimizer of which each rank runs a part: its pieces of the parameters, and their states.

    Every rank has all parameters. Gradients are summed over ranks onto the ranks that own their
    pieces; :meth:`step` updates the pieces and gathers them on all ranks. Gradients, states and
    fp32 masters take ``n`` elements per rank in place of ``N``, and the bytes are those of an
    all-reduce of gradients.

    Collective: every rank makes it of the same model. Parameters and buffers get the values of rank
    0; later, statistics of batch norms are each rank's own. Parameters become contiguous views of
    one row per bucket, and stay the same objects.

    Parameters
    ----------
    params : Module or iterable
        A Module; or an iterable of parameters, of ``(name, parameter)``, or of dicts with
        ``"params"`` and options, as torch's optimizers take them; no sets. Frozen parameters are
        only made equal. Without a module or names, states are saved by numbers, ``"group.place"``.
    optimizer_factory : callable
        ``optimizer_factory(groups)`` returns the optimizer of this rank's pieces:
        ``lambda groups: torch.optim.AdamW(groups, lr=1e-3)``. The groups are those of `params`,
        with pieces in place of parameters, and may be empty. The update of an element must not
        depend on the rest of its parameter, unless `sizes` is ``"whole-parameters"``.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    sizes : "balanced", "whole-parameters" or sequence of int
        Elements per rank. A list has one int per rank, zeros allowed, that sum to the number of
        trained elements. Every bucket is spread over all ranks. ``"whole-parameters"``: each
        parameter has one owner, whose optimizer gets it in its own shape, as Muon needs it.
    module : torch.nn.Module, optional
        The module of the parameters, if `params` is not that module. All its other parameters and
        buffers are made equal.
    reduce : "mean", "sum" or GlobalCount
        ``"mean"`` divides by the number of ranks; a :class:`varcomm.data_parallel.GlobalCount`
        divides by the rows that all ranks have counted since the last sum.
    fp32_reduce_scatter : bool
        Sum and divide gradients narrower than 4 bytes in fp32; they travel narrow. If False, they
        are divided in their own dtype, to which the sum is rounded before.
    gradient_predivide_factor : float, optional
        Divisor of each part before parts are added; the sum is divided by the rest. By default a
        power of two near ``sqrt(P)`` for a mean, else 1.
    fp32_masters : bool
        Let the optimizer update fp32 copies of the pieces of parameters narrower than 4 bytes.
        Values written into the model's parameters between steps are copied to the masters.
    cpu_offload : bool
        Keep gradients, masters and states of the pieces on the CPU.
    overlap_forward : bool
        Let :meth:`step` return while pieces are gathered. Each module in `module` waits in its
        forward for its own parameters, modules of torch.nn for all in them. Until then parameters
        are NaN to any other reader, and must not be written; :meth:`wait` and ``state_dict()`` of a
        module wait for all.
    bucket_bytes : int
        Size of a message of gradients.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        The result of the factory, for learning rate schedulers and hooks; its ``step`` raises.

    Raises
    ------
    ArgumentError
        On every rank: if `params` holds no trained parameter, or one that is lazy, sparse, a
        DTensor, on another device than the others, in another ShardedGradients, or has a gradient;
        if a parameter shares memory with another tensor; if the optimizer holds other tensors than
        its groups; if another argument is wrong. In backward, on its rank, for
        ``create_graph=True`` and gradients of another dtype.
    DisagreementError
        On every rank, if parameters, arguments, options of the optimizer or called methods differ.
    GroupError
        If this rank is not in `group`, or parameters are on a device without an engine.

    Notes
    -----
    :meth:`step`, :meth:`reduce`, :meth:`clip_grad_norm_` and :meth:`zero_grad` are collective; each
    begins with a message of about 1 KiB per rank in which ranks agree. Backwards are not: ranks may
    run different numbers of them, or none, and any of them may leave out parameters. During
    backward, a bucket is packed, freed and sent on an auxiliary group as soon as its gradients and
    all buckets before it are complete, from the last parameters to the first. The first of the
    collective methods sums the rest. Inside :func:`varcomm.debug`, sums start there.

    Each backward outside :meth:`no_sync` may send all buckets; several backwards before a step add
    up exactly. Register no hooks with ``register_post_accumulate_grad_hook`` that read gradients.
    A backward that fails leaves the gradients that it has computed; :meth:`zero_grad` drops them.

    Communication: of ``N`` elements this rank owns ``n``. A sum sends ``N - n`` elements of the
    gradients' dtype and receives ``(P - 1) n``, and one value per peer for each parameter in a
    piece of a bucket. :meth:`step` sends ``(P - 1) n`` elements of the parameters' dtype and
    receives ``N - n``. Sums are in rank order, the same at every run, and parameters are equal on
    all ranks bit for bit. Sums in fp32 of narrow gradients ``g_r`` are within
    ``(P + 1) 2**-24 sum_r |g_r|`` of the exact sum, divided.

    The method is ZeRO's second stage (Rajbhandari et al., SC20).

    In one process: ``optimizer_factory(params)``, and backward from the mean of the losses of all
    ranks.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import ShardedGradients
    >>> def fn(rank):
    ...     model = torch.nn.Linear(2, 3, bias=False)
    ...     torch.nn.init.ones_(model.weight)
    ...     optimizer = ShardedGradients(
    ...         model, lambda groups: torch.optim.SGD(groups, lr=0.5), sizes=[4, 2]
    ...     )
    ...     model(torch.full((1, 2), rank + 1.0)).sum().backward()
    ...     optimizer.reduce()
    ...     own = optimizer.pieces["weight"]
    ...     optimizer.step()
    ...     return (own.start, own.stop), own.value.grad.tolist(), model.weight.tolist()[0]
    >>> varcomm.launch(fn, 2)[0]
    ((0, 4), [1.5, 1.5, 1.5, 1.5], [0.25, 0.25])
    """

    @torch.no_grad()
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
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        ranks, what = resolve(group), f"data_parallel.{NAME}"
        asked = {
            "sizes": sizes,
            "reduce": reduce,
            "fp32_reduce_scatter": fp32_reduce_scatter,
            "gradient_predivide_factor": gradient_predivide_factor,
            "fp32_masters": fp32_masters,
            "cpu_offload": cpu_offload,
            "overlap_forward": overlap_forward,
            "bucket_bytes": bucket_bytes,
        }

        def begin() -> tuple[Settings, Given, list[Shard]]:
            given = read(params, module)
            settings = Settings(asked, given.module, ranks.size)
            given.check(ranks)
            own = given.of("trained")
            found = splits(own, settings.sizes, ranks.size, settings.bucket_bytes)
            return settings, given, [Shard(split, own, ranks.rank) for split in found]

        def words(begun: tuple[Settings, Given, list[Shard]]) -> dict[str, Any]:
            own = {"arguments": begun[0].words, **begun[1].describe()}
            return {"words": own, "free lanes": free_lanes(ranks)}

        (settings, given, shards), told = agree_and_share(what, begin, words, ranks)
        _compare(what, [rank["words"] for rank in told])
        values = [*(shard.row for shard in shards), *given.of(*OTHERS).values()]
        _copy_from_rank_0(values, ranks, settings.bucket_bytes)
        whole = settings.sizes == WHOLE
        for shard in shards:
            shard.cut_pieces(whole, *settings.of_pieces(shard.row))
        self._pieces = {piece.name: piece for shard in shards for piece in shard.pieces}
        self.optimizer, same = agree_and_share(
            f"{what}: optimizer_factory",
            lambda: made(optimizer_factory, given, self._pieces, whole),
            lambda one: {"the optimizer": {"kind": type(one).__name__, **options(one)}},
            ranks,
        )
        _compare(what, same)
        self._held = held(self.optimizer)
        self._stepping = self._closed = False
        me = weakref.ref(self)
        self.optimizer.register_step_pre_hook(lambda *_: _refuse_alone(me()))

        self._given, self._shards, self._settings = given, shards, settings
        self._trained = given.of("trained")
        self._group = weakly(ranks)
        self._states = States(self.optimizer, given, shards, whole)
        lane = take_lane(ranks, [rank["free lanes"] for rank in told])
        self._reducer = Reducer(shards, ranks, lane, settings)
        removals = [self._reducer.close]
        if settings.overlap_forward and given.module is not None:
            removals += wait_in(given.module, shards)
        # parameters and modules have hooks, which must not keep this
        self._end = weakref.finalize(self, _end, shards, removals)
        self._end.atexit = False

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """Pieces of this rank, by the names of their parameters.

        ``pieces[name].value.grad`` is the sum after :meth:`reduce`, or None. A parameter of which
        this rank owns no element is absent; each parameter without elements is on one rank.
        """
        return dict(self._pieces)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of :attr:`optimizer`; change their options identically on all ranks."""
        return self.optimizer.param_groups

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no sums in the backwards inside: gradients add up on each rank.

        They are part of the next sum, so several micro-batches send the bytes of one.
        """
        before, self._reducer.syncing = self._reducer.syncing, False
        try:
            yield
        finally:
            self._reducer.syncing = before

    def wait(self) -> None:
        """Wait until the parameters have their new values, with ``overlap_forward=True``."""
        for shard in self._shards:
            shard.wait()

    def reduce(self) -> None:
        """Sum all gradients since the last sum, and add them to the pieces' ``grad``; collective.

        :meth:`step` and :meth:`clip_grad_norm_` do this first; call it to read the pieces'
        gradients.

        Raises
        ------
        ArgumentError
            On every rank, if on one of them this was closed, parameters have been moved, converted
            or unfrozen, or the optimizer has other groups; with a GlobalCount, if a rank has
            counted nothing, or all have counted 0. In the latter cases the gradients are dropped.
        DisagreementError
            On every rank, if ranks call different methods.
        """
        self._reduce("reduce")

    @torch.no_grad()
    def _reduce(self, what: str, drop: bool = False) -> None:
        """Agree on the method, and bring the gradients of all ranks to the pieces, or drop them."""
        reducer, count = self._reducer, self._settings.count

        def ready() -> dict[str, Any]:
            self._check()
            had = reducer.needed_rounds() > 0
            if drop:
                reducer.drop_unstarted()
            words = {"rounds": reducer.needed_rounds(), "had": had, "same": {}}
            if debugging():
                frozen = [n for n, p in self._trained.items() if not p.requires_grad]
                optimizer = options(self.optimizer) if what == "step" else {}
                words["same"] = {"frozen": {"parameters": str(frozen)}, "the optimizer": optimizer}
            return words | {"count": None if count is None else count.local()}

        if not self._closed:
            self.wait()
        name, group = f"{NAME}.{what}", self._group()
        told = share(name, ready, group)
        if all(words["same"] for words in told):
            _compare(name, [words["same"] for words in told])
        reducer.finish(max(words["rounds"] for words in told))
        divisor, wrong = None if drop else self._settings.divisor, None
        had = any(words["had"] for words in told)
        if count is not None and (had or what == "step"):
            count.reset()
        if count is not None and had and not drop:
            try:
                divisor = total_rows([words["count"] for words in told], f"{name} on {group}: ")
            except ArgumentError as error:
                wrong = error
        for shard in self._shards:
            shard.settle(divisor and divisor / self._settings.before)
        if wrong is not None:
            raise wrong

    def _check(self) -> None:
        if self._closed:
            raise ArgumentError("close() was called before. Make another one, on all ranks.")
        for name, parameter in self._given.of("frozen").items():
            if parameter.requires_grad:
                raise ArgumentError(
                    f"parameter {name!r} was frozen when {NAME} was made, and has no owner. Call "
                    "close() and make another, on all ranks."
                )
        module, moved = self._given.module, [n for shard in self._shards for n in shard.moved()]
        if module is not None:
            now = {id(parameter) for parameter in module.parameters()}
            moved += [name for name, p in self._trained.items() if id(p) not in now]
        if moved:
            raise ArgumentError(
                f"parameter {moved[0]!r} has been moved, converted or replaced since {NAME} was "
                "made, or filled before wait(). Move and convert the model before, or call close() "
                "and make another, on all ranks."
            )
        self._check_groups("")

    def _check_groups(self, where: str) -> None:
        if held(self.optimizer) != self._held:
            raise ArgumentError(
                f"{where}the optimizer has other groups or tensors than it was made with, as by "
                "add_param_group(), and their gradients would not be summed. Make another, on all "
                "ranks, of all parameters."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients, update this rank's pieces, and gather those of all; collective.

        Parameters
        ----------
        closure : callable, optional
            Called once before, with gradients enabled: evaluates the loss and its backward.

        Returns
        -------
        object
            The result of `closure`, or None.

        Raises
        ------
        ArgumentError, DisagreementError
            On every rank, as of :meth:`reduce`. Inside :func:`varcomm.debug`, if the options of the
            optimizer differ.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._reduce("step")
        for shard in self._shards:
            shard.take_over()
        self._stepping = True
        try:
            if debugging():
                agree(f"{NAME}.step", self.optimizer.step, self._group())
            else:
                self.optimizer.step()
        finally:
            self._stepping = False
        overlap = self._settings.overlap_forward
        for shard in reversed(self._shards):  # in the opposite order of backward
            shard.start_gather(self._reducer.traffic(), hidden=overlap)
        if not overlap:
            self.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the pieces, and all that have not been summed; collective.

        The optimizer's own ``zero_grad`` drops only the former, and ``model.zero_grad()`` drops
        nothing: parameters have no ``grad`` after backward.
        """
        self._reduce("zero_grad", drop=True)
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them is at most `max_norm`; collective.

        :func:`torch.nn.utils.clip_grad_norm_` would find no gradients in the parameters. Parameters
        that are sharded over the other axis of a mesh count with all their shards; then all ranks
        of the mesh make this call.

        Parameters
        ----------
        max_norm : float
        norm_type : float
            The order ``p > 0``; ``inf`` is the largest absolute value.
        error_if_nonfinite : bool
            Raise torch's RuntimeError, on every rank, if the norm is NaN or infinite.

        Returns
        -------
        torch.Tensor
            The norm before: a scalar of float64, the same on all ranks.

        Raises
        ------
        ArgumentError
            If `max_norm` or `norm_type` is not a number, or too small; and as of :meth:`reduce`.
        DisagreementError
            Inside :func:`varcomm.debug`, on every rank, if they differ.
        """
        self._reduce("clip_grad_norm_")
        pieces, given = list(self._pieces.values()), self._trained.items()
        specs = {name: shard_spec(parameter) for name, parameter in given}
        return clip_(pieces, specs, max_norm, norm_type, self._group(), error_if_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer by the names of parameters.

        Returns
        -------
        dict
            ``"state"`` and ``"param_groups"``, as of any other optimizer whose states are kept by
            name, and ``"masters"``, by name, if the optimizer updates masters. Tensors like a
            parameter are :class:`varcomm.sharding.Sharded`, with this rank's elements: for
            ``varcomm.checkpoint``, which loads them on any number of ranks and for other `sizes`.
            They are the optimizer's own, not copies.
        """
        with checking(f"{NAME}.state_dict", self._group()) as where:
            self._check_groups(where)
        return self._states.get()

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load a saved state into, if the optimizer has no state yet.

        `saved` has the structure of the result of :meth:`state_dict`, with any tensors.
        """
        with checking(f"{NAME}.state_dict_for", self._group()) as where:
            self._check_groups(where)
        return self._states.get_for(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict` for the same pieces; collective.

        For other pieces, and on other numbers of ranks, use :func:`varcomm.checkpoint.load`.

        Raises
        ------
        ArgumentError
            On every rank, if `state` is of other groups, names or pieces. Then nothing is changed.
        """
        self.wait()

        def check() -> None:
            self._check()
            self._states.check(state)

        agree(f"{NAME}.load_state_dict", check, self._group())
        self._states.load(state)

    def close(self) -> None:
        """Leave the parameters to another optimizer. Gradients in flight are lost."""
        self._end()
        self._closed = True

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        raise ArgumentError(
            f"{NAME}: a GradScaler looks for infinities in this rank's gradients alone, and ranks "
            "would scale and skip differently. Train in bfloat16, or scale the loss by a constant."
        )


def _refuse_alone(own: ShardedGradients | None) -> None:
    """Raise if the inner optimizer steps by itself."""
    if own is not None and not own._stepping:
        raise ArgumentError(
            f"{NAME}: the inner optimizer updates pieces, and would not gather them. Call step() "
            f"of the {NAME}."
        )


def _compare(what: str, given: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
    """Raise on every rank, if the words of ranks differ; without communication."""
    for word, first in given[0].items():
        for rank, own in enumerate(given):
            for name in dict.fromkeys([*first, *own[word]]):
                here, there = first.get(name, "none"), own[word].get(name, "none")
                if here != there:
                    raise DisagreementError(
                        f"{what}: ranks disagree on {word}: for {name!r}, rank 0 has {here}; rank "
                        f"{rank} has {there}."
                    )


def _copy_from_rank_0(values: Sequence[torch.Tensor], group: Group, bucket_bytes: int) -> None:
    """Overwrite tensors by those of rank 0, in buckets; collective."""
    for members in cut(dict(enumerate(values)), range(len(values)), bucket_bytes):
        own = [values[index].detach() for index in members]
        # one tensor of its own may be large: no copy, if it is contiguous
        flat = own[0].reshape(-1) if len(own) == 1 else torch.cat([x.reshape(-1) for x in own])
        with explained(NAME, group):
            wait_for(packing.broadcast("broadcast", group, flat, 0))
        if group.rank:
            for value, part in zip(own, flat.split([x.numel() for x in own]), strict=True):
                value.copy_(part.view(value.shape))


def _end(shards: Sequence[Shard], removals: Sequence[Callable[[], None]]) -> None:
    for shard in shards:
        shard.wait()
    for remove in removals:
        remove()
