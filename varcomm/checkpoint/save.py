"""``save``: the state of all ranks in one folder, replaced by one rename."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from math import prod
from pathlib import Path
from typing import Any, Self, TypeAlias
from zlib import crc32

import torch

from varcomm.checkpoint.index import KIND, part_name
from varcomm.checkpoint.parts import (
    Ranks,
    RowsById,
    alone,
    boxes_of,
    few,
    is_whole,
    sorted_rows,
)
from varcomm.checkpoint.state import Holder, Leaf, Walk, checked_state
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_flag, holds_values
from varcomm.ops.digest import digest, require_equal
from varcomm.sharding.files import FolderSave, check_cover, new_token
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import on_all_ranks
from varcomm.transport.auxiliary_group import aside
from varcomm.transport.group import GroupLike
from varcomm.transport.serialization import dtype_of, encoded

logger = logging.getLogger("varcomm")

_WHAT = "checkpoint.save"

_FIX = (
    "Values must be identical on all ranks (varcomm.data_parallel.sum_gradients keeps them so) "
    "unless wrapped in varcomm.sharding.Sharded, RowsById or PerRank. Of a module or an optimizer "
    "save the object itself, not its state_dict()."
)


def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    async_: bool = False,
    group: GroupLike = None,
) -> PendingSave | None:
    """Write a checkpoint that any number of ranks can load, and replace an earlier one.

    Collective: all ranks of `group` call it with the same folder on a shared file system. One
    process needs no torch.distributed. A crash at any time leaves the earlier or the new checkpoint
    complete.

    Parameters
    ----------
    state : dict
        Values by name, in nested dicts and lists. Tensors are identical on all ranks. Each rank has
        a part of :class:`~varcomm.sharding.Sharded`, DTensor and :class:`RowsById`. Other values
        are modules, optimizers, generators, objects with ``state_dict`` and ``load_state_dict``,
        plain values, and :class:`PerRank` around values that differ between ranks.
    folder : str or path
        The same on all ranks; made if it does not exist. Other files in the folder are not changed.
    async_ : bool
        Copy all tensors to CPU memory, return a :class:`PendingSave`, and write in a thread. The
        next `save`, :func:`load` or :func:`read` waits for it and raises its error.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    None or PendingSave
        A handle, with `async_`.

    Raises
    ------
    ArgumentError
        On every rank, if a value cannot be saved, if boxes of a tensor leave gaps or overlap, or
        if the folder cannot be written to. The earlier checkpoint is intact.
    DisagreementError
        On every rank, if values that must be identical differ; it names keys and ranks.

    See Also
    --------
    load, export, PendingSave

    Notes
    -----
    Communication: 3 to 5 rounds of small messages. Each row is sent once, to the rank that writes
    the row.

    In one process: the same files, which any number of ranks can load.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import load, save
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> state = {"model": model, "optimizer": optimizer, "step": 7}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(state, folder)
    ...     state["step"] = 0
    ...     load(state, folder)
    >>> state["step"]
    7
    """
    ranks, token = Ranks.of(group), new_token()

    def collect() -> tuple[Path, State]:
        finish_pending()
        checked_flag(async_, "async_", "")
        # absolute: the process may go to another folder meanwhile
        return Path(folder).absolute(), State(checked_state(state), ranks)

    def brief(found: tuple[Path, State]) -> tuple[Any, ...]:
        own = found[1]
        rows = sorted((key, str(rows.tensor.dtype), rows.shape) for key, rows in own.rows.items())
        call = {"folder": str(Path(folder)), "async_": async_, "RowsById": rows}
        return token, call, own.brief()

    (target, own), shared = ranks.agree(_WHAT, collect, brief)
    tokens, calls, briefs = zip(*shared, strict=True)
    require_equal(_WHAT, calls)
    plan = Plan.of(_WHAT, own, briefs, ranks)
    for key, rows in sorted(own.rows.items()):
        own.tensors[own.place(key, rows)] = sorted_rows(_WHAT, key, rows, ranks)
    check_copies(_WHAT, own.tensors, plan, ranks)
    contents = {plan.name(piece): own.tensors[piece] for piece in plan.pieces[ranks.rank]}
    task = FolderSave(target, KIND, tokens[0])
    what = f"{_WHAT} to {Path(folder)}"
    if not async_:
        _write(what, task, plan, contents, ranks)
        return None
    staged, _ = ranks.agree(_WHAT, lambda: _staged(contents), lambda _: None)
    others = ranks if ranks.group is None else Ranks(aside(ranks.group))
    return PendingSave(lambda: _write(f"{what} with async_=True", task, plan, staged, others))


class PendingSave:
    """An asynchronous save, returned by :func:`save` with ``async_=True``.

    The save finishes without further calls, on all ranks or on none. At exit, the interpreter waits
    until the save has ended. An error is logged at once by the logger ``"varcomm"``.

    See Also
    --------
    save, load

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import read, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"x": torch.ones(2)}, folder, async_=True).wait()
    ...     read(folder)
    {'x': tensor([1., 1.])}
    """

    # The save of this process that is in flight, or that failed before wait() was called. A second
    # one would hold a second copy of the model and would sweep the files of the first.
    _latest: PendingSave | None = None

    def __init__(self, run: Callable[[], None]) -> None:
        def logged() -> None:
            try:
                run()
            except BaseException as error:
                logger.error("%s", error)
                raise

        self._future = ThreadPoolExecutor(1, "varcomm.checkpoint").submit(logged)
        PendingSave._latest = self

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error; no communication."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks; no communication.

        If the checkpoint could not be written, every rank raises VarcommError with the name of the
        folder, which still has the earlier checkpoint. CommunicationError if ranks could not
        compare their results.
        """
        wait([self._future])
        if PendingSave._latest is self:
            PendingSave._latest = None
        self._future.result()


def finish_pending() -> None:
    """Wait for the asynchronous save in flight, and raise its error."""
    if PendingSave._latest is not None:
        PendingSave._latest.wait()


# One key of the state as the index has it, and what a rank has of it: its "kind" is "value",
# "whole" or "parts".
_Entry: TypeAlias = dict[str, Any]

# Key, offsets and sizes of a box: the unit that one rank writes.
Piece: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


_EMPTY: tuple[Any, ...] = (encoded({}), [])


class State:
    """The state of this rank: its tensors, and the description that ranks exchange."""

    def __init__(self, state: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        self.tensors: dict[Piece, torch.Tensor] = {}
        self.rows: dict[str, RowsById] = {}  # the same on all ranks
        self.common: dict[str, _Entry] = {}  # mostly the same on all ranks
        self.per_rank: dict[str, _Entry] = {}
        self.parts: list[Piece] = []  # of tensors that are sharded over ranks
        for leaf in Walk(state, ranks.rank).leaves(Leaf(state)):
            if isinstance(leaf.value, Holder):
                continue  # after its leaves
            key = leaf.key
            if other := self.common.get(key) or self.per_rank.get(key):
                both = f"{other['path']} and {leaf.path}"
                raise ArgumentError(f"{both} would both be saved as {key!r}. Rename one.")
            entries = self.per_rank if leaf.own else self.common
            entries[key] = {"path": leaf.path, **self._entry(key, leaf)}

    def brief(self) -> tuple[int, dict[str, _Entry], list[Piece]]:
        """Return the message to other ranks: a digest of common keys, and this rank's parts."""
        return crc32(_in_order(self.common).encode()), self.per_rank, self.parts

    def place(self, key: str, rows: RowsById) -> Piece:
        """Return the rows of a full tensor that this rank writes."""
        block = ShardSizes.balanced(rows.total, self._ranks.size).range(self._ranks.rank)
        return key, (block.start, *(0,) * (len(rows.shape) - 1)), (len(block), *rows.shape[1:])

    def _entry(self, key: str, leaf: Leaf) -> _Entry:
        value = leaf.value
        if isinstance(value, RowsById):
            self.rows[key] = value
            self.parts.append(self.place(key, value))
            return _described(value.tensor.dtype, value.shape, "parts")
        if not isinstance(value, torch.Tensor):
            try:
                content = encoded(value)
                json.dumps(content)
            except (TypeError, ValueError) as error:
                raise ArgumentError(f"{key!r} cannot be saved: {error}.") from error
            return {"kind": "value", "value": content}
        whole = is_whole(value)
        odd = value.is_nested or value.layout != torch.strided or value.is_quantized
        if odd or value.is_meta or (whole and not holds_values(value)):
            kind = f"{type(value).__name__}, {value.layout}, {value.device}"
            raise ArgumentError(f"{key!r} must be a plain dense tensor; got {kind}.")
        if leaf.own and not whole:
            raise ArgumentError(f"{key!r} is sharded over ranks and cannot be inside PerRank.")
        found = {(key, b.offsets, tuple(b.tensor.shape)): b.tensor for b in boxes_of(key, value)}
        self.tensors |= found
        self.parts += [] if whole else found
        return _described(value.dtype, value.shape, "whole" if whole else "parts")


def _described(dtype: torch.dtype, shape: Sequence[int], kind: str) -> _Entry:
    return {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "shape": tuple(shape)}


def _in_order(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


class Plan:
    """The boxes of each tensor, and those that each rank writes (`pieces`); the same on all ranks.

    `holders` has the ranks with a copy of each box.
    """

    @classmethod
    def of(cls, what: str, own: State, briefs: Sequence[Any], ranks: Ranks) -> Self:
        """Make the plan from the brief of every rank's state; collective."""
        digests, per_rank, parts = zip(*briefs, strict=True)
        commons = [own.common] * ranks.size
        if len(set(digests)) > 1:  # mostly ranks have the same keys
            _, commons = ranks.agree(what, lambda: own.common)
        entries = [common | more for common, more in zip(commons, per_rank, strict=True)]
        return alone(what, lambda: cls(entries, parts))  # the same on all ranks

    def __init__(self, entries: Sequence[Mapping[str, _Entry]], parts: Sequence[Any]) -> None:
        self.entries = _merged(entries)
        self.holders: dict[Piece, list[int]] = {}
        for rank, own in enumerate(entries):
            whole = [
                (key, (0,) * len(entry["shape"]), entry["shape"])
                for key, entry in own.items()
                if entry["kind"] == "whole"
            ]
            for piece in (*parts[rank], *whole):
                if prod(piece[2]):
                    self.holders.setdefault(piece, []).append(rank)
        self.boxes: dict[str, list[Piece]] = {key: [] for key in self.entries}
        for piece in self.holders:
            self.boxes[piece[0]].append(piece)
        for key, entry in self.entries.items():
            if "shape" in entry:
                check_cover(key, entry["shape"], [box for _, *box in self.boxes[key]])
        self.pieces: list[list[Piece]] = [[] for _ in parts]
        load = [0] * len(parts)
        # boxes of few ranks first; replicated ones then even out the load
        for piece, able in sorted(self.holders.items(), key=lambda item: (len(item[1]), item[0])):
            writer = min(able, key=load.__getitem__)
            self.pieces[writer].append(piece)
            load[writer] += dtype_of(self.entries[piece[0]]["dtype"]).itemsize * prod(piece[2])
        names = Counter(self.name(piece) for piece in self.holders)
        for name in (name for name, times in names.items() if times > 1):
            raise ArgumentError(f"two tensors would be saved as {name!r}. Rename one.")

    def name(self, piece: Piece) -> str:
        """Return the name of a box in its file."""
        key, offsets, sizes = piece
        return part_name(key, self.entries[key]["shape"], offsets, sizes)

    def index(self) -> dict[str, Any]:
        """Return the content of the index."""
        entries = {key: dict(entry) for key, entry in self.entries.items()}
        for entry in entries.values():
            if entry.pop("kind") != "value":
                entry["boxes"] = []
        for rank, pieces in enumerate(self.pieces):
            for key, *box in pieces:
                entries[key]["boxes"].append([rank, *box])
        return {"entries": entries}


def _merged(given: Sequence[Mapping[str, _Entry]]) -> dict[str, _Entry]:
    """Return the entries of all ranks, which must not contradict each other."""
    first: dict[str, tuple[int, _Entry]] = {}
    for rank, entries in enumerate(given):
        for key, entry in entries.items():
            other, known = first.setdefault(key, (rank, entry))
            if known is not entry and _in_order(known) != _in_order(entry):
                raise DisagreementError(
                    f"ranks disagree on {key!r}: on rank {other} it is {_shown(known)}, and on "
                    f"rank {rank} {_shown(entry)}. {_FIX}"
                )
    inner = {e["path"][:depth] for _, e in first.values() for depth in range(len(e["path"]))}
    found = {}
    for key, (rank, entry) in first.items():
        if entry["path"] not in inner:
            found[key] = entry
        elif entry.get("value") not in _EMPTY:  # which may have entries on other ranks
            raise DisagreementError(
                f"{key!r} is {_shown(entry)} on rank {rank}, and a container on another. {_FIX}"
            )
    return found


def _shown(entry: _Entry) -> str:
    if "value" in entry:
        return f"a plain value {json.dumps(entry['value'])[:50]}"
    part = "parts of " if entry["kind"] == "parts" else ""
    tied = f", shared with {entry['tied']!r}" if "tied" in entry else ""
    return f"{part}a tensor of shape {entry['shape']}, torch.{entry['dtype']}{tied}"


def check_copies(
    what: str, tensors: Mapping[Piece, torch.Tensor], plan: Plan, ranks: Ranks
) -> None:
    """Raise on every rank if copies of a box differ between ranks; collective."""
    several = sorted(item for item in plan.holders.items() if len(item[1]) > 1)
    if not several:
        return  # on all ranks
    own = [crc32(repr(digest(tensors.get(piece))).encode()) for piece, _ in several]
    _, digests = ranks.agree(what, lambda: own)
    wrong: dict[str, list[int]] = {}
    for place, ((key, *_), able) in enumerate(several):
        if others := [r for r in able if digests[r][place] != digests[able[0]][place]]:
            wrong[key] = others
    if wrong:
        named = few([f"{key!r} on ranks {others}" for key, others in wrong.items()])
        raise DisagreementError(f"{what}: {len(wrong)} tensors differ: {named}. {_FIX}")


def _staged(contents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU, which training does not change."""
    staged = {}
    for name, value in contents.items():
        # copies into pinned memory run at full speed and one after the other
        copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        staged[name] = copy.copy_(value, non_blocking=True)
    for device in {value.device for value in contents.values() if value.is_cuda}:
        torch.cuda.synchronize(device)
    return staged


def _write(
    what: str, task: FolderSave, plan: Plan, contents: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Write on all ranks, and make the files the checkpoint in the folder; collective."""

    def finish() -> None:
        if ranks.rank == 0:
            task.commit(plan.index(), digests)

    try:
        _, digests = ranks.agree(what, lambda: task.write(ranks.rank, contents))
        ranks.agree(what, finish)
    except Exception as error:
        # if a rank has exited, another one may be about to commit, and the files must stay
        if ranks.group is None or on_all_ranks(error):
            task.discard()
        raise
