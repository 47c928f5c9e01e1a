"""Errors of calls that could not be completed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from varcomm.errors import CommunicationError, VarcommError
from varcomm.transport.engine import EngineFailure
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Group
from varcomm.transport.notes import Note, brief, leave_note, notes

_SERVED = 0.5  # seconds for which rank 0 then still serves the store


def failure(
    what: str, group: Group, began: float, error: Exception, details: str = ""
) -> CommunicationError:
    """Return the error for a call that began at a time of ``time.monotonic()``; takes seconds.

    This rank leaves the group, so that every waiting rank fails at once. The message names the
    ranks that failed in the same call; the others did not come to it, or are gone.
    """
    after, call = time.monotonic() - began, {"failed": what, "in group": group.name}
    leave_note(call)
    leave(group)
    failed = {group.rank}

    def all_failed(found: list[Note]) -> bool:
        # kept: a rank that has caught its error overwrites its note in its next call
        failed.update(r for r, note in enumerate(found) if call.items() <= note.items())
        return len(failed) == group.size

    found, answered = notes(group, all_failed)
    if dist.is_initialized() and dist.get_rank() == 0:
        time.sleep(_SERVED)  # it serves the store, which other ranks still ask
    lost = [rank for rank in range(group.size) if rank not in failed]
    ends = {
        rank: f"{word} {found[rank][word]}"
        for rank in lost
        for word in ("left with", "ended with")  # the last one counts
        if word in found[rank]
    }
    others = [f"rank {rank} {end}" for rank, end in ends.items()]
    if silent := [rank for rank in lost if rank not in ends]:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {spans(silent)}"
        others.append(f"{ranks} not come to it, gone, or cut off")
    if not answered:
        others = ["of others nothing is known: the store in which ranks met has ended"]
    rest = "; ".join(others) or "so all have come to it, and the network or the timeout has failed"
    return CommunicationError(
        f"{what} on {group}: failed after {after:.1f} s: {brief(error)}. {details}"
        f"{members(group)} It has failed on {len(failed)} of {group.size}: "
        f"{spans(sorted(failed))}; {rest}."
    )


def leave(group: Group) -> None:
    """Close the group on this rank, if its engine can: no rank waits here or takes stale data."""
    with suppress(VarcommError, RuntimeError):  # the group may be destroyed
        engine_for(group, group.device()).leave(group)


@contextmanager
def explained(what: str, group: Group) -> Iterator[None]:
    """Turn an EngineFailure of communication outside operators into a CommunicationError."""
    began = time.monotonic()
    try:
        yield
    except EngineFailure as error:
        raise failure(what, group, began, error) from error.__cause__


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with one row per rank; ranks with equal rows share a line.

    >>> print(table([{"dim": 0, "at": "a.py:1"}, {"dim": 1, "at": "a.py:1"}, {"at": "a.py:2"}]))
      rank  dim  at
      0     0    a.py:1
      1     1    a.py:1
      2          a.py:2
    """
    cells = [{word: str(value) for word, value in row.items()} for row in rows]
    words = list(dict.fromkeys(word for row in cells for word in row))
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, row in enumerate(cells):
        ranks_of.setdefault(tuple(row.get(word, "") for word in words), []).append(rank)
    lines = [("rank", *words), *((spans(ranks), *row) for row, ranks in ranks_of.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(f"  {text}".rstrip() for text in texts)


def members(group: Group) -> str:
    """Return a sentence that names the world ranks of a group, and their group ranks if other."""
    own = range(group.size)
    other = f" of the world, which are {spans(own)} in it" if group.ranks != tuple(own) else ""
    return f"The group is of ranks {spans(group.ranks)}{other}."


def spans(ranks: Iterable[int]) -> str:
    """Return ascending ranks in short form.

    >>> spans([0, 2, 3, 4, 7, 8])
    '0, 2-4, 7, 8'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
