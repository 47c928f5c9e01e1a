"""``save``: the state of all ranks in one folder, replaced by one rename."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, overload
from zlib import crc32

import torch

from varcomm.checkpoint.annotations import Rows
from varcomm.checkpoint.flatten import Leaf, flatten
from varcomm.checkpoint.paths import Keys
from varcomm.checkpoint.ranks import Ranks, alone
from varcomm.checkpoint.reader import KIND, part_name
from varcomm.checkpoint.shards import block_of, boxes_of, is_whole, sorted_rows
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import digest
from varcomm.sharding.files import FolderSave, check_cover, new_token
from varcomm.transport.agreement import on_all_ranks
from varcomm.transport.auxiliary_group import aside
from varcomm.transport.group import GroupLike

__all__ = ["PendingSave", "finish_pending", "save"]

logger = logging.getLogger("varcomm")

_WHAT = "checkpoint.save"

_FIX = (
    "Values must be identical on all ranks (varcomm.data_parallel.sum_gradients keeps them so) "
    "unless wrapped in varcomm.sharding.Sharded, Rows or PerRank. Of a module or an optimizer "
    "save the object itself, not its state_dict()."
)


@overload
def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    async_: Literal[False] = False,
    group: GroupLike = None,
) -> None: ...
@overload
def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    async_: Literal[True],
    group: GroupLike = None,
) -> PendingSave: ...
def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    async_: bool = False,
    group: GroupLike = None,
) -> PendingSave | None:
    """Write a checkpoint that any number of ranks can load, in place of the earlier one.

    Collective: all ranks of `group` call it with the same folder on a shared file system. One
    process needs no torch.distributed. A crash at any moment leaves the earlier checkpoint or the
    new one, whole.

    Parameters
    ----------
    state : dict
        Values by name; dicts and lists may be nested, with texts or ints as keys of dicts that
        have tensors in them. Values may be:

        - tensors, identical on all ranks; :class:`~varcomm.sharding.Sharded` and DTensor, of which
          each rank has boxes; :class:`Rows` of a larger tensor;
        - modules, by the names of their ``state_dict``; marked parameters are sharded. Save the
          module inside DistributedDataParallel or torch.compile, which add prefixes to names;
        - optimizers, by the names of parameters in the modules of `state`, sharded as these are.
          Optimizers with a ``state_dict`` of their own need ``state_dict_for`` too;
        - generators, and objects with ``state_dict`` and ``load_state_dict``;
        - :class:`PerRank` around values of each rank's own;
        - numbers, texts, None, and lists and dicts of them.
    folder : str or path
        The same on all ranks; made if it does not exist. Other files in it stay.
    async_ : bool
        Return after all tensors have been copied to CPU memory, and write in a thread.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Returns
    -------
    None or PendingSave
        With `async_`, a handle. The next `save`, :func:`load` or :func:`read` waits for it.

    Raises
    ------
    ArgumentError
        On every rank, if a value cannot be saved, if boxes of a tensor leave gaps or overlap, or
        if the folder cannot be written to. The earlier checkpoint is intact.
    DisagreementError
        On every rank, if values that must be identical differ; it names keys and ranks.
    CommunicationError
        If a rank has exited, or writes for longer than the timeout of the group. The folder has
        the earlier checkpoint or the new one, whole.
    VarcommError
        The error of an earlier asynchronous save on which `wait` was not called.

    Notes
    -----
    The folder has one index, ``checkpoint.json``, and one safetensors file per rank that writes. A
    box that several ranks have is written once, by the rank with least to write.

    Communication: three rounds of small messages; one more if ranks have different keys; one more
    to compare CRC-32 of replicated tensors. Rows travel once, to the rank that writes them.

    In one process: the same call.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import load, save
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"model": model, "optimizer": optimizer, "step": 7}, folder)
    ...     state = {"model": model, "optimizer": optimizer, "step": 0}
    ...     load(state, folder)
    >>> state["step"]
    7
    """
    ranks = Ranks.of(group)

    def collect() -> tuple[dict[str, Leaf], Path]:
        finish_pending()
        checked_flag(async_, "async_", "")
        target = _checked_folder(folder)
        return flatten(state, ranks.rank), target

    flat, target, token, shared = _share(collect, folder, async_, ranks)
    plan = alone(_WHAT, lambda: _Plan(shared))  # the same on all ranks
    tensors = {k: leaf.value for k, leaf in flat.items() if isinstance(leaf.value, torch.Tensor)}
    _check_copies(tensors, plan, ranks)
    rows = {key: leaf.value for key, leaf in flat.items() if isinstance(leaf.value, Rows)}
    for key in sorted(rows):
        tensors[key] = sorted_rows(_WHAT, key, rows[key], ranks)
    contents = plan.contents(tensors, ranks.rank)
    task = FolderSave(target, KIND, token)
    if not async_:
        _write(f"{_WHAT} to {Path(folder)}", task, plan, contents, ranks)
        return None
    staged = ranks.agree(_WHAT, lambda: _staged(contents))
    others = ranks if ranks.group is None else Ranks(aside(ranks.group))
    what = f"{_WHAT} to {Path(folder)} with async_=True"
    return PendingSave(lambda: _write(what, task, plan, staged, others))


class PendingSave:
    """An asynchronous save, returned by :func:`save` with ``async_=True``.

    The save finishes without further calls, on all ranks or on none; an interpreter that exits
    waits for it. An error is logged at once by the logger ``"varcomm"``.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import read, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending = save({"x": torch.ones(2)}, folder, async_=True)
    ...     pending.wait()
    ...     read(folder)
    {'x': tensor([1., 1.])}
    """

    # The save of this process that is in flight, or that failed before wait() was called. A second
    # one would hold a second copy of the model and would sweep the files of the first.
    _latest: PendingSave | None = None

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), name="varcomm.checkpoint")
        PendingSave._latest = self
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error = error
            logger.error("%s", error)

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error; no communication."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks; no communication.

        Raises
        ------
        VarcommError
            The same on every rank, if the checkpoint could not be written; it names the folder,
            which has the earlier checkpoint.
        CommunicationError
            If ranks could not agree: one has exited or was too slow, or the group was destroyed.
        """
        self._thread.join()
        if PendingSave._latest is self:
            PendingSave._latest = None
        if self._error is not None:
            raise self._error


def finish_pending() -> None:
    """Wait for the asynchronous save in flight, and raise its error."""
    if PendingSave._latest is not None:
        PendingSave._latest.wait()


class _Entry(NamedTuple):
    """One key of the state, as ranks describe it to each other."""

    path: Keys
    kind: Literal["value", "whole", "parts", "rows"]
    dtype: torch.dtype | None  # None for a plain value
    shape: tuple[int, ...]
    value: str  # JSON

    @classmethod
    def of(cls, leaf: Leaf) -> _Entry:
        """Return the description of a leaf."""
        path, value, _ = leaf
        if isinstance(value, str):
            return cls(path, "value", None, (), value)
        if isinstance(value, Rows):
            shape = (value.total, *value.tensor.shape[1:])
            return cls(path, "rows", value.tensor.dtype, shape, "")
        kind: Literal["whole", "parts"] = "whole" if is_whole(value) else "parts"
        return cls(path, kind, value.dtype, tuple(value.shape), "")

    def __str__(self) -> str:
        if self.dtype is None:
            short = self.value if len(self.value) < 50 else f"{self.value[:50]}..."
            return "an empty container" if self.is_empty else f"a plain value {short}"
        part = "parts of " if self.kind == "parts" else ""
        return f"{part}a tensor of shape {self.shape}, {self.dtype}"

    @property
    def is_empty(self) -> bool:
        return self.value in ("{}", "[]")

    def agrees(self, other: _Entry) -> bool:
        """Return whether two ranks have the same, dicts in any order."""
        if self[:-1] != other[:-1] or self.value == other.value:
            return self == other
        return _in_order(self.value) == _in_order(other.value)


def _in_order(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True) if text else ""


# Key, offsets and sizes of a box: the unit that one rank writes.
_Piece: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


class _Shared(NamedTuple):
    """The description of one rank's state that all ranks get."""

    entries: dict[str, _Entry]
    boxes: list[_Piece]


def _share(
    collect: Callable[[], tuple[dict[str, Leaf], Path]],
    folder: str | os.PathLike[str],
    async_: bool,
    ranks: Ranks,
) -> tuple[dict[str, Leaf], Path, str, list[_Shared]]:
    """Collect the state of this rank and share its description; collective.

    Mostly ranks have the same keys, and share only a digest of them.
    """
    token = new_token()
    common: dict[str, _Entry] = {}

    def gather() -> tuple[dict[str, Leaf], Path]:
        flat, target = collect()
        common.update((key, _Entry.of(leaf)) for key, leaf in flat.items() if _is_common(leaf))
        return flat, target

    def brief(gathered: tuple[dict[str, Leaf], Path]) -> tuple[Any, ...]:
        flat, _ = gathered
        rest = {key: _Entry.of(leaf) for key, leaf in flat.items() if not _is_common(leaf)}
        boxes = [
            (key, box.offsets, tuple(box.tensor.shape))
            for key, (_, value, _) in flat.items()
            if isinstance(value, torch.Tensor) and not is_whole(value)
            for box in boxes_of(key, value)
        ]
        call = {"folder": str(Path(folder)), "async_": async_}
        return token, call, crc32(repr(sorted(common.items())).encode()), rest, boxes

    (flat, target), given = ranks.agree_and_share(_WHAT, gather, brief)
    tokens, calls, digests, rests, boxes = zip(*given, strict=True)
    for word, first in calls[0].items():
        if others := [rank for rank, call in enumerate(calls) if call[word] != first]:
            raise DisagreementError(
                f"{_WHAT}: ranks disagree on {word}: rank 0 has {first}, rank {others[0]} has "
                f"{calls[others[0]][word]}."
            )
    commons = [common] * ranks.size
    if len(set(digests)) > 1:
        commons = ranks.share(_WHAT, lambda: common)
    shared = []
    for every, rest, own in zip(commons, rests, boxes, strict=True):
        # NamedTuples arrive as tuples
        entries = {key: _Entry(*entry) for key, entry in {**every, **rest}.items()}
        shared.append(_Shared(entries, own))
    return flat, target, tokens[0], shared


def _is_common(leaf: Leaf) -> bool:
    return not leaf.own and not isinstance(leaf.value, Rows)


class _Plan:
    """The boxes that each rank writes (`pieces`); the same on all ranks.

    `holders` has the ranks with a copy of each box.
    """

    def __init__(self, shared: Sequence[_Shared]) -> None:
        self.entries = _merged(shared)
        self.holders: dict[_Piece, list[int]] = {}
        for rank, one in enumerate(shared):
            for piece in _pieces(one, rank, len(shared)):
                self.holders.setdefault(piece, []).append(rank)
        boxes: dict[str, list[Any]] = {key: [] for key in self.entries}
        for key, *box in self.holders:
            boxes[key].append(box)
        for key, entry in self.entries.items():
            if entry.dtype is not None:
                check_cover(key, entry.shape, boxes[key])
        self.pieces: list[list[_Piece]] = [[] for _ in shared]
        load = [0] * len(shared)
        # boxes of few ranks first; replicated ones then even out the load
        for piece, able in sorted(self.holders.items(), key=lambda item: (len(item[1]), item[0])):
            writer = min(able, key=load.__getitem__)
            self.pieces[writer].append(piece)
            dtype = self.entries[piece[0]].dtype
            load[writer] += (dtype.itemsize if dtype else 1) * prod(piece[2])
        for rank, pieces in enumerate(self.pieces):
            name, times = Counter(map(self._name, pieces)).most_common(1)[0] if pieces else ("", 1)
            if times > 1:
                raise ArgumentError(
                    f"rank {rank} would save two tensors as {name!r}. Rename one of them."
                )

    def contents(self, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Return the boxes that a rank writes by their names in its file."""
        return {self._name(piece): _box(tensors, piece) for piece in self.pieces[rank]}

    def _name(self, piece: _Piece) -> str:
        key, offsets, sizes = piece
        return part_name(key, self.entries[key].shape, offsets, sizes)

    def index(self) -> dict[str, Any]:
        """Return the content of the index."""
        boxes: dict[str, list[Any]] = {}
        for rank, pieces in enumerate(self.pieces):
            for key, offsets, sizes in pieces:
                boxes.setdefault(key, []).append([rank, offsets, sizes])
        entries: dict[str, Any] = {}
        for key, entry in self.entries.items():
            if entry.dtype is None:
                entries[key] = {"path": entry.path, "value": json.loads(entry.value)}
            else:
                dtype = str(entry.dtype).removeprefix("torch.")
                found = {"dtype": dtype, "shape": entry.shape, "boxes": boxes.get(key, [])}
                entries[key] = {"path": entry.path, **found}
        return {"entries": entries}


def _merged(shared: Sequence[_Shared]) -> dict[str, _Entry]:
    """Return the entries of all ranks, which must not contradict each other."""
    rows = [{k: e for k, e in one.entries.items() if e.kind == "rows"} for one in shared]
    for rank, found in enumerate(rows):
        if found != rows[0]:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {_listed(rows[0])}; rank {rank} has "
                f"{_listed(found)}. Give the same Rows on all ranks, without ids if a rank has "
                "none."
            )
    first: dict[str, tuple[int, _Entry]] = {}
    for rank, one in enumerate(shared):
        for key, entry in one.entries.items():
            other, known = first.setdefault(key, (rank, entry))
            if not known.agrees(entry):
                raise DisagreementError(
                    f"ranks disagree on {key!r}: on rank {other} it is {known}, and on rank {rank} "
                    f"{entry}. {_FIX}"
                )
    entries = {key: entry for key, (_, entry) in first.items()}
    inner = {entry.path[:depth] for entry in entries.values() for depth in range(len(entry.path))}
    for key, entry in entries.items():
        if entry.path in inner and not entry.is_empty:
            raise DisagreementError(
                f"{key!r} is {entry} on rank {first[key][0]}, and a container on another. {_FIX}"
            )
    # a container that is empty on one rank may have entries on others
    return {key: entry for key, entry in entries.items() if entry.path not in inner}


def _listed(rows: Mapping[str, _Entry]) -> str:
    return ", ".join(f"{key!r}: {entry}" for key, entry in sorted(rows.items())) or "none"


def _pieces(one: _Shared, rank: int, ranks: int) -> list[_Piece]:
    """Return the boxes that a rank can write, empty ones left out."""
    found = list(one.boxes)
    for key, entry in one.entries.items():
        if entry.kind == "whole":
            found.append((key, (0,) * len(entry.shape), entry.shape))
        elif entry.kind == "rows":
            block = block_of(entry.shape[0], rank, ranks)
            rest = entry.shape[1:]
            found.append((key, (block.start, *(0,) * len(rest)), (len(block), *rest)))
    return [piece for piece in found if prod(piece[2])]


def _box(tensors: Mapping[str, torch.Tensor], piece: _Piece) -> torch.Tensor:
    key, offsets, sizes = piece
    return next(
        box.tensor
        for box in boxes_of(key, tensors[key])
        if (box.offsets, tuple(box.tensor.shape)) == (offsets, sizes)
    )


def _check_copies(tensors: Mapping[str, torch.Tensor], plan: _Plan, ranks: Ranks) -> None:
    """Raise on every rank if copies of a box differ between ranks; collective."""
    several = sorted(piece for piece, able in plan.holders.items() if len(able) > 1)
    if not several:
        return  # on all ranks
    own = {
        piece: crc32(repr(digest(_box(tensors, piece))).encode())
        for piece in several
        if ranks.rank in plan.holders[piece]
    }
    everywhere = [piece for piece in several if len(plan.holders[piece]) == ranks.size]
    summary = crc32(repr([own[piece] for piece in everywhere]).encode())
    rest = {piece: crc for piece, crc in own.items() if len(plan.holders[piece]) < ranks.size}
    given = ranks.share(_WHAT, lambda: (summary, rest))
    compared = [parts for _, parts in given]
    if any(other != given[0][0] for other, _ in given):
        compared = ranks.share(_WHAT, lambda: own)
    first: dict[_Piece, int] = {}
    keys: dict[str, int] = {}
    others = set()
    for rank, parts in enumerate(compared):
        for piece, crc in parts.items():
            if first.setdefault(piece, crc) != crc:
                keys[piece[0]] = plan.holders[piece][0]
                others.add(rank)
    if keys:
        named = ", ".join(map(repr, list(keys)[:5])) + (", ..." if len(keys) > 5 else "")
        raise DisagreementError(
            f"{_WHAT}: {len(keys)} tensors differ between rank {min(keys.values())} and ranks "
            f"{sorted(others)}: {named}. {_FIX}"
        )


def _checked_folder(folder: str | os.PathLike[str]) -> Path:
    """Return where to write, wherever the process goes meanwhile, if that seems possible."""
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(
            f"folder must be a path; got {type(folder).__name__}. The order is save(state, folder)."
        )
    target = Path(folder).absolute()
    nearest = next(path for path in (target, *target.parents) if os.path.lexists(path))
    if not nearest.exists():
        raise ArgumentError(f"{nearest} is a symbolic link to {os.readlink(nearest)}, not there.")
    if not nearest.is_dir():
        raise ArgumentError(f"{nearest} is a file; a checkpoint needs a folder.")
    effective = os.access in os.supports_effective_ids
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=effective):
        raise ArgumentError(f"{target} cannot be written to: there is no permission in {nearest}.")
    return target


def _staged(contents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU, which training does not change."""
    staged = {}
    for name, value in contents.items():
        # copies into pinned memory run at full speed and one after the other
        copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        staged[name] = copy.copy_(value, non_blocking=True)
    for device in {value.device for value in contents.values()}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
    return staged


def _write(
    what: str, task: FolderSave, plan: _Plan, contents: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Write on all ranks, and make the files the checkpoint in the folder; collective."""
    existed = task.folder.exists()

    def finish() -> None:
        if ranks.rank == 0:
            task.commit(plan.index(), digests)

    try:
        digests = ranks.share(what, lambda: task.write(ranks.rank, contents))
        ranks.agree(what, finish)
    except Exception as error:
        # if a rank has exited, another one may be about to commit, and the files must stay
        agreed = ranks.group is None or on_all_ranks(error)
        if agreed and not task.is_committed():
            task.discard()
            if not existed:
                with suppress(OSError):  # another rank was faster
                    task.folder.rmdir()
        raise
