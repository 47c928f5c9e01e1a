"""``save``: what all ranks have, into one folder, at one stroke."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload
from zlib import crc32

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from varcomm.checkpoint.agreement import Agreed, Entry, Told, agreed, check_copies, told
from varcomm.checkpoint.background import PendingSave, finish_earlier
from varcomm.checkpoint.boxes import Piece, piece_of
from varcomm.checkpoint.exchange import in_order
from varcomm.checkpoint.leaves import Leaves, Value, leaves_of
from varcomm.checkpoint.manifest import new_save
from varcomm.checkpoint.together import Alone, Ranks, agree, agree_and_share, share, together
from varcomm.checkpoint.writer import commit, discard, is_committed, write
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_flag
from varcomm.transport.agreement import on_all_ranks
from varcomm.transport.auxiliary_group import aside
from varcomm.transport.group import Group, GroupLike

__all__ = ["save"]

_WHAT = "checkpoint.save"


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
    """Write a checkpoint that any number of ranks can load, in the place of the one before.

    Collective: all ranks of `group` call it with the same folder, of a file system that they share.
    In one process it needs no torch.distributed. Until the new checkpoint is complete, the folder
    holds the earlier one; a crash at any moment leaves one of the two, whole.

    Parameters
    ----------
    state : dict
        What is to be saved, by name; dicts and lists may be nested. Its values:

        - tensors, which all ranks have alike; :class:`~varcomm.sharding.Sharded` and DTensor, of
          which each rank has a part; :class:`Rows` of fields whose rows the ranks share out;
        - modules, by the names of their ``state_dict``: parameters that are marked as sharded
          become parts of the whole. What wraps a module (DistributedDataParallel, torch.compile)
          puts ``module.`` or ``_orig_mod.`` before names: save the module inside;
        - optimizers, whose states go by the names that parameters have in the modules of `state`,
          and are parts of the whole where the parameters are. Those with a ``state_dict`` of
          their own (ZeroRedundancyOptimizer) are refused, unless they have ``state_dict_for``;
        - generators, and any other object with ``state_dict`` and ``load_state_dict``;
        - :class:`PerRank` around what each rank has of its own;
        - numbers, texts, None, and lists and dicts of them.

        Keys of dicts that have tensors or objects in them are texts or ints; at the first level,
        texts.
    folder : str or path
        The same on all ranks. Made if it is not there. What is in it of an earlier checkpoint,
        torch's too, is removed when the new one is complete; other files stay.
    async_ : bool
        Return as soon as all has been copied to the memory of the CPU, and write in a thread.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that save together; None is the whole world.

    Returns
    -------
    None or PendingSave
        With `async_`, what tells when the checkpoint is complete. Another call of `save` or
        :func:`load` waits for it first.

    Raises
    ------
    ArgumentError
        On every rank, if on one of them something can be neither saved nor loaded again without
        pickle; if parts of a tensor do not cover it, or are of another size than they tell; if a
        state of an optimizer, of a parameter that is shared out, is neither like it nor a number;
        or if the folder cannot be written to: with folder and file. What has been written is
        removed, and the earlier checkpoint is there.
    DisagreementError
        On every rank, if what is to be equal on ranks is not; with the keys and the ranks.
    CommunicationError
        If other ranks are gone, or one writes for longer than the limit of the group
        (``varcomm.init(timeout=...)``). The folder has the earlier checkpoint or the new one,
        whole; what else has been written, the next save removes.
    VarcommError
        What went wrong in an asynchronous save before, if nobody has waited for it; it names the
        folder of that save.

    Notes
    -----
    The files are those of :mod:`torch.distributed.checkpoint`, which can load them; what several
    ranks have is written once, by the one that has least to write, and empty parts not at all.
    `varcomm-*.json` beside them tells their sizes and SHA-256, and which keys of dicts were ints:
    torch makes texts of them.

    Communication: three rounds of small messages; one more where ranks have other keys; one more
    where several have the same, whose digests (CRC-32) are compared: each rank reads through all of
    what it has in common with others. Rows travel once, to the rank that writes them.

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
    ranks = together(group)

    def collect() -> tuple[Leaves, Path, bool]:
        finish_earlier()
        checked_flag(async_, "async_", "")
        target = _checked_folder(folder)
        return leaves_of(state, ranks.rank), target, target.exists()

    (leaves, target, there), name, all_told = _told_by_all(collect, folder, async_, ranks)
    found = agree(_WHAT, lambda: agreed(all_told), Alone())  # to which all ranks come alike
    check_copies(_WHAT, leaves, found.holders, ranks)
    for key, rows in sorted(leaves.rows.items()):
        leaves.found[key] = in_order(_WHAT, key, rows, ranks)
    contents: dict[MetadataIndex, torch.Tensor | Value] = {
        item.index: _content(leaves, item) for item in found.plans[ranks.rank].items
    }
    if not async_:
        _finish(f"{_WHAT} to {Path(folder)}", target, name, there, found, contents, ranks)
        return None
    staged = agree(_WHAT, lambda: _staged(contents), ranks)
    others = aside(ranks) if isinstance(ranks, Group) else ranks
    what = f"{_WHAT} to {Path(folder)} with async_=True"
    return PendingSave(lambda: _finish(what, target, name, there, found, staged, others))


Contents: TypeAlias = Mapping[MetadataIndex, torch.Tensor | Value]


def _told_by_all(
    collect: Callable[[], tuple[Leaves, Path, bool]],
    folder: str | os.PathLike[str],
    async_: bool,
    ranks: Ranks,
) -> tuple[tuple[Leaves, Path, bool], str, list[Told]]:
    """Return what `collect` gives, the name of this save, and what each rank tells; collective.

    Mostly ranks have the same keys, and need not list them to each other.
    """
    mine = new_save(uuid.uuid4().hex)

    def gather() -> tuple[tuple[Leaves, Path, bool], Told]:
        collected = collect()
        return collected, told(collected[0])

    def common_of(own: set[str], whole: Told) -> dict[str, Entry]:
        return {key: entry for key, entry in whole.entries.items() if key not in own}

    def brief(
        gathered: tuple[tuple[Leaves, Path, bool], Told],
    ) -> tuple[str, dict[str, Any], int, Told]:
        (leaves, *_), whole = gathered
        alike = sorted(common_of(leaves.own, whole).items())
        rest = {key: whole.entries[key] for key in leaves.own}
        said = {"folder": str(Path(folder)), "async_": async_}
        return mine, said, crc32(repr(alike).encode()), replace(whole, entries=rest)

    (collected, whole), given = agree_and_share(_WHAT, gather, brief, ranks)
    first = given[0][1]
    for word in first:
        if others := [
            rank for rank, (_, said, *_) in enumerate(given) if said[word] != first[word]
        ]:
            raise DisagreementError(
                f"{_WHAT}: ranks disagree on {word}: rank 0 has {first[word]}, rank {others[0]} "
                f"has {given[others[0]][1][word]}."
            )
    common = common_of(collected[0].own, whole)
    if all(digest == given[0][2] for *_, digest, _ in given):
        commons = [common] * ranks.size
    else:
        commons = share(_WHAT, lambda: common, ranks)
    all_told = [
        replace(rest, entries={**every, **rest.entries})
        for every, (*_, rest) in zip(commons, given, strict=True)
    ]
    return collected, given[0][0], all_told


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


def _content(leaves: Leaves, item: WriteItem) -> torch.Tensor | Value:
    value = leaves.found[item.index.fqn]
    if isinstance(value, Value) or item.tensor_data is None or item.index.offset is None:
        return value
    chunk = item.tensor_data.chunk
    return piece_of(value, Piece(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes)))


def _staged(contents: Contents) -> Contents:
    """Return copies on the CPU, which training does not write into."""
    staged = {index: _copy(value) for index, value in contents.items()}
    for device in {v.device for v in contents.values() if isinstance(v, torch.Tensor)}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
    return staged


def _copy(value: torch.Tensor | Value) -> torch.Tensor | Value:
    if isinstance(value, Value):
        return value
    # from memory that is not paged, copies run at full speed and one after the other
    copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)


class _Planner(DefaultSavePlanner):
    """What torch's writer asks for the contents of its plan."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._contents[write_item.index]
        return value.content if isinstance(value, Value) else value


def _finish(
    what: str,
    folder: Path,
    name: str,
    there: bool,
    found: Agreed,
    contents: Contents,
    ranks: Ranks,
) -> None:
    """Write on all ranks, and make it the checkpoint in the folder; collective."""
    plan = found.plans[ranks.rank]

    def finish() -> None:
        if ranks.rank == 0:
            commit(folder, name, found, written)

    try:
        written = share(
            what, lambda: write(folder, name, ranks.rank, plan, _Planner(contents)), ranks
        )
        agree(what, finish, ranks)
    except Exception as error:
        # where a rank is gone, another may be about to commit, and files must stay
        agreed_upon = isinstance(ranks, Alone) or on_all_ranks(error)
        if agreed_upon and not is_committed(folder, name):
            discard(folder, name, ranks.rank)
            if not there:
                with suppress(OSError):  # another rank was faster, or has files there still
                    folder.rmdir()
        raise
