"""Named streams of random numbers: which ranks draw alike, and which do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.autograd import uncompiled
from varcomm.sizes import exact_int
from varcomm.transport.agreement import share
from varcomm.transport.group import GroupLike, resolve

__all__ = ["RandomStreams", "Replay"]

# The states of a stream, by kind of device.
States = dict[str, torch.Tensor]

_KINDS = ("cpu", "cuda")


class RandomStreams:
    """Streams of random numbers, each with a seed of its own; collective where it is made.

    Two are there from the start, for what tensor-parallel layers draw: ``"replicated"`` is the same
    on all ranks of the group, for activations of which every rank has a copy, and ``"sharded"`` is
    another one on each rank, for activations that are sharded. :meth:`add` makes others.

    Parameters
    ----------
    seed : int
        The same on all ranks of the group.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that hold shards of one model; None is the whole world.
    **coordinates : int
        Where this group stands among others, by names of your choice; the same on all its ranks.
        Replicas of the model draw alike unless they differ here:
        ``data=mesh["data"].get_local_rank()``.

    Raises
    ------
    ArgumentError
        On every rank, if `seed` or a coordinate is not an integer on one of them.
    DisagreementError
        On every rank, if they have other seeds or coordinates.

    Notes
    -----
    A stream's seed is a hash (BLAKE2b, 63 bits) of `seed`, its name, the coordinates and, for
    ``"sharded"``, the rank. So those of nearby seeds and ranks have nothing in common, as they
    have where ranks are added to seeds. Generators of CUDA take all of it, torch's of the CPU 32
    bits. What a stream draws on one kind of device says nothing about the other.

    Streams are torch's: ``random`` and ``numpy.random`` are left alone.

    Communication: one round of messages, to agree. Nothing else communicates.

    In one process: one :class:`torch.Generator` for each stream.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import RandomStreams
    >>> def fn(rank):
    ...     streams = RandomStreams(7)
    ...     with streams.fork("replicated"):
    ...         alike = torch.rand(()).item()
    ...     with streams.fork("sharded"):
    ...         return alike, torch.rand(()).item()
    >>> (a, b), (c, d) = varcomm.launch(fn, 2)
    >>> a == c, b == d
    (True, False)
    """

    def __init__(self, seed: int, group: GroupLike = None, **coordinates: int) -> None:
        ranks = resolve(group)
        told = share("RandomStreams", lambda: (_int(seed, "seed"), _ints(coordinates)), ranks)
        if any(other != told[0] for other in told):
            said = "; ".join(
                f"rank {rank} has seed {seed} and {coordinates}"
                for rank, (seed, coordinates) in enumerate(told)
            )
            raise DisagreementError(
                f"RandomStreams: ranks disagree: {said}. Let one group have one seed; what differs "
                "between ranks of a group is for add()."
            )
        self._seed, self._coordinates = told[0]
        self._seeds: dict[str, int] = {}
        self._states: dict[str, States] = {}
        self._open: frozenset[str] = frozenset()
        self._add("replicated", None, {})
        self._add("sharded", ranks.rank, {})

    def add(self, name: str, **coordinates: int) -> None:
        """Add a stream, the same wherever seed, name and coordinates are; no communication.

        `coordinates` are in addition to those of the constructor, and may differ between ranks.

        Raises
        ------
        ArgumentError
            If `name` is not a string or is there already, or a coordinate is not an integer.

        Examples
        --------
        >>> import torch, varcomm
        >>> from varcomm.tensor_parallel import RandomStreams
        >>> def fn(rank):
        ...     streams = RandomStreams(7)
        ...     streams.add("expert", expert=rank // 2)
        ...     with streams.fork("expert"):
        ...         return torch.rand(()).item()
        >>> a, b, c = varcomm.launch(fn, 3)
        >>> a == b, b == c
        (True, False)
        """
        if not isinstance(name, str):
            raise ArgumentError(f"RandomStreams.add: name must be a string; got {name!r}.")
        if name in self._seeds:
            raise ArgumentError(f"RandomStreams.add: there is a stream {name!r} already.")
        self._add(name, None, _ints(coordinates))

    def _add(self, name: str, rank: int | None, more: Mapping[str, int]) -> None:
        where = sorted(self._coordinates.items()), rank, sorted(more.items())
        digest = blake2b(repr((self._seed, name, where)).encode(), digest_size=8).digest()
        self._seeds[name] = int.from_bytes(digest, "little") >> 1  # as an int64 holds it
        self._states[name] = {}

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Let torch's default generators go on with a stream, until the ``with`` block ends.

        Those are the generator of the CPU and that of the current CUDA device, if CUDA is in use.
        Afterwards they are as they were, also where the block raises, and the stream goes on from
        here the next time. Blocks of other streams may be nested.

        Parameters
        ----------
        name : str
            The stream.

        Raises
        ------
        ArgumentError
            If there is no such stream, or this one is under way; if CUDA is used for the first time
            inside; or in backward, unless it is :func:`varcomm.tensor_parallel.checkpoint` that
            runs its function again. Under torch.utils.checkpoint the stream would have gone on
            since, and gradients would be wrong.
        """
        if name not in self._seeds:
            raise ArgumentError(f"fork: there is no stream {name!r}, only {sorted(self._seeds)}.")
        if name in self._open:
            raise ArgumentError(
                f"fork: {name!r} is under way. Draw from it there, or add() another stream."
            )
        for replay in _replays():
            replay.meet(self)
        generators = _generators()
        before = {kind: generator.get_state() for kind, generator in generators.items()}
        for kind, generator in generators.items():
            if kind in self._states[name]:
                generator.set_state(self._states[name][kind])
            else:
                generator.manual_seed(self._seeds[name])
        self._open |= {name}
        try:
            yield
        finally:
            after = {kind: generator.get_state() for kind, generator in generators.items()}
            # as a new one: those who have taken down the states keep what they have
            self._states[name] = {**self._states[name], **after}
            self._open -= {name}
            for kind, generator in generators.items():
                generator.set_state(before[kind])
        if late := _generators().keys() - generators.keys():
            raise ArgumentError(
                f"fork: {sorted(late)} was used for the first time inside {name!r}, whose numbers "
                "there were not of the stream. Call torch.cuda.init() first."
            )

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return where all streams are: for each its seed, and a state for each kind of device.

        Each rank has its own. Tensors only, so ``torch.load(..., weights_only=True)`` takes it.

        Raises
        ------
        ArgumentError
            Inside :meth:`fork`.
        """
        self._check_closed("state_dict")
        return {
            name: {
                "seed": torch.tensor(self._seeds[name], dtype=torch.int64, device="cpu"),
                **{kind: state.clone() for kind, state in states.items()},
            }
            for name, states in self._states.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put all streams where they were.

        Raises
        ------
        ArgumentError
            Inside :meth:`fork`; if `state` is of other streams, or of another seed, rank or
            coordinates; or if it holds something else than states. Then nothing changes.
        """
        self._check_closed("load_state_dict")
        if state.keys() != self._seeds.keys():
            raise ArgumentError(
                f"load_state_dict: the state is of streams {sorted(state)}, but these are "
                f"{sorted(self._seeds)}. Add them first."
            )
        loaded: dict[str, States] = {}
        for name, entry in state.items():
            loaded[name] = {
                kind: _state(name, kind, entry[kind]) for kind in entry.keys() - {"seed"}
            }
            if "seed" not in entry or int(entry["seed"]) != self._seeds[name]:
                raise ArgumentError(
                    f"load_state_dict: the state of {name!r} is of another seed, rank or "
                    "coordinates. Each rank loads what it has saved itself."
                )
        self._states = loaded

    def _check_closed(self, what: str) -> None:
        if self._open:
            raise ArgumentError(f"{what}: {sorted(self._open)} is under way. Call it after fork().")


class Replay:
    """What streams a function has forked in its first run, for those that follow.

    A run after the first draws from each stream what the first has drawn, and leaves all streams
    where they were before it. Default generators are not taken care of.
    """

    def __init__(self) -> None:
        self._met: dict[RandomStreams, tuple[dict[str, States], frozenset[str]]] = {}
        self._complete = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Surround a run of the function."""
        now = {streams: _taken_down(streams) for streams in self._met}
        for streams, then in self._met.items():
            for around in _running.get():
                around.meet(streams)  # as it is now, and not as it was then
            _put(streams, then)
        token = _running.set((*_running.get(), self))
        try:
            yield
        finally:
            self._complete = True
            _running.reset(token)
            for streams, state in now.items():
                _put(streams, state)

    def meet(self, streams: RandomStreams) -> None:
        """Take down where streams are which the first run is about to fork."""
        if streams not in self._met:
            if self._complete:
                raise ArgumentError(
                    "fork: a checkpointed function forks streams, when it is run again, that it "
                    "did not in its first run. It must do the same each time."
                )
            self._met[streams] = _taken_down(streams)


# The replays that are under way in this thread, the outermost first.
_running: ContextVar[tuple[Replay, ...]] = ContextVar("running", default=())


@uncompiled("fork() changes generators, of which graphs know nothing; compile inside of its block")
def _replays() -> tuple[Replay, ...]:
    running = _running.get()
    first = not any(replay._complete for replay in running)
    if first and torch._C._current_graph_task_id() != -1:
        raise ArgumentError(
            "fork: called in backward, as torch.utils.checkpoint does to compute anew. The stream "
            "has gone on since. Take varcomm.tensor_parallel.checkpoint, which puts it back."
        )
    return running


def _taken_down(streams: RandomStreams) -> tuple[dict[str, States], frozenset[str]]:
    return dict(streams._states), streams._open


def _put(streams: RandomStreams, then: tuple[dict[str, States], frozenset[str]]) -> None:
    streams._states, streams._open = dict(then[0]), then[1]


def _generators() -> dict[str, torch.Generator]:
    """Return the generators that torch's functions draw from here and now."""
    found = {"cpu": torch.default_generator}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def _state(name: str, kind: Any, state: Any) -> torch.Tensor:
    """Return a copy of what is a generator's state, for all that can be told without the device."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or kind not in _KINDS:
        raise ArgumentError(
            f"load_state_dict: {name!r} has {kind!r}, which is no state of a generator."
        )
    copy = state.detach().to("cpu", copy=True)
    if kind == "cpu":
        try:
            torch.Generator("cpu").set_state(copy)
        except RuntimeError as error:
            raise ArgumentError(
                f"load_state_dict: {name!r} has a state for the CPU that torch refuses: {error}"
            ) from error
    return copy


def _int(value: object, name: str) -> int:
    exact = exact_int(value)
    if exact is None:
        raise ArgumentError(f"{name} must be an integer; got {value!r}.")
    return exact


def _ints(coordinates: Mapping[str, object]) -> dict[str, int]:
    return {name: _int(value, name) for name, value in coordinates.items()}
