"""What the ranks have of one state together: who has which piece, who writes it, are copies equal.

Names, shapes and boxes are told to all; contents are not, only digests of what several ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from varcomm.checkpoint.boxes import Piece, in_pieces, is_whole, piece_of
from varcomm.checkpoint.leaves import Leaves, Value
from varcomm.checkpoint.nested import Keys, Number
from varcomm.checkpoint.together import Ranks, share
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.digest import digest
from varcomm.sizes import ShardSizes
from varcomm.transport.serialization import travels

__all__ = ["Agreed", "Entry", "Told", "agreed", "check_copies", "told"]

_MEND = (
    "A tensor or value that does not say otherwise is one that all ranks have alike. Make it so "
    "(varcomm.data_parallel.replicate), or say what it is: a part of a whole "
    "(varcomm.sharding.Sharded; of a module or an optimizer save the object itself, not its "
    "state_dict()), varcomm.checkpoint.Rows, or this rank's own (varcomm.checkpoint.PerRank)."
)


@travels
class Entry(NamedTuple):
    """What ranks tell each other of a key."""

    path: Keys
    dtype: torch.dtype | None = None  # of a plain value
    shape: tuple[int, ...] = ()
    is_whole: bool = True
    is_empty: bool = False  # a container without anything in it

    def __str__(self) -> str:
        if self.dtype is None:
            return "an empty container" if self.is_empty else "a plain value"
        part = "" if self.is_whole else "parts of "
        return f"{part}a tensor of shape {self.shape}, {self.dtype}"


@travels
@dataclass(frozen=True)
class Told:
    """What one rank tells of what it has.

    Attributes
    ----------
    entries : mapping of str to Entry
    boxes : sequence of Piece
        Of those that are not whole on this rank.
    rows : mapping of str to Entry
        Which are exchanged until each rank has a block.
    """

    entries: Mapping[str, Entry]
    boxes: Sequence[Piece]
    rows: Mapping[str, Entry]


@dataclass(frozen=True)
class Agreed:
    """What is saved by whom.

    Attributes
    ----------
    holders : mapping of Piece to list of int
        The ranks that have a copy of it.
    plans : list of SavePlan
        What each rank writes.
    metadata : Metadata
        Of all of it.
    numbers : mapping of str to list of int
        By key, where in its path there are keys of dicts that are numbers, which torch makes texts.
    """

    holders: Mapping[Piece, list[int]]
    plans: list[SavePlan]
    metadata: Metadata
    numbers: Mapping[str, list[int]]


def told(leaves: Leaves) -> Told:
    """Return what a rank tells of what it has."""
    entries, boxes = {}, []
    for key, value in leaves.found.items():
        path = leaves.paths[key]
        if isinstance(value, Value):
            entries[key] = Entry(path, is_empty=value.is_empty)
            continue
        entries[key] = Entry(path, value.dtype, tuple(value.shape), is_whole(value))
        if not is_whole(value):
            boxes += in_pieces(key, value)
    rows = {
        key: Entry(leaves.paths[key], rows.tensor.dtype, (rows.total, *rows.tensor.shape[1:]))
        for key, rows in leaves.rows.items()
    }
    return Told(entries, boxes, rows)


def agreed(all_told: Sequence[Told]) -> Agreed:
    """Return what follows for all ranks from what they have told; the same on every rank.

    Raises
    ------
    DisagreementError
        If ranks have other things by one key.
    ArgumentError
        If the boxes of a tensor do not cover it, or overlap.
    """
    entries = _common(all_told)
    holders = _holders(all_told, entries)
    _check_volume(entries, holders)
    ranks = len(all_told)
    items: list[list[Any]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    # what one rank alone has comes first, and what can be chosen evens it out
    for piece, able in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        writer = min(able, key=load.__getitem__)
        entry = entries[piece.key]
        items[writer].append(piece.item(entry.dtype, entry.shape))
        width = 1 if entry.dtype is None else entry.dtype.itemsize
        load[writer] += width * prod(piece.sizes or ())
    plans = [SavePlan(own, planner_data={}) for own in items]
    numbers = {
        key: places
        for key, entry in entries.items()
        if (places := [at for at, name in enumerate(entry.path) if isinstance(name, Number)])
    }
    texts = {
        key: tuple(str(name) if isinstance(name, Number) else name for name in entry.path)
        for key, entry in entries.items()
    }
    paths = SavePlan([], planner_data=texts)
    try:
        found, metadata = DefaultSavePlanner().create_global_plan([*plans, paths])
    except ValueError as error:
        raise ArgumentError(
            f"{error}. Boxes of a tensor on all ranks must cover it, each element once; the same "
            "box may be on several."
        ) from error
    for key, entry in entries.items():
        if entry.dtype is not None and 0 in entry.shape:  # nobody has anything of it
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), []
            )
    return Agreed(holders, found[:ranks], metadata, numbers)


def _common(all_told: Sequence[Told]) -> dict[str, Entry]:
    """Return the entries of all ranks, which must not contradict each other."""
    for rank, one in enumerate(all_told):
        if one.rows != all_told[0].rows:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {_listed(all_told[0].rows)}; rank {rank} has "
                f"{_listed(one.rows)}. All ranks give the same Rows, without ids if they have none."
            )
    first: dict[str, tuple[int, Entry]] = {}
    for rank, one in enumerate(all_told):
        for key, entry in {**one.entries, **one.rows}.items():
            other, found = first.setdefault(key, (rank, entry))
            if found != entry:
                raise DisagreementError(
                    f"ranks disagree on {key!r}: on rank {other} it is {found}, and on rank {rank} "
                    f"{entry}. {_MEND}"
                )
    entries = {key: entry for key, (_, entry) in first.items()}
    inner = {entry.path[:depth] for entry in entries.values() for depth in range(len(entry.path))}
    for key, entry in entries.items():
        if entry.path in inner and not entry.is_empty:
            raise DisagreementError(
                f"{key!r} is {entry} on rank {first[key][0]}, and a container on another. {_MEND}"
            )
    # one that is empty on a rank need not be so on others, which have parts of more
    return {key: entry for key, entry in entries.items() if entry.path not in inner}


def _listed(rows: Mapping[str, Entry]) -> str:
    return ", ".join(f"{key!r}: {entry}" for key, entry in sorted(rows.items())) or "none"


def _holders(all_told: Sequence[Told], entries: Mapping[str, Entry]) -> dict[Piece, list[int]]:
    holders: dict[Piece, list[int]] = {}
    for rank, one in enumerate(all_told):
        for key in sorted(one.entries.keys() & entries.keys()):
            entry = entries[key]
            if entry.dtype is None:
                holders.setdefault(Piece(key), []).append(rank)
            elif entry.is_whole and 0 not in entry.shape:
                whole = Piece(key, (0,) * len(entry.shape), entry.shape)
                holders.setdefault(whole, []).append(rank)
        for piece in one.boxes:
            holders.setdefault(piece, []).append(rank)
        for key, entry in one.rows.items():
            block = rows_of(entry.shape[0], rank, len(all_told))
            sizes = (len(block), *entry.shape[1:])
            if 0 not in sizes:
                at = (block.start, *(0,) * (len(sizes) - 1))
                holders[Piece(key, at, sizes)] = [rank]
    return holders


def rows_of(total: int, rank: int, ranks: int) -> range:
    """Return which rows of a whole a rank writes."""
    return ShardSizes.balanced(total, ranks).range(rank)


def _check_volume(entries: Mapping[str, Entry], holders: Mapping[Piece, list[int]]) -> None:
    # torch's planner looks at this only where there are several ranks
    volume = dict.fromkeys(entries, 0)
    for piece in holders:
        volume[piece.key] += prod(piece.sizes) if piece.sizes else 1
    for key, entry in entries.items():
        if entry.dtype is not None and volume[key] != prod(entry.shape):
            raise ArgumentError(
                f"the boxes of {key!r} on all ranks have {volume[key]} elements, and the tensor of "
                f"shape {entry.shape} has {prod(entry.shape)}: there are gaps or overlaps."
            )


def check_copies(
    what: str, leaves: Leaves, holders: Mapping[Piece, list[int]], ranks: Ranks
) -> None:
    """Compare what several ranks have; collective.

    Raises
    ------
    DisagreementError
        On every rank, if copies differ, with their keys and the ranks.
    """
    several = [piece for piece in sorted(holders, key=str) if len(holders[piece]) > 1]
    if not several:
        return  # on all ranks
    own = {piece: _digest(leaves, piece) for piece in several if ranks.rank in holders[piece]}
    everywhere = [piece for piece in several if len(holders[piece]) == ranks.size]
    summary = crc32(repr([own[piece] for piece in everywhere]).encode())
    rest = {piece: own[piece] for piece in own if len(holders[piece]) < ranks.size}
    given = share(what, lambda: (summary, rest), ranks)
    compared = [parts for _, parts in given]
    if any(other != given[0][0] for other, _ in given):
        compared = share(what, lambda: own, ranks)
    first: dict[Piece, int] = {}
    keys, others = {}, set()
    for rank, parts in enumerate(compared):
        for piece, value in parts.items():
            if first.setdefault(piece, value) != value:
                keys[piece.key] = holders[piece][0]
                others.add(rank)
    if keys:
        named = ", ".join(map(repr, list(keys)[:5])) + (", ..." if len(keys) > 5 else "")
        raise DisagreementError(
            f"{what}: {len(keys)} keys have other contents on ranks {sorted(others)} than on rank "
            f"{min(keys.values())}: {named}. {_MEND}"
        )


def _digest(leaves: Leaves, piece: Piece) -> int:
    value = leaves.found[piece.key]
    if isinstance(value, Value):
        return value.digest
    return crc32(repr(digest(piece_of(value, piece))).encode())
