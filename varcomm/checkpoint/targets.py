"""Where in a state each thing goes that was saved, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from varcomm.checkpoint.boxes import check_target, wrapped
from varcomm.checkpoint.holders import Early, Holder, Modules, holder_of, modules_in
from varcomm.checkpoint.kinds import PerRank, Rows
from varcomm.checkpoint.leaves import checked_rows, is_bare
from varcomm.checkpoint.nested import Keys, at, joined, nested, prefix_hint, spelled
from varcomm.checkpoint.reader import Checkpoint
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.transport.serialization import travels

__all__ = ["Fit", "Targets", "check_fit", "targets_of"]

_ABSENT = object()
_FEW = 5

Put = Callable[[], None]


@travels
class Fit(NamedTuple):
    """How well a state and a checkpoint fit each other on one rank."""

    within: int  # a bit for each key of the checkpoint: is it within what the state has by name
    asked: int  # and is it loaded
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
    targets.rows = dict(sorted(targets.rows.items()))  # for all ranks in one order
    targets.fit = targets.fit._replace(
        within=_bits(found, walk.keys), asked=_bits(found, walk.asked), rows=list(targets.rows)
    )
    return targets


def _bits(found: Checkpoint, keys: Set[str]) -> int:
    return int("0" + "".join("01"[key in keys] for key in sorted(found.paths)), 2)


def check_fit(found: Checkpoint, fits: Sequence[Fit]) -> None:
    """Raise, the same on all ranks, if states are not what was saved, whatever each rank loads."""
    for rank, fit in enumerate(fits):
        if fit.rows != fits[0].rows:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {fits[0].rows}, rank {rank} has {fit.rows}. "
                "All ranks give the same Rows, without ids if they have none."
            )
    missing = list(dict.fromkeys(key for fit in fits for key in fit.missing))
    differing = list(dict.fromkeys(text for fit in fits for text in fit.differing))
    within, asked = 0, 0
    for fit in fits:
        within, asked = within | fit.within, asked | fit.asked
    keys = sorted(found.paths)
    left = f"{within & ~asked:0{len(keys)}b}"
    unexpected = [key for key, bit in zip(keys, left, strict=False) if bit == "1"]
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
            f"been loaded.{prefix_hint(missing, unexpected)}"
        )


class _Walk:
    """Goes through a state and what was saved of it together."""

    def __init__(self, state: dict[str, Any], found: Checkpoint, rank: int) -> None:
        self.targets = Targets(Fit(0, 0, [], [], []))
        within = {key: path for key, path in found.paths.items() if path[:1] and path[0] in state}
        self.keys = within.keys()
        self.asked: set[str] = set()
        self._found, self._rank = found, rank
        self._modules: Modules = modules_in(state)
        values = found.values(key for key in self.keys if key not in found.tensors)
        self._saved = nested(
            {
                path: values[key] if key in values else found.like(key, "meta")
                for key, path in within.items()
            }
        )
        self._below: dict[Keys, list[str]] = {}
        for key, path in within.items():
            for depth in range(len(path)):
                self._below.setdefault(path[: depth + 1], []).append(key)

    def into(self, value: Any, path: Keys, put: Callable[[Any], None], early: bool = False) -> None:
        """Find what goes into a value; `put` takes what replaces it."""
        if isinstance(value, PerRank):
            self._per_rank(value, path, early)
        elif isinstance(value, Early):
            self.into(value.value, path, partial(setattr, value, "value"), True)
        elif isinstance(value, Rows):
            rows = checked_rows(joined(path), value)
            check_target(joined(path), rows.tensor)
            if self._fits(path, (rows.total, *rows.tensor.shape[1:]), rows.tensor.dtype):
                self.targets.rows[joined(path)] = rows
        elif isinstance(value, torch.Tensor):
            target = wrapped(value)
            check_target(joined(path), target)
            if self._fits(path, tuple(target.shape), target.dtype):
                (self.targets.early if early else self.targets.tensors)[joined(path)] = target
        elif holder := holder_of(value, self._modules):
            self._holder(holder, path)
        elif isinstance(value, dict) and not (value and self._is_plain(value)):
            self._empty(path)
            for name, inner in value.items():
                self.into(inner, (*path, spelled(name)), partial(value.__setitem__, name), early)
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
        if not isinstance(saved, Mapping) or not all(str(name).isdecimal() for name in saved):
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
        self.into(box[0], path, partial(box.__setitem__, 0))

        def give(early: bool) -> None:
            try:
                holder.take(box[0], early)
            except Exception as error:
                raise ArgumentError(
                    f"{joined(path)!r} refuses what was saved of it: {error}"
                ) from error

        self.targets.early_puts.append(partial(give, True))
        self.targets.puts.append(partial(give, False))

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
        if self._found.paths.get(key) != path:
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
        self.asked.update(self._below.get(path, ()))
