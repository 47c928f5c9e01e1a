"""``load``, ``read`` and ``export``: checkpoints into a state, into one process, into one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any

import torch

from varcomm.checkpoint.index import Checkpoint, Keys, joined, nested
from varcomm.checkpoint.parts import Ranks, Rows, alone, boxes_of, few, row_block
from varcomm.checkpoint.save import finish_pending
from varcomm.checkpoint.state import EARLY, LATE, Holder, Leaf, Walk, checked_state, is_bare
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.sharding.files import write_tensors
from varcomm.sharding.optimizer_state import prefix_hint
from varcomm.transport.group import GroupLike

__all__ = ["export", "load", "read"]

_WHAT = "checkpoint.load"
_ABSENT = object()


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
        opened = Checkpoint(Path(folder))
        opened.verify(ranks.rank, ranks.size)
        return opened

    found, digests = ranks.agree(_WHAT, find, lambda one: one.digest)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} find another checkpoint in {folder} than rank 0."
        )
    targets, fits = ranks.agree(_WHAT, lambda: _Targets(state, found, ranks.rank), _Targets.fit)
    alone(_WHAT, lambda: _check_fit(found, fits))  # the same on all ranks
    blocks = [(key, *row_block(rows, ranks)) for key, rows in sorted(targets.rows.items())]

    def read_early() -> None:
        targets.read(EARLY)
        targets.put(EARLY)

    def read_late() -> None:
        targets.read(LATE)
        for key, block, _ in blocks:
            found.read(key, [block])

    ranks.agree(_WHAT, read_early)
    ranks.agree(_WHAT, read_late)
    for *_, send in blocks:
        send()
    ranks.agree(_WHAT, lambda: targets.put(LATE))


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a whole checkpoint on the CPU; no communication.

    ArgumentError if there is no checkpoint, or if a file is missing, cut or altered.

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
        state: dict[str, Any] = nested({path: flat[key] for key, path in found.paths.items()})
        return state

    return alone("checkpoint.read", full)


def export(
    folder: str | os.PathLike[str], file: str | os.PathLike[str], name: str | None = None
) -> None:
    """Write the tensors of a checkpoint as one safetensors file; no communication.

    Full tensors are held in memory. ArgumentError if the checkpoint cannot be read, has no tensors
    of this name, or has complex ones, which other tools cannot read; or if writing fails.

    Parameters
    ----------
    folder : str or path
        As for :func:`load`.
    file : str or path
        The file to write, such as ``model.safetensors``. An earlier file is replaced.
    name : str, optional
        Write only the tensors below this name of the state, such as ``"model"``, without it in
        their names. None writes all tensors, with dotted names.

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
    found = Checkpoint(Path(folder))
    found.verify()
    tensors = {key: t.empty("cpu") for key, t in found.tensors.items() if key.startswith(start)}
    for key, tensor in tensors.items():
        found.read(key, boxes_of(key, tensor))
    return found, tensors


def _check_fit(found: Checkpoint, fits: Sequence[Any]) -> None:
    """Raise, the same on all ranks, if the states of all ranks together do not match."""
    within, asked, missing, differing, rows = zip(*fits, strict=True)
    for rank, own in enumerate(rows):
        if own != rows[0]:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {rows[0]}, rank {rank} has {own}. Give the "
                "same Rows on all ranks, without ids if a rank has none."
            )
    left = reduce(or_, within) & ~reduce(or_, asked)
    unexpected = [key for bit, key in enumerate(sorted(found.paths)) if left >> bit & 1]
    lacking = list(dict.fromkeys(chain.from_iterable(missing)))
    parts = {
        "keys are missing in the checkpoint": [*map(repr, lacking)],
        "of its keys are not in the state": [*map(repr, unexpected)],
        "have another shape or dtype": [*dict.fromkeys(chain.from_iterable(differing))],
    }
    reasons = [f"{len(items)} {what}: {few(items)}" for what, items in parts.items() if items]
    if reasons:
        raise ArgumentError(
            f"the checkpoint {found.folder} does not match the state. {'; '.join(reasons)}. "
            f"Nothing has been loaded.{prefix_hint(lacking, unexpected)}"
        )


class _Targets(Walk):
    """The tensors that this rank reads, and the calls that put values in their places, by phase."""

    def __init__(self, state: Any, found: Checkpoint, rank: int) -> None:
        super().__init__(state, rank)
        self.found = found
        self.tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self.puts: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        self.rows: dict[str, Rows] = {}
        self.missing: list[str] = []
        self.differing: list[str] = []
        self.asked: set[str] = set()
        paths = [()] if isinstance(state, torch.nn.Module) else [(name,) for name in state]
        self.within = {key for path in paths for key in found.below(path)}
        for leaf in self.leaves(Leaf(state)):
            self._add(leaf.key, leaf)

    def fit(self) -> tuple[Any, ...]:
        """Return how well the state matches, for all ranks; bits stand for sorted keys."""
        bits = {key: 1 << bit for bit, key in enumerate(sorted(self.found.paths))}
        within, asked = (sum(bits[key] for key in some) for some in (self.within, self.asked))
        return within, asked, self.missing, self.differing, sorted(self.rows)

    def read(self, phase: int) -> None:
        """Overwrite the tensors of a phase."""
        for key, tensor in self.tensors[phase].items():
            self.found.read(key, boxes_of(key, tensor))

    def put(self, phase: int) -> None:
        """Put the values of a phase in their places."""
        for put in self.puts[phase]:
            put()

    def opens(self, holder: Holder, path: Keys) -> bool:
        saved = self.found.at(path, _ABSENT)
        if saved is not _ABSENT:
            holder.content = holder.targets(saved)
        elif holder.tree() not in ({}, []):
            self.missing.append(joined(path))
        return saved is not _ABSENT

    def enters(self, path: Keys) -> bool:
        saved = self.found.at(path)
        if not isinstance(saved, Mapping) or not all(str(name).isdecimal() for name in saved):
            self.missing.append(joined((*path, str(self.rank))))
            return False
        self.asked |= self.found.below(path)
        return str(self.rank) in saved

    def _add(self, key: str, leaf: Leaf) -> None:
        value, path = leaf.value, leaf.path
        if isinstance(value, Holder):
            for each in (EARLY, LATE):
                self.puts[each].append(partial(_take, key, value, each))
        elif isinstance(value, Rows):
            _check_target(key, value.tensor)
            shape = (value.total, *value.tensor.shape[1:])
            if self._matches(key, shape, value.tensor.dtype):
                self.rows[key] = value
        elif isinstance(value, torch.Tensor):
            _check_target(key, value)
            if self._matches(key, tuple(value.shape), value.dtype):
                self.tensors[leaf.phase][key] = value
        elif isinstance(value, dict) and not value:
            if self.found.at(path) == {}:  # an empty dict has a key
                self.asked.add(key)
        else:
            saved = self.found.at(path, _ABSENT)
            self.asked |= self.found.below(path)
            if saved is _ABSENT:
                self.missing.append(key)
            elif not is_bare(saved):
                self.differing.append(f"{key!r} is saved as tensors and is a plain value here")
            else:
                self.puts[leaf.phase].append(partial(leaf.put, saved))

    def _matches(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if key not in self.found.paths:
            self.missing.append(key)
            return False
        self.asked.add(key)
        saved = self.found.tensors.get(key)
        if saved is not None and (saved.shape, saved.dtype) == (shape, dtype):
            return True
        was = "a plain value" if saved is None else f"{saved.shape}, {saved.dtype}"
        self.differing.append(f"{key!r} is saved as {was} and is {shape}, {dtype} here")
        return False


def _take(key: str, holder: Holder, phase: int) -> None:
    try:
        holder.take(phase)
    except Exception as error:
        raise ArgumentError(f"{key!r} refuses its saved state: {error}") from error


def _check_target(key: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a tensor cannot be loaded into."""
    if tensor.is_meta:
        raise ArgumentError(f"{key!r} is on the meta device. Call to_empty(device=...) first.")
    for box in boxes_of(key, tensor):
        places, reason = zip(box.tensor.shape, box.tensor.stride(), strict=True), ""
        if box.tensor.is_inference() and not torch.is_inference_mode_enabled():
            reason = "was made in inference mode and can be overwritten only there"
        if any(n > 1 and step == 0 for n, step in places):
            reason = "is an expanded tensor, whose elements share memory"
        if reason:
            raise ArgumentError(f"{key!r} {reason}. Load into its clone().")
