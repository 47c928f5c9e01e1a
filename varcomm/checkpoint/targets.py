"""Where in a state each thing goes that was saved, and what does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from varcomm.checkpoint.boxes import wrapped
from varcomm.checkpoint.holders import Holder, Modules, holder_of, modules_in
from varcomm.checkpoint.kinds import PerRank, Rows
from varcomm.checkpoint.leaves import checked_rows, is_bare
from varcomm.checkpoint.nested import Keys, at, joined, nested
from varcomm.checkpoint.reader import Checkpoint
from varcomm.errors import ArgumentError, DisagreementError

__all__ = ["Fit", "Targets", "check_fit", "targets_of"]

_ABSENT = object()
_FEW = 5

Put = Callable[[], None]


class Fit(NamedTuple):
    """How well a state and a checkpoint fit each other on one rank."""

    asked: int  # a bit for each key of the checkpoint
    missing: list[str]
    differing: list[str]
    rows: list[str]


@dataclass
class Targets:
    """What a rank loads.

    Attributes
    ----------
    early, tensors : dict of str to torch.Tensor
        To be read, the first of them for objects that may refuse it.
    early_puts, puts : list of callable
        What is done when these have been read.
    rows : dict of str to Rows
    """

    fit: Fit
    early: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    early_puts: list[Put] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)


def targets_of(state: dict[str, Any], found: Checkpoint, rank: int) -> Targets:
    """Return where what was found goes on this rank."""
    walk = _Walk(state, found, rank)
    for name, value in state.items():
        walk.into(value, (name,), partial(state.__setitem__, name))
    targets = walk.targets
    asked = sum(1 << number for number, key in enumerate(walk.keys) if key in walk.asked)
    targets.rows = dict(sorted(targets.rows.items()))  # for all ranks in one order
    targets.fit = targets.fit._replace(asked=asked, rows=list(targets.rows))
    return targets


def check_fit(state: dict[str, Any], found: Checkpoint, fits: Sequence[Fit]) -> None:
    """Raise, the same on all ranks, if the state is not what was saved."""
    for rank, fit in enumerate(fits):
        if fit.rows != fits[0].rows:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {fits[0].rows}, rank {rank} has {fit.rows}. "
                "All ranks give the same Rows, without ids if they have none."
            )
    missing = list(dict.fromkeys(key for fit in fits for key in fit.missing))
    differing = list(dict.fromkeys(text for fit in fits for text in fit.differing))
    keys = _keys_below(state, found)
    unexpected = [
        key for number, key in enumerate(keys) if not any(fit.asked >> number & 1 for fit in fits)
    ]
    parts = [
        f"{len(items)} {what}: {', '.join(items[:_FEW])}{', ...' if len(items) > _FEW else ''}"
        for what, items in (
            ("keys are missing in the checkpoint", list(map(repr, missing))),
            ("of its keys are not in the state", list(map(repr, unexpected))),
            ("are of another shape or dtype", differing),
        )
        if items
    ]
    if parts:
        raise ArgumentError(
            f"{found.folder} is a checkpoint of something else. {'; '.join(parts)}. Nothing has "
            "been loaded."
        )


def _keys_below(state: Mapping[str, Any], found: Checkpoint) -> list[str]:
    """Return the keys of the checkpoint that are within what the state has at its first level."""
    first = tuple(f"{name}." for name in state)
    return sorted(key for key in found.paths if key in state or key.startswith(first))


class _Walk:
    """Goes through a state and what was saved of it together."""

    def __init__(self, state: dict[str, Any], found: Checkpoint, rank: int) -> None:
        self.targets = Targets(Fit(0, [], [], []))
        self.keys = _keys_below(state, found)
        self.asked: set[str] = set()
        self._found, self._rank = found, rank
        self._modules: Modules = modules_in(state)
        values = found.values(key for key in self.keys if key not in found.tensors)
        self._saved = nested(
            {
                found.paths[key]: values[key] if key in values else found.like(key, "meta")
                for key in self.keys
            }
        )

    def into(self, value: Any, path: Keys, put: Callable[[Any], None], early: bool = False) -> None:
        """Find what goes into a value; `put` takes what replaces it."""
        if isinstance(value, PerRank):
            self._per_rank(value, path, early)
        elif isinstance(value, Rows):
            rows = checked_rows(joined(path), value)
            if self._fits(path, (rows.total, *rows.tensor.shape[1:]), rows.tensor.dtype):
                self.targets.rows[joined(path)] = rows
        elif isinstance(value, torch.Tensor):
            target = wrapped(value)
            if self._fits(path, tuple(target.shape), target.dtype):
                (self.targets.early if early else self.targets.tensors)[joined(path)] = target
        elif holder := holder_of(value, self._modules):
            self._holder(holder, path)
        elif isinstance(value, dict) and not (value and self._is_plain(value)):
            self._empty(path)
            for name, inner in value.items():
                self.into(inner, (*path, str(name)), partial(value.__setitem__, name), early)
        elif isinstance(value, list) and not is_bare(value, self._modules):
            for number, inner in enumerate(value):
                self.into(inner, (*path, number), partial(value.__setitem__, number), early)
        else:
            self._plain(path, put, early)

    def _is_plain(self, value: dict[Any, Any]) -> bool:
        named = all(isinstance(name, str) for name in value)
        return not named and is_bare(value, self._modules)

    def _per_rank(self, value: PerRank, path: Keys, early: bool) -> None:
        saved = at(self._saved, path)
        mine = (*path, str(self._rank))
        if not isinstance(saved, Mapping) or not all(name.isdecimal() for name in saved):
            self.targets.fit.missing.append(joined(mine))
            return
        self._ask_below(path)
        if at(saved, mine[-1:], _ABSENT) is not _ABSENT:
            self.into(value.value, mine, partial(setattr, value, "value"), early)

    def _holder(self, holder: Holder, path: Keys) -> None:
        saved = at(self._saved, path, _ABSENT)
        if saved is _ABSENT:
            if holder.tree() not in ({}, []):
                self.targets.fit.missing.append(joined(path))
            return
        try:
            box = [holder.targets(saved)]
        except ArgumentError as error:
            raise ArgumentError(f"{joined(path)!r}: {error}") from error
        early = holder.may_refuse
        self.into(box[0], path, partial(box.__setitem__, 0), early)
        puts = self.targets.early_puts if early else self.targets.puts
        puts.append(lambda: holder.put(box[0]))

    def _plain(self, path: Keys, put: Callable[[Any], None], early: bool) -> None:
        saved = at(self._saved, path, _ABSENT)
        self._ask_below(path)
        if saved is _ABSENT:
            self.targets.fit.missing.append(joined(path))
        elif not is_bare(saved, self._modules):
            self.targets.fit.differing.append(
                f"{joined(path)!r} is saved as tensors and is a plain value here"
            )
        else:
            puts = self.targets.early_puts if early else self.targets.puts
            puts.append(partial(put, saved))

    def _fits(self, path: Keys, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        key = joined(path)
        if key not in self._found.paths:
            self.targets.fit.missing.append(key)
            return False
        self.asked.add(key)
        entry = self._found.tensors.get(key)
        here = f"{shape}, {dtype} here"
        if entry is None:
            self.targets.fit.differing.append(f"{key!r} is saved as a plain value and is {here}")
        elif (tuple(entry.size), entry.properties.dtype) != (shape, dtype):
            self.targets.fit.differing.append(
                f"{key!r} is saved as {tuple(entry.size)}, {entry.properties.dtype} and is {here}"
            )
        else:
            return True
        return False

    def _empty(self, path: Keys) -> None:
        # an empty dict has a key of its own, since nothing below it would tell of it
        if at(self._saved, path, _ABSENT) == {}:
            self.asked.add(joined(path))

    def _ask_below(self, path: Keys) -> None:
        key = joined(path)
        low, high = bisect_left(self.keys, f"{key}."), bisect_left(self.keys, f"{key}/")
        self.asked.update(self.keys[low:high], [key])
