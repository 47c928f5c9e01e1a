"""``load``, ``read`` and ``export``: checkpoints into a state, into one process, into one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from varcomm.checkpoint.annotations import PerRank, Rows
from varcomm.checkpoint.flatten import checked_key, checked_rows, checked_state, is_bare
from varcomm.checkpoint.paths import Keys, joined, nested, prefix_hint
from varcomm.checkpoint.ranks import Ranks, alone
from varcomm.checkpoint.reader import Checkpoint
from varcomm.checkpoint.save import finish_pending
from varcomm.checkpoint.shards import RowFetch, check_target, wrapped
from varcomm.checkpoint.stateful import Early, Holder, holder_of, modules_in
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.sharding.files import write_tensors
from varcomm.transport.group import GroupLike

__all__ = ["export", "load", "read"]

_WHAT = "checkpoint.load"
_ABSENT = object()
_FEW = 5

_Put: TypeAlias = Callable[[], None]


def load(
    state: dict[str, Any] | torch.nn.Module,
    folder: str | os.PathLike[str],
    group: GroupLike = None,
) -> None:
    """Load a checkpoint into `state`, on any number of ranks, sharded as `state` is now.

    Collective: all ranks of `group` call it. One process needs no torch.distributed. Nothing is
    changed before all files are verified, all keys match, and all tensors can be overwritten. Then
    generators, objects and modules with extra state take theirs, and may refuse; then tensors are
    overwritten.

    Parameters
    ----------
    state : dict or Module
        As for :func:`save`. Names of the first level may be left out, also on some ranks; below,
        keys must match on all ranks together. Tensors are overwritten in place, plain values are
        replaced; None instead of a dict of plain values accepts any keys. An optimizer need not
        have made a step. An object with ``state_dict_for(saved)`` gets the saved tree with tensors
        on the meta device, and returns the tensors to overwrite, which then go to its
        ``load_state_dict``. A module is loaded from tensors whose names are those of its
        ``state_dict``.
    folder : str or path
        A folder of :func:`save`; or a ``.safetensors`` file of another tool, an index with a
        ``weight_map`` as Hugging Face writes it, or a folder with one of these. Their names match
        dotted keys: ``a.b`` goes to ``state["a"]["b"]`` or to parameter ``b`` of module ``a``.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Raises
    ------
    ArgumentError
        On every rank, if there is no checkpoint; if a file is missing, cut or altered; if keys,
        shapes or dtypes do not match; if a tensor cannot be overwritten. Then nothing is changed.
        Also if an object refuses its state.
    DisagreementError
        On every rank, if ranks find different checkpoints.
    CommunicationError
        If a rank has exited or takes longer than the timeout of the group.
    VarcommError
        The error of an earlier asynchronous save on which `wait` was not called.

    Notes
    -----
    Each rank verifies the SHA-256 of every P-th file, and reads only the elements that it needs.
    Files of other tools have no digests: their headers are checked.

    Communication: five rounds of small messages; rows of :class:`Rows` travel once.

    In one process: the same call.

    Examples
    --------
    Saved by one process, loaded by two ranks:

    >>> import tempfile, torch, varcomm
    >>> from varcomm.checkpoint import load, save
    >>> from varcomm.sharding import Sharded, ShardSpec
    >>> def fn(rank, folder):
    ...     rows = torch.zeros(3 - rank)
    ...     load({"x": Sharded.of(rows, ShardSpec.of([3, 2]))}, folder)
    ...     return rows.tolist()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"x": torch.arange(5.0)}, folder)
    ...     varcomm.launch(fn, 2, folder)
    [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    ranks = Ranks.of(group)

    def find() -> Checkpoint:
        finish_pending()
        if not isinstance(state, torch.nn.Module):
            checked_state(state)
        opened = Checkpoint.open(Path(folder))
        opened.verify(ranks.rank, ranks.size)
        return opened

    def run(puts: Sequence[_Put]) -> None:
        for put in puts:
            put()

    def read_early() -> None:
        found.read(targets.early)
        run(targets.early_puts)

    found, digests = ranks.agree_and_share(_WHAT, find, lambda one: one.digest)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} find another checkpoint in {folder} than rank 0."
        )
    targets, fits = ranks.agree_and_share(
        _WHAT, lambda: _Targets(state, found, ranks.rank), lambda one: one.fit()
    )
    alone(_WHAT, lambda: _check_fit(found, fits))  # the same on all ranks
    fetches = {key: RowFetch(rows, ranks) for key, rows in sorted(targets.rows.items())}
    ranks.agree(_WHAT, read_early)
    blocks = {key: fetch.target for key, fetch in fetches.items()}
    ranks.agree(_WHAT, lambda: found.read({**targets.tensors, **blocks}))
    for fetch in fetches.values():
        fetch.finish()
    ranks.agree(_WHAT, lambda: run(targets.puts))
    found.close()


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a whole checkpoint on the CPU; no communication.

    Parameters
    ----------
    folder : str or path
        As for :func:`load`.

    Returns
    -------
    dict
        The saved state, nested as it was: modules and other objects as dicts, sharded tensors and
        rows as full tensors, :class:`PerRank` as a dict with the ranks as texts. Of files of other
        tools, tensors by name.

    Raises
    ------
    ArgumentError
        If there is no checkpoint, or if a file is missing, cut or altered.
    VarcommError
        The error of an earlier asynchronous save on which `wait` was not called.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import read, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"model": torch.nn.Linear(2, 1), "losses": [0.5, 0.25]}, folder)
    ...     state = read(folder)
    >>> state["losses"], state["model"]["weight"].shape
    ([0.5, 0.25], torch.Size([1, 2]))
    """

    def full() -> dict[str, Any]:
        found, tensors = _read_all(folder, "")
        flat = {**found.values, **tensors}
        return nested({path: flat[key] for key, path in found.paths.items()})

    return alone("checkpoint.read", full)


def export(
    folder: str | os.PathLike[str], file: str | os.PathLike[str], name: str | None = None
) -> None:
    """Write the tensors of a checkpoint as one safetensors file; no communication.

    Parameters
    ----------
    folder : str or path
        As for :func:`load`.
    file : str or path
        The file to write, such as ``model.safetensors``. An earlier file is replaced.
    name : str, optional
        Write only the tensors below this name of the state, such as ``"model"``, without it in
        their names. None writes all tensors, with dotted names.

    Raises
    ------
    ArgumentError
        If the checkpoint cannot be read, has no tensors of this name, or the file cannot be
        written.

    Notes
    -----
    Full tensors are held in memory. Complex tensors are refused: other tools cannot read them.

    Examples
    --------
    >>> import tempfile, torch
    >>> from safetensors.torch import load_file
    >>> from varcomm.checkpoint import export, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"model": torch.nn.Linear(2, 1), "step": 3}, folder)
    ...     export(folder, f"{folder}/model.safetensors", "model")
    ...     sorted(load_file(f"{folder}/model.safetensors"))
    ['bias', 'weight']
    """

    def write() -> None:
        start = "" if name is None else f"{name}."
        _, tensors = _read_all(folder, start)
        if not tensors:
            raise ArgumentError(f"{folder} has no tensors below {name!r}.")
        if complex_ := [key for key, tensor in tensors.items() if tensor.is_complex()]:
            raise ArgumentError(f"{complex_[0]!r} is complex; save torch.view_as_real of it.")
        target = Path(file)
        coming = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            write_tensors(coming, {key.removeprefix(start): t for key, t in tensors.items()})
            os.replace(coming, target)
        finally:
            coming.unlink(missing_ok=True)

    alone("checkpoint.export", write)


def _read_all(
    folder: str | os.PathLike[str], start: str
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    finish_pending()
    found = Checkpoint.open(Path(folder))
    found.verify()
    tensors = {
        key: saved.like("cpu") for key, saved in found.tensors.items() if key.startswith(start)
    }
    found.read(tensors)
    found.close()
    return found, tensors


@dataclass
class _Fit:
    """How well a state and a checkpoint match on one rank; bits stand for sorted keys."""

    within: int  # keys that belong to names of the state
    asked: int  # keys that are loaded
    missing: list[str]
    differing: list[str]
    rows: list[str]


def _check_fit(found: Checkpoint, told: Sequence[tuple[Any, ...]]) -> None:
    """Raise, the same on all ranks, if the states of all ranks together do not match."""
    fits = [_Fit(*one) for one in told]
    for rank, fit in enumerate(fits):
        if fit.rows != fits[0].rows:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {fits[0].rows}, rank {rank} has {fit.rows}. "
                "Give the same Rows on all ranks, without ids if a rank has none."
            )
    missing = list(dict.fromkeys(key for fit in fits for key in fit.missing))
    differing = list(dict.fromkeys(text for fit in fits for text in fit.differing))
    left = 0
    for fit in fits:
        left |= fit.within
    for fit in fits:
        left &= ~fit.asked
    unexpected = [key for bit, key in enumerate(sorted(found.paths)) if left >> bit & 1]
    parts = [
        f"{len(items)} {what}: {', '.join(items[:_FEW])}{', ...' if len(items) > _FEW else ''}"
        for what, items in (
            ("keys are missing in the checkpoint", list(map(repr, missing))),
            ("of its keys are not in the state", list(map(repr, unexpected))),
            ("have another shape or dtype", differing),
        )
        if items
    ]
    if parts:
        raise ArgumentError(
            f"the checkpoint {found.folder} does not match the state. {'; '.join(parts)}. Nothing "
            f"has been loaded.{prefix_hint(missing, unexpected)}"
        )


@dataclass
class _Targets:
    """The tensors that this rank reads, and the calls that put values in their places.

    The `early` tensors are new, for objects that may refuse them; `early_puts` are called after
    these have been read, and `puts` at the end.
    """

    state: Any
    found: Checkpoint
    rank: int
    early: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    early_puts: list[_Put] = field(default_factory=list)
    puts: list[_Put] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._modules = modules_in(self.state)
        if isinstance(self.state, torch.nn.Module):
            self._into(self.state, (), lambda value: None)
            return
        for name, value in self.state.items():
            self._into(value, (name,), partial(self.state.__setitem__, name))

    def fit(self) -> tuple[Any, ...]:
        """Return a _Fit as a tuple, for other ranks."""
        keys = sorted(self.found.paths)
        if isinstance(self.state, torch.nn.Module):
            within = set(keys)
        else:
            within = {key for name in self.state for key in self.found.keys_below(name)}

        def bits(some: set[str]) -> int:
            return sum(1 << bit for bit, key in enumerate(keys) if key in some)

        return bits(within), bits(self.asked), self.missing, self.differing, sorted(self.rows)

    def _into(
        self, value: Any, path: Keys, put: Callable[[Any], None], early: bool = False
    ) -> None:
        """Find the saved value for `value`; `put` takes a replacement."""
        key = joined(path)
        if isinstance(value, PerRank):
            self._per_rank(value, path, early)
        elif isinstance(value, Early):
            self._into(value.value, path, partial(setattr, value, "value"), True)
        elif isinstance(value, Rows):
            rows = checked_rows(key, value)
            check_target(key, rows.tensor)
            if self._matches(path, (rows.total, *rows.tensor.shape[1:]), rows.tensor.dtype):
                self.rows[key] = rows
        elif isinstance(value, torch.Tensor):
            target = wrapped(value)
            check_target(key, target)
            if self._matches(path, tuple(target.shape), target.dtype):
                (self.early if early else self.tensors)[key] = target
        elif holder := holder_of(value, self._modules):
            self._holder(holder, path)
        elif isinstance(value, dict) and not (value and _is_one_value(value)):
            if self.found.at(path, _ABSENT) == {}:  # an empty dict has a key
                self.asked.add(key)
            for name, inner in value.items():
                put_inner = partial(value.__setitem__, name)
                self._into(inner, (*path, checked_key(name)), put_inner, early)
        elif isinstance(value, list) and not is_bare(value):
            for number, inner in enumerate(value):
                self._into(inner, (*path, (number,)), partial(value.__setitem__, number), early)
        else:
            self._plain(path, put, early)

    def _per_rank(self, value: PerRank, path: Keys, early: bool) -> None:
        saved = self.found.at(path)
        mine = (*path, str(self.rank))
        if not isinstance(saved, Mapping) or not all(str(name).isdecimal() for name in saved):
            self.missing.append(joined(mine))
            return
        self._ask_below(path)
        if str(self.rank) in saved:
            self._into(value.value, mine, partial(setattr, value, "value"), early)

    def _holder(self, holder: Holder, path: Keys) -> None:
        saved = self.found.at(path, _ABSENT)
        if saved is _ABSENT:
            if holder.tree() not in ({}, []):
                self.missing.append(joined(path))
            return
        try:
            box = [holder.targets(saved)]
        except ArgumentError as error:
            raise ArgumentError(f"{joined(path)!r}: {error}") from error
        self._into(box[0], path, partial(box.__setitem__, 0))

        def give(early: bool) -> None:
            try:
                holder.take(box[0], early)
            except Exception as error:
                raise ArgumentError(f"{joined(path)!r} refuses its saved state: {error}") from error

        self.early_puts.append(partial(give, True))
        self.puts.append(partial(give, False))

    def _plain(self, path: Keys, put: Callable[[Any], None], early: bool) -> None:
        saved = self.found.at(path, _ABSENT)
        self._ask_below(path)
        if saved is _ABSENT:
            self.missing.append(joined(path))
        elif not is_bare(saved):
            self.differing.append(f"{joined(path)!r} is saved as tensors and is a plain value here")
        else:
            (self.early_puts if early else self.puts).append(partial(put, saved))

    def _matches(self, path: Keys, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        key = joined(path)
        if not self.found.has(path):
            self.missing.append(key)
            return False
        self.asked.add(key)
        saved = self.found.tensors.get(key)
        if saved is not None and (saved.shape, saved.dtype) == (shape, dtype):
            return True
        was = "a plain value" if saved is None else f"{saved.shape}, {saved.dtype}"
        self.differing.append(f"{key!r} is saved as {was} and is {shape}, {dtype} here")
        return False

    def _ask_below(self, path: Keys) -> None:
        length = len(path)
        self.asked.update(key for key, other in self.found.paths.items() if other[:length] == path)


def _is_one_value(value: dict[Any, Any]) -> bool:
    return is_bare(value) and not all(isinstance(name, str) for name in value)
