"""``load``: into the same state on any number of ranks; ``read``: all of it in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from varcomm.checkpoint.background import finish_earlier
from varcomm.checkpoint.exchange import Fetch
from varcomm.checkpoint.leaves import checked_state
from varcomm.checkpoint.manifest import Digest
from varcomm.checkpoint.nested import nested
from varcomm.checkpoint.reader import Checkpoint
from varcomm.checkpoint.targets import check_fit, targets_of
from varcomm.checkpoint.together import Alone, agree, agree_and_share, together
from varcomm.errors import DisagreementError
from varcomm.transport.group import GroupLike

__all__ = ["load", "read"]

_WHAT = "checkpoint.load"


def load(state: dict[str, Any], folder: str | os.PathLike[str], group: GroupLike = None) -> None:
    """Put what was saved into `state`, on as many ranks as there are now, sharded as it is now.

    Collective: all ranks of `group` call it. In one process it needs no torch.distributed. Nothing
    is changed before all files have been found whole, all of it to fit, and all tensors to be such
    as can be overwritten. Then, before any tensor is, generators, objects and modules with extra
    state take theirs, in the order of the state. Where one of them refuses, those before it have
    taken theirs, and nothing else has been changed but parts of tensors (Sharded, DTensor) that the
    ``state_dict`` of such objects has. What may refuse when all has been loaded is the
    ``load_state_dict`` of objects with ``state_dict_for``, and hooks of modules.

    Parameters
    ----------
    state : dict
        As of :func:`save`, or a part of it: names at the first level that are left out are not
        loaded, also on some ranks alone. Below, all must fit, key by key, on all ranks together;
        None in the place of a dict of plain values takes whatever keys were saved.

        Tensors are overwritten in place, be they whole now and were sharded or the other way round;
        plain values are replaced in their dicts and lists, and a list of plain values by whatever
        list was saved. Objects get what they have told. What a module tells beyond its own
        parameters and buffers, as extra state or by hooks, its ``load_state_dict`` gets in new
        tensors: twice where it has parameters, before these are loaded and after. Optimizers need
        not have made a step, but have groups with the same parameters and options. An object with a
        method ``state_dict_for(saved)`` may say what it wants to be loaded into: it gets nested
        dicts and lists of what was saved, with tensors of the shape of the whole on the meta
        device, and returns such of tensors to be overwritten, which are then given to its
        ``load_state_dict``. Of several ranks each may leave out what it has no part of.
    folder : str or path
        Where :func:`save` has written, or torch.distributed.checkpoint.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that load together; None is the whole world.

    Raises
    ------
    ArgumentError
        On every rank, if there is no checkpoint; if a file is missing, cut or altered, or would
        have to run code; if the state is another one: with the keys that are missing or
        unexpected, and those of other shapes and dtypes; if a tensor cannot be overwritten (on the
        meta device, expanded, of inference mode); or if states of an optimizer that are neither
        like their parameters nor numbers are to be shared out. Then nothing has been loaded. Also
        if an object refuses what was saved of it.
    DisagreementError
        On every rank, if ranks find different checkpoints.
    CommunicationError
        If other ranks are gone, or take longer than the limit of the group.
    VarcommError
        What went wrong in an asynchronous save before, if nobody has waited for it.

    Notes
    -----
    No pickle is run: of ``.metadata`` only what it is made of is taken, and the rest is read with
    ``weights_only``. Each rank checks the SHA-256 of every P-th file; when all have found theirs
    whole, each reads what it needs.
    A checkpoint that torch alone has written has no digests; there only sizes are checked.

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
    ranks = together(group)

    def find() -> Checkpoint:
        finish_earlier()
        checked_state(state)
        opened = Checkpoint.open(Path(folder))
        opened.verify(ranks.rank, ranks.size)
        return opened

    def read_early() -> None:
        found.read(targets.early)
        for put in targets.early_puts:
            put()

    def put_rest() -> None:
        for put in targets.puts:
            put()

    found, digests = agree_and_share(_WHAT, find, lambda one: Digest.of(one.content), ranks)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DisagreementError(
            f"{_WHAT}: ranks {others} find another checkpoint in {folder} than rank 0."
        )
    targets, fits = agree_and_share(
        _WHAT, lambda: targets_of(state, found, ranks.rank), lambda one: one.fit, ranks
    )
    agree(_WHAT, lambda: check_fit(found, fits), Alone())  # to which all ranks come alike
    fetches = {key: Fetch(rows, ranks) for key, rows in targets.rows.items()}
    agree(_WHAT, read_early, ranks)
    blocks = {key: fetch.target for key, fetch in fetches.items()}
    agree(_WHAT, lambda: found.read({**targets.tensors, **blocks}), ranks)
    for fetch in fetches.values():
        fetch.finish()
    agree(_WHAT, put_rest, ranks)


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return all that is in a checkpoint, whole, on the CPU; no communication.

    Parameters
    ----------
    folder : str or path
        Where :func:`save` has written, or torch.distributed.checkpoint.

    Returns
    -------
    dict
        The state that was saved, nested as it was: modules and other objects as dicts of what they
        told, sharded tensors and rows as the whole, keys of dicts as they were, and of
        :class:`PerRank` a dict by the number of the rank, as a text.

    Raises
    ------
    ArgumentError
        If there is no checkpoint, or a file is missing, cut or altered, or would have to run code.
    VarcommError
        What went wrong in an asynchronous save before, if nobody has waited for it.

    Notes
    -----
    Communication: none.

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

    def whole() -> dict[str, Any]:
        finish_earlier()
        found = Checkpoint.open(Path(folder))
        found.verify()
        tensors = {key: found.like(key, "cpu") for key in found.tensors}
        found.read(tensors)
        values = found.values(key for key in found.paths if key not in tensors)
        flat = {**tensors, **values}
        return nested({path: flat[key] for key, path in found.paths.items()})

    return agree("checkpoint.read", whole, Alone())
