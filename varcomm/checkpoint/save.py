"""``save``: the state of all ranks in one folder, replaced by one rename."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from varcomm.checkpoint.index import KIND, Keys, encode, joined, part_name
from varcomm.checkpoint.state import (
    Holder,
    Leaf,
    Rows,
    Walk,
    boxes_of,
    check_parts,
    checked_state,
    is_whole,
    shown,
)
from varcomm.errors import ArgumentError, DisagreementError, VarcommError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import digest
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sharding import Box, Sharded
from varcomm.sharding.files import FolderSave, check_cover, new_token
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree_and_share, on_all_ranks
from varcomm.transport.auxiliary_group import aside
from varcomm.transport.group import Group, GroupLike, resolve
from varcomm.transport.serialization import travels

__all__ = ["PendingSave", "Ranks", "alone", "block_of", "finish_pending", "movable", "save"]

T = TypeVar("T")

logger = logging.getLogger("varcomm")

_WHAT = "checkpoint.save"

_FIX = (
    "Values must be identical on all ranks (varcomm.data_parallel.sum_gradients keeps them so) "
    "unless wrapped in varcomm.sharding.Sharded, Rows or PerRank. Of a module or an optimizer "
    "save the object itself, not its state_dict()."
)


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
    ranks, token = Ranks.of(group), new_token()

    def collect() -> tuple[Path, _Described]:
        finish_pending()
        checked_flag(async_, "async_", "")
        return _checked_folder(folder), _Described(state, ranks.rank)

    def brief(found: tuple[Path, _Described]) -> tuple[Any, ...]:
        call = {"folder": str(Path(folder)), "async_": async_}
        return token, call, found[1].digest(), found[1].per_rank, found[1].boxes

    (target, own), told = ranks.agree(_WHAT, collect, brief)
    tokens, calls, digests, per_rank, boxes = zip(*told, strict=True)
    _check_calls(calls)
    commons = [own.common] * ranks.size
    if len(set(digests)) > 1:  # mostly ranks have the same keys
        _, commons = ranks.agree(_WHAT, lambda: own.common)
    entries = [common | more for common, more in zip(commons, per_rank, strict=True)]
    plan = alone(_WHAT, lambda: _Plan(entries, boxes))  # the same on all ranks
    _check_copies(own.values, plan, ranks)
    rows = sorted(key for key, value in own.values.items() if isinstance(value, Rows))
    tensors = own.values | {key: _sorted_rows(key, own.values[key], ranks) for key in rows}
    contents = plan.contents(tensors, ranks.rank)
    task = FolderSave(target, KIND, tokens[0])
    if not async_:
        _write(f"{_WHAT} to {Path(folder)}", task, plan, contents, ranks)
        return None
    staged, _ = ranks.agree(_WHAT, lambda: _staged(contents), lambda _: None)
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


# ---- ranks ---------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a group, or this process alone if torch.distributed is not initialized."""

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @classmethod
    def of(cls, group: GroupLike) -> Ranks:
        """Resolve the `group` of a call."""
        initialized = dist.is_available() and dist.is_initialized()
        return cls(None if group is None and not initialized else resolve(group))

    def agree(
        self, what: str, local: Callable[[], T], public: Callable[[T], Any] = lambda value: value
    ) -> tuple[T, list[Any]]:
        """Return the result of `local` and ``public(result)`` of every rank, or raise on all."""
        if self.group is not None:
            return agree_and_share(what, local, public, self.group)
        try:
            value = local()
            return value, [public(value)]
        except Exception as error:
            kind = type(error) if isinstance(error, VarcommError) else ArgumentError
            raise kind(f"{what}: {error}") from error


def alone(what: str, local: Callable[[], T]) -> T:
    """Run `local` without other ranks; errors name the call."""
    return Ranks(None).agree(what, local)[0]


def block_of(total: int, rank: int, ranks: int) -> range:
    """Return the rows of a full tensor that a rank reads or writes for :class:`Rows`."""
    return ShardSizes.balanced(total, ranks).range(rank)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that torch can index and send, with the same bits."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed.get(tensor.dtype, tensor.dtype))


def _sorted_rows(key: str, rows: Rows, ranks: Ranks) -> Sharded:
    """Send Rows to the ranks that write them, and return this rank's block; collective."""
    block = block_of(rows.total, ranks.rank, ranks.size)
    ids, tensor = rows.ids, movable(rows.tensor)
    if ranks.group is not None:
        owner = ShardSizes.balanced(rows.total, ranks.size).owner(ids)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=ranks.size).tolist()
        group = ranks.group.process_group
        plan = ExchangePlan.from_indices(order.split(counts), len(ids), group=group)
        with torch.no_grad():
            ids, tensor = plan(ids), plan(tensor)

    def check() -> None:
        copies = (ids - block.start).bincount(minlength=len(block))
        if bool((copies != 1).any()):
            row = int((copies != 1).nonzero()[0])
            raise ArgumentError(
                f"{key!r}: row {block.start + row} of {rows.total} is given {int(copies[row])} "
                "times by all ranks together. The ids of Rows must have each row once."
            )

    ranks.agree(_WHAT, check)
    full = torch.empty_like(tensor)
    full[ids - block.start] = tensor
    box = Box((block.start, *(0,) * (tensor.dim() - 1)), full.view(rows.tensor.dtype))
    return Sharded((rows.total, *tensor.shape[1:]), [box])


# ---- descriptions of the states of ranks ---------------------------------------------------------


@travels
class _Entry(NamedTuple):
    """One key of the state, as ranks describe it to each other."""

    path: Keys
    kind: str  # "value", "whole", "parts" or "rows"
    dtype: torch.dtype | None  # None for a plain value
    shape: tuple[int, ...]
    value: str  # JSON of a plain value

    def __str__(self) -> str:
        if self.dtype is None:
            short = self.value if len(self.value) < 50 else f"{self.value[:50]}..."
            return "an empty container" if self.is_empty else f"a plain value {short}"
        part = "parts of " if self.kind == "parts" else ""
        return f"{part}a tensor of shape {self.shape}, {self.dtype}"

    @property
    def is_empty(self) -> bool:
        return self.value in ("{}", "[]")

    def in_order(self) -> _Entry:
        """Return the entry with the keys of dicts in one order."""
        value = json.dumps(json.loads(self.value), sort_keys=True) if self.value else ""
        return self._replace(value=value)


# Key, offsets and sizes of a box: the unit that one rank writes.
_Piece: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


class _Described:
    """The state of this rank: its tensors, and what ranks tell each other of them."""

    def __init__(self, state: Any, rank: int) -> None:
        self.values: dict[str, Any] = {}  # tensors and Rows
        self.common: dict[str, _Entry] = {}  # mostly the same on all ranks
        self.per_rank: dict[str, _Entry] = {}
        self.boxes: list[_Piece] = []
        for leaf in Walk(checked_state(state), rank).leaves(state):
            if not isinstance(leaf.value, Holder):
                self._add(joined(leaf.path), leaf)

    def digest(self) -> int:
        """Return a digest of the common entries."""
        return crc32(repr(sorted(self.common.items())).encode())

    def _add(self, key: str, leaf: Leaf) -> None:
        path, value, _, own, _ = leaf
        if other := self.common.get(key) or self.per_rank.get(key):
            raise ArgumentError(
                f"two parts of the state would be saved as {key!r}: {other.path} and {path}. "
                "Rename one of them."
            )
        if isinstance(value, Rows):
            shape = (value.total, *value.tensor.shape[1:])
            entry = _Entry(path, "rows", value.tensor.dtype, shape, "")
        elif isinstance(value, torch.Tensor):
            _check_saved(key, value, own)
            kind = "whole" if is_whole(value) else "parts"
            entry = _Entry(path, kind, value.dtype, tuple(value.shape), "")
            if kind == "parts":
                found = boxes_of(key, value)
                self.boxes += [(key, box.offsets, tuple(box.tensor.shape)) for box in found]
        else:
            entry = _Entry(path, "value", None, (), _as_json(key, value))
        if entry.dtype is not None:
            self.values[key] = value
        (self.per_rank if own else self.common)[key] = entry


def _check_saved(key: str, tensor: torch.Tensor, own: bool) -> None:
    """Raise ArgumentError if a tensor cannot be saved."""
    ragged = tensor.is_nested
    if ragged or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ArgumentError(f"{key!r} must be a dense tensor with values; got {shown(tensor)}.")
    if not is_whole(tensor):
        if own:
            raise ArgumentError(f"{key!r} is sharded over ranks and cannot be inside PerRank.")
        check_parts(key, tensor)
    elif type(tensor) is not torch.Tensor:
        raise ArgumentError(
            f"{key!r} is a {type(tensor).__name__}, which could not be loaded as such. Save a "
            "plain tensor."
        )


def _as_json(key: str, value: Any) -> str:
    try:
        return json.dumps(encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise ArgumentError(
            f"{key!r} has type {kind} and cannot be saved ({error}). Save tensors, texts, numbers "
            "of Python's own types, and lists and dicts of them."
        ) from error


def _check_calls(calls: Sequence[Mapping[str, Any]]) -> None:
    for word, first in calls[0].items():
        if others := [rank for rank, call in enumerate(calls) if call[word] != first]:
            raise DisagreementError(
                f"{_WHAT}: ranks disagree on {word}: rank 0 has {first}, rank {others[0]} has "
                f"{calls[others[0]][word]}."
            )


# ---- which rank writes what ----------------------------------------------------------------------


class _Plan:
    """The boxes that each rank writes (`pieces`); the same on all ranks.

    `holders` has the ranks with a copy of each box.
    """

    def __init__(
        self, entries: Sequence[Mapping[str, _Entry]], boxes: Sequence[Sequence[_Piece]]
    ) -> None:
        self.entries = _merged(entries)
        self.holders: dict[_Piece, list[int]] = {}
        for rank, (own, parts) in enumerate(zip(entries, boxes, strict=True)):
            for piece in (*parts, *_full_pieces(own, rank, len(boxes))):
                self.holders.setdefault(piece, []).append(rank)
        by_key: dict[str, list[Any]] = {key: [] for key in self.entries}
        for key, *box in self.holders:
            by_key[key].append(box)
        for key, entry in self.entries.items():
            if entry.dtype is not None:
                check_cover(key, entry.shape, by_key[key])
        self.pieces: list[list[_Piece]] = [[] for _ in boxes]
        load = [0] * len(boxes)
        # boxes of few ranks first; replicated ones then even out the load
        for piece, able in sorted(self.holders.items(), key=lambda item: (len(item[1]), item[0])):
            writer = min(able, key=load.__getitem__)
            self.pieces[writer].append(piece)
            dtype = self.entries[piece[0]].dtype
            load[writer] += (dtype.itemsize if dtype else 1) * prod(piece[2])
        for rank, pieces in enumerate(self.pieces):
            for name, times in Counter(map(self._name, pieces)).items():
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
        entries: dict[str, Any] = {}
        for key, entry in self.entries.items():
            entries[key] = {"path": entry.path}
            if entry.dtype is None:
                entries[key]["value"] = json.loads(entry.value)
            else:
                dtype = str(entry.dtype).removeprefix("torch.")
                entries[key] |= {"dtype": dtype, "shape": entry.shape, "boxes": []}
        for rank, pieces in enumerate(self.pieces):
            for key, *box in pieces:
                entries[key]["boxes"].append([rank, *box])
        return {"entries": entries}


def _merged(given: Sequence[Mapping[str, _Entry]]) -> dict[str, _Entry]:
    """Return the entries of all ranks, which must not contradict each other."""
    rows = [{k: e for k, e in entries.items() if e.kind == "rows"} for entries in given]
    for rank, found in enumerate(rows):
        if found != rows[0]:
            raise DisagreementError(
                f"ranks disagree on Rows: rank 0 has {_listed(rows[0])}; rank {rank} has "
                f"{_listed(found)}. Give the same Rows on all ranks, without ids if a rank has "
                "none."
            )
    first: dict[str, tuple[int, _Entry]] = {}
    for rank, entries in enumerate(given):
        for key, entry in entries.items():
            other, known = first.setdefault(key, (rank, entry))
            if known != entry and known.in_order() != entry.in_order():
                raise DisagreementError(
                    f"ranks disagree on {key!r}: on rank {other} it is {known}, and on rank {rank} "
                    f"{entry}. {_FIX}"
                )
    merged = {key: entry for key, (_, entry) in first.items()}
    inner = {entry.path[:depth] for entry in merged.values() for depth in range(len(entry.path))}
    for key, entry in merged.items():
        if entry.path in inner and not entry.is_empty:
            raise DisagreementError(
                f"{key!r} is {entry} on rank {first[key][0]}, and a container on another. {_FIX}"
            )
    # a container that is empty on one rank may have entries on others
    return {key: entry for key, entry in merged.items() if entry.path not in inner}


def _listed(rows: Mapping[str, _Entry]) -> str:
    return ", ".join(f"{key!r}: {entry}" for key, entry in sorted(rows.items())) or "none"


def _full_pieces(entries: Mapping[str, _Entry], rank: int, ranks: int) -> Iterator[_Piece]:
    """Yield what a rank can write of tensors that are whole, or whole on all ranks together."""
    for key, (_, kind, _, shape, _) in entries.items():
        zeros = (0,) * len(shape)
        if kind == "whole" and prod(shape):
            yield key, zeros, shape
        elif kind == "rows" and prod(shape) and (block := block_of(shape[0], rank, ranks)):
            yield key, (block.start, *zeros[1:]), (len(block), *shape[1:])


def _box(tensors: Mapping[str, torch.Tensor], piece: _Piece) -> torch.Tensor:
    key, *place = piece
    found = boxes_of(key, tensors[key])
    return next(box.tensor for box in found if [box.offsets, tuple(box.tensor.shape)] == place)


def _check_copies(tensors: Mapping[str, torch.Tensor], plan: _Plan, ranks: Ranks) -> None:
    """Raise on every rank if copies of a box differ between ranks; collective."""
    shared: dict[tuple[int, ...], list[_Piece]] = {}  # by the ranks that have copies
    for piece, able in sorted(plan.holders.items()):
        if len(able) > 1:
            shared.setdefault(tuple(able), []).append(piece)
    if not shared:
        return  # on all ranks
    own = {
        piece: crc32(repr(digest(_box(tensors, piece))).encode())
        for able, pieces in shared.items()
        if ranks.rank in able
        for piece in pieces
    }
    sums = [
        crc32(repr([own.get(piece) for piece in pieces]).encode()) for pieces in shared.values()
    ]
    _, told = ranks.agree(_WHAT, lambda: sums)
    if all(len({told[rank][place] for rank in able}) == 1 for place, able in enumerate(shared)):
        return
    first: dict[_Piece, int] = {}
    keys, others = {}, set()
    for rank, parts in enumerate(ranks.agree(_WHAT, lambda: own)[1]):
        for piece, crc in parts.items():
            if first.setdefault(piece, crc) != crc:
                keys[piece[0]] = plan.holders[piece][0]
                others.add(rank)
    named = ", ".join(map(repr, list(keys)[:5])) + (", ..." if len(keys) > 5 else "")
    raise DisagreementError(
        f"{_WHAT}: {len(keys)} tensors differ between rank {min(keys.values())} and ranks "
        f"{sorted(others)}: {named}. {_FIX}"
    )


# ---- writing -------------------------------------------------------------------------------------


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
        _, digests = ranks.agree(what, lambda: task.write(ranks.rank, contents))
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
