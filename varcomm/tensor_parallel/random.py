"""Named streams of random numbers, identical on all ranks or different on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from varcomm.errors import ArgumentError
from varcomm.ops.compilation import uncompiled
from varcomm.sizes import exact_int
from varcomm.tensor_parallel.layout import agreed
from varcomm.transport.group import GroupLike, resolve

T = TypeVar("T")

# The states of a stream, by kind of device.
States = dict[str, Tensor]

# The states of all streams, and the names of those whose block is open.
Snapshot = tuple[dict[str, States], frozenset[str]]

_KINDS = {"cpu", "cuda"}

_TRACKER = ModuleTracker()  # whose `is_bw` says whether backward runs


class RandomStreams:
    """Streams of random numbers, each with its own seed; the constructor is collective.

    The stream ``"replicated"`` is identical on all ranks of the group, for replicated activations.
    The stream ``"sharded"`` differs on each rank, for sharded activations. :meth:`add` adds more.

    Parameters
    ----------
    seed : int
        Identical on all ranks of the group.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that hold shards of one model; None means the whole world.
    **coordinates : int
        Position of this group among others, identical on all its ranks. For different numbers in
        each replica of the model, pass a coordinate that differs, such as
        ``data=mesh["data"].get_local_rank()``.

    Raises
    ------
    ArgumentError
        If `seed` is not an integer.

    See Also
    --------
    checkpoint, parallelize

    Notes
    -----
    A stream's seed is a hash (BLAKE2b, 63 bits) of `seed`, name, coordinates and, for
    ``"sharded"``, the rank.

    Communication: one round of messages in the constructor, which compares the arguments.

    In one process: one :class:`torch.Generator` per stream.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import RandomStreams
    >>> def fn(rank):
    ...     streams = RandomStreams(7)
    ...     with streams.fork("replicated"):
    ...         same = torch.rand(()).item()
    ...     with streams.fork("sharded"):
    ...         return same, torch.rand(()).item()
    >>> (a, b), (c, d) = varcomm.launch(fn, 2)
    >>> a == c, b == d
    (True, False)
    """

    def __init__(self, seed: int, group: GroupLike = None, **coordinates: int) -> None:
        ranks = resolve(group)

        # coordinates that differ between ranks of a group are for add()
        own = partial(_integers, {"seed": seed, **coordinates})
        self._coordinates, _ = agreed("RandomStreams", own, ranks)
        self._seed = self._coordinates.pop("seed")
        self._seeds: dict[str, int] = {}
        self._now: Snapshot = {}, frozenset()
        self._add("replicated", None, {})
        self._add("sharded", ranks.rank, {})

    def add(self, name: str, **coordinates: int) -> None:
        """Add a stream; equal seed, name and coordinates make equal streams; no communication.

        `coordinates` are added to the coordinates of the constructor, and may differ between ranks:
        ``streams.add("expert", expert=rank // 2)``.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"RandomStreams.add: name must be a string; got {name!r}.")
        if name in self._seeds:
            raise ArgumentError(f"RandomStreams.add: there is a stream {name!r} already.")
        self._add(name, None, _integers(coordinates))

    def _add(self, name: str, rank: int | None, more: Mapping[str, int]) -> None:
        where = sorted(self._coordinates.items()), rank, sorted(more.items())
        digest = blake2b(repr((self._seed, name, where)).encode(), digest_size=8).digest()
        self._seeds[name] = int.from_bytes(digest, "little") >> 1  # as an int64 holds it
        self._now = {**self._now[0], name: {}}, self._now[1]

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from a stream with torch's default generators until the ``with`` block ends.

        The default generators are the CPU's and, if CUDA is in use, the current CUDA device's.
        After the block, the generators have their previous state. Blocks of different streams may
        be nested. Raises ArgumentError if the stream is unknown, its block is open, or CUDA is used
        for the first time inside. The error is also raised in backward, if
        :func:`torch.utils.checkpoint.checkpoint` runs a block again: use
        :func:`varcomm.tensor_parallel.checkpoint`.
        """
        if name not in self._seeds:
            raise ArgumentError(f"fork: there is no stream {name!r}, only {sorted(self._seeds)}.")
        if name in self._now[1]:
            raise ArgumentError(
                f"fork: the block of {name!r} is open. Draw there, or add() another stream."
            )
        for replay in _replays():
            replay.meet(self)
        generators = _generators()
        before, (states, opened) = _states(generators), self._now
        for kind, generator in generators.items():
            if kind in states[name]:
                generator.set_state(states[name][kind])
            else:
                generator.manual_seed(self._seeds[name])
        self._now = states, opened | {name}
        try:
            yield
        finally:
            states, opened = self._now  # blocks inside have changed other streams
            self._now = {**states, name: states[name] | _states(generators)}, opened - {name}
            for kind, generator in generators.items():
                generator.set_state(before[kind])
        if late := _generators().keys() - generators.keys():
            raise ArgumentError(
                f"fork: {sorted(late)} was used for the first time inside {name!r}, and did not "
                "draw from the stream. Call torch.cuda.init() first."
            )

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return seed and states of all streams of this rank, as tensors; not inside fork()."""
        self._check_closed("state_dict")
        return {
            name: {
                "seed": torch.tensor(self._seeds[name], dtype=torch.int64, device="cpu"),
                **{kind: state.clone() for kind, state in states.items()},
            }
            for name, states in self._now[0].items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore all streams; raise ArgumentError, without a change, if `state` does not fit."""
        self._check_closed("load_state_dict")
        if state.keys() != self._seeds.keys():
            raise ArgumentError(
                f"load_state_dict: the state is of streams {sorted(state)}, but these are "
                f"{sorted(self._seeds)}. Add them first."
            )
        loaded: dict[str, States] = {}
        for name, entry in state.items():
            loaded[name] = {k: x.detach().to("cpu", copy=True) for k, x in entry.items()}
            seed = loaded[name].pop("seed", None)
            if seed is None or int(seed) != self._seeds[name] or loaded[name].keys() - _KINDS:
                raise ArgumentError(
                    f"load_state_dict: the state of {name!r} is of another seed, rank, device or "
                    "coordinates. Each rank loads what it has saved itself."
                )
        self._now = loaded, frozenset()

    def _check_closed(self, what: str) -> None:
        if self._now[1]:
            raise ArgumentError(f"{what}: {sorted(self._now[1])} is open. Call it after fork().")


class Replay:
    """Streams that a function forks in its first run, restored for its later runs only."""

    def __init__(self) -> None:
        self._met: dict[RandomStreams, Snapshot] = {}
        self.is_complete = False  # the first run has ended

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function that restores streams in every run after its first."""

        def run(*args: Any) -> T:
            now = {streams: streams._now for streams in self._met}
            for streams, then in self._met.items():
                for replay in _running.get():
                    replay.meet(streams)  # as it is before it is restored
                streams._now = then
            token = _running.set((*_running.get(), self))
            try:
                return function(*args)
            finally:
                self.is_complete = True
                _running.reset(token)
                for streams, state in now.items():
                    streams._now = state

        return run

    def meet(self, streams: RandomStreams) -> None:
        """Record the streams that the first run is about to fork."""
        if streams not in self._met:
            if self.is_complete:
                raise ArgumentError(
                    "fork: a checkpointed function forks streams in a later run that it did not "
                    "fork in the first. It must do the same each time."
                )
            self._met[streams] = streams._now


# Running replays of this thread, the outermost first.
_running: ContextVar[tuple[Replay, ...]] = ContextVar("running", default=())


@uncompiled("fork() changes generators, which a graph cannot; compile inside of its block")
def _replays() -> tuple[Replay, ...]:
    replays = _running.get()
    runs_again = torch.is_grad_enabled() and _TRACKER.is_bw
    if runs_again and not any(replay.is_complete for replay in replays):
        raise ArgumentError(
            "fork: called again in backward, as by torch.utils.checkpoint, when the stream has "
            "gone on. Use varcomm.tensor_parallel.checkpoint, which puts streams back."
        )
    return replays


def _generators() -> dict[str, torch.Generator]:
    found = {"cpu": torch.default_generator}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def _states(generators: Mapping[str, torch.Generator]) -> States:
    return {kind: generator.get_state() for kind, generator in generators.items()}


def _integers(values: Mapping[str, object]) -> dict[str, int]:
    found = {name: exact_int(value) for name, value in values.items()}
    for name, value in found.items():
        if value is None:
            raise ArgumentError(f"{name} must be an integer; got {values[name]!r}.")
    return found  # type: ignore[return-value]
