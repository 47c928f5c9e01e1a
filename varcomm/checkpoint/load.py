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
from safetensors.torch import save_file

from varcomm.checkpoint.index import Checkpoint, Keys, joined, nested
from varcomm.checkpoint.parts import Ranks, RowsById, alone, boxes_of, few, row_block
from varcomm.checkpoint.save import finish_pending
from varcomm.checkpoint.state import Holder, Leaf, Walk, checked_state, is_bare
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import digest, require_equal
from varcomm.sharding.sharded import Box, refuse_unwritable
from varcomm.transport.group import GroupLike

_WHAT = "checkpoint.load"
_ABSENT = object()


def load(
    state: dict[str, Any] | torch.nn.Module,
    folder: str | os.PathLike[str],
    group: GroupLike = None,
    *,
    verify: bool = True,
) -> None:
    """Load a checkpoint into `state`, on any number of ranks, sharded as `state` is now.

    Collective: all ranks of `group` call it. One process needs no torch.distributed. Tensors are
    overwritten after all checks; then generators and objects load their states.

    Parameters
    ----------
    state : dict or Module
        As for :func:`save`. Names at the first level may be missing, on all ranks or only on some.
        Below the first level, the keys of all ranks together must match the checkpoint. Tensors are
        overwritten in place, and plain values are replaced. Pass None in place of a dict of plain
        values to load any keys. An object with ``state_dict_for(saved)`` receives the saved tree
        with tensors on the meta device, and returns the tensors to overwrite. These tensors are
        then passed to the object's ``load_state_dict``.
    folder : str or path
        A folder of :func:`save`; or a ``.safetensors`` file of another tool, an index with a
        ``weight_map`` as Hugging Face writes it, or a folder with one of these. Tensor names in
        such files are dotted keys: ``a.b`` goes to ``state["a"]["b"]`` or to parameter ``b`` of
        module ``a``.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    verify : bool
        Compare the digest of every file. If False, sizes, shapes and dtypes are still checked, and
        altered values are loaded without an error.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if there is no checkpoint, or ranks find different checkpoints. Also raised
        if a file is missing, cut or altered, if keys, shapes or dtypes do not match, or if a tensor
        cannot be overwritten. After these errors, no value has changed. If an object refuses its
        state, every rank raises as well, but tensors have been overwritten.

    See Also
    --------
    save, read, load_safetensors

    Notes
    -----
    Each rank verifies the digest of every P-th file, and reads only the elements that it needs.
    Communication: four rounds of small messages; rows of :class:`RowsById` are sent once.

    In one process: the checkpoint of one rank, which any number of ranks can read.

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
        checked_flag(verify, "verify", "")
        opened = Checkpoint(Path(folder))
        opened.verify(ranks.rank, ranks.size, verify)
        return opened

    def called(one: Checkpoint) -> dict[str, Any]:
        return {f"the digest of {folder}": one.digest, "verify": verify}

    found, calls = ranks.agree(_WHAT, find, called)
    require_equal(_WHAT, calls)
    targets, fits = ranks.agree(_WHAT, lambda: _Targets(state, found, ranks.rank), _Targets.fit)
    alone(_WHAT, lambda: _check_fit(found, fits))  # the same on all ranks
    blocks = [(key, *row_block(rows, ranks)) for key, rows in targets.rows().items()]

    def overwrite() -> None:
        for key, target in targets.targets.items():
            if not isinstance(target, RowsById):
                found.read(key, boxes_of(key, target))
        for key, block, _ in blocks:
            found.read(key, [block])

    ranks.agree(_WHAT, overwrite)
    for *_, send in blocks:
        send()

    def replace() -> None:
        for put in targets.puts:
            put()

    ranks.agree(_WHAT, replace)


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a full checkpoint on the CPU; no communication.

    Modules and other objects are dicts, sharded tensors and rows full tensors, and :class:`PerRank`
    is a dict whose keys are the ranks as strings. The result for files from other tools is a dict
    of tensors by name.

    Parameters
    ----------
    folder : str or path
        As for :func:`load`.

    Returns
    -------
    dict

    Raises
    ------
    ArgumentError
        If there is no checkpoint, or if a file is missing, cut or altered.

    See Also
    --------
    load, save

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
        if found.files is None:
            return tensors
        flat = {**found.values, **tensors}
        state: dict[str, Any] = nested({path: flat[key] for key, path in found.paths.items()})
        return state

    return alone("checkpoint.read", full)


def export(
    folder: str | os.PathLike[str], file: str | os.PathLike[str], name: str | None = None
) -> None:
    """Write the tensors of a checkpoint as one safetensors file; no communication.

    Full tensors are held in memory.

    Parameters
    ----------
    folder : str or path
        As for :func:`load`.
    file : str or path
        The file to write, such as ``model.safetensors``. An earlier file is replaced.
    name : str, optional
        Write only the tensors below this name of the state, and remove the name from the tensors'
        names.

    Raises
    ------
    ArgumentError
        If the checkpoint cannot be read, has no tensors of this name or of a dtype that safetensors
        lacks, or if writing fails.

    See Also
    --------
    save, load_safetensors, full_state_dict

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
        coming = Path(file).with_name(f".{Path(file).name}.{os.getpid()}")
        try:
            save_file({key.removeprefix(start): t for key, t in tensors.items()}, coming)
            with coming.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(coming, file)
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
    within, asked, problems, rows = zip(*fits, strict=True)
    require_equal(_WHAT, [{"the keys of RowsById": own} for own in rows])
    unexpected = found.of_bits(reduce(or_, within) & ~reduce(or_, asked))
    given = [*dict.fromkeys(chain.from_iterable(problems))]
    parts = {"of the state do not match": given, "are not in the state": unexpected}
    reasons = [f"{len(some)} keys {what}: {few(some)}" for what, some in parts.items() if some]
    if reasons:
        raise ArgumentError(
            f"{found.folder} has the checkpoint of another state. {'; '.join(reasons)}. Nothing "
            "has been loaded."
        )


class _Targets(Walk):
    """The tensors that this rank reads, and the calls that put values in their places."""

    def __init__(self, state: Any, found: Checkpoint, rank: int) -> None:
        super().__init__(state, rank)
        self.found = found
        self.targets: dict[str, torch.Tensor | RowsById] = {}
        self.puts: list[Callable[[], None]] = []
        self.problems: list[str] = []
        self.asked: set[str] = set()
        paths = [()] if isinstance(state, torch.nn.Module) else [(name,) for name in state]
        self.within = {key for path in paths for key in found.keys(path)}
        for leaf in self.leaves(Leaf(state)):
            self._add(leaf.key, leaf)
        self._check_shared()

    def fit(self) -> tuple[Any, ...]:
        """Return the match of the state, for all ranks."""
        within, asked = map(self.found.bits, (self.within, self.asked))
        return within, asked, self.problems, sorted(self.rows())

    def rows(self) -> dict[str, RowsById]:
        """Return the targets that are RowsById, in one order on all ranks."""
        found = sorted(self.targets.items())
        return {key: value for key, value in found if isinstance(value, RowsById)}

    def _check_shared(self) -> None:
        """Raise ArgumentError if two targets are one and different values are saved for them."""
        known: dict[tuple[object, ...], tuple[str, Box]] = {}
        for key, target in self.targets.items():
            for box in [] if isinstance(target, RowsById) else boxes_of(key, target):
                x = box.tensor
                memory = x.device, x.data_ptr(), x.dtype, x.shape, x.stride()
                other, same = known.setdefault(memory, (key, box))
                if other != key and self._saved(key, box) != self._saved(other, same):
                    raise ArgumentError(
                        f"{key!r} and {other!r} share their memory, and {self.found.folder} has "
                        "other values for one than for the other. Nothing has been loaded. Untie "
                        "the two, or load only one of them."
                    )

    def _saved(self, key: str, box: Box) -> object:
        """Return the digest of what is saved for a box."""
        copy = torch.empty_like(box.tensor, device="cpu")
        self.found.read(key, [Box(box.offsets, copy)])
        return digest(copy)

    def opens(self, holder: Holder, path: Keys) -> bool:
        saved = self.found.at(path, _ABSENT)
        if saved is not _ABSENT:
            holder.content = holder.targets(saved)
        elif holder.tree() not in ({}, []):
            self._differs(joined(path), "")
        return saved is not _ABSENT

    def enters(self, path: Keys) -> bool:
        saved = self.found.at(path)
        if not isinstance(saved, Mapping) or not all(str(name).isdecimal() for name in saved):
            self._differs(joined((*path, str(self.rank))), "")
            return False
        self.asked |= self.found.keys(path)
        return str(self.rank) in saved

    def _add(self, key: str, leaf: Leaf) -> None:
        value = leaf.value
        if isinstance(value, Holder):
            self.puts.append(partial(value.take, key))
            return
        if not isinstance(value, torch.Tensor | RowsById):
            saved = self.found.at(leaf.path, _ABSENT)
            if value == {} and saved != {}:
                return
            self.asked |= self.found.keys(leaf.path)
            if saved is _ABSENT or not is_bare(saved):
                self._differs(key, "a plain value")
            else:
                self.puts.append(partial(leaf.put, saved))
            return
        tensor = value.tensor if isinstance(value, RowsById) else value
        shape, stored = tuple(value.shape), self.found.tensors.get(key)
        if tensor.is_meta:
            raise ArgumentError(f"{key!r} is on the meta device. Call to_empty(device=...) first.")
        for box in boxes_of(key, tensor):
            refuse_unwritable(repr(key), box.tensor)
        self.asked.add(key)
        if stored is None or (stored.shape, stored.dtype) != (shape, tensor.dtype):
            self._differs(key, f"{shape}, {tensor.dtype}")
        else:
            self.targets[key] = value

    def _differs(self, key: str, here: str) -> None:
        stored = self.found.tensors.get(key)
        was = f"{stored.shape}, {stored.dtype}" if stored else "a plain value"
        problem = f"{key!r} is saved as {was} and is {here} here"
        is_there = key in self.found.paths
        self.problems.append(problem if is_there else f"{key!r} is missing in the checkpoint")
