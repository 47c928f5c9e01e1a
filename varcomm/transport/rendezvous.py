"""Rendezvous: the store in which the ranks of one start find each other.

torchrun's agent serves one store for all its starts. After a failure the store still holds the
addresses of the ended ranks, under the keys that the new ranks read. [1]_ No variable of torchrun
identifies the start: agents count restarts each on their own.

.. [1] https://github.com/pytorch/pytorch/issues/135712
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from varcomm.transport.environment import Place

__all__ = ["meeting_store"]

_PAUSE = 0.02  # seconds


def meeting_store(place: Place, limit: timedelta) -> Store:
    """Return a store common to the ranks of this start, and to them alone; collective.

    Raises RuntimeError if the others do not come within `limit`, which becomes the store's timeout.
    """
    if place.size == 1:
        return HashStore()
    met = rendezvous(str(place.meeting_point), place.rank, place.size, timeout=limit)
    store: Store = next(met)[0]
    store.set_timeout(limit)
    return _part_of_this_start(store, place, limit) if place.lasting_store else store


def _part_of_this_start(store: Store, place: Place, limit: timedelta) -> Store:
    """Return a part of the store in which only the ranks of this start have written; collective.

    Each rank writes a new name, and waits for an answer to that name. Rank 0 answers every name,
    those of ended ranks as well, until all ranks have come to the place in its answer.
    """
    name = uuid.uuid4().hex
    if place.rank == 0:
        here = f"varcomm/start/{name}"
        _gather(store, here, place.size, limit)
    else:
        store.set(f"varcomm/rank/{place.rank}", name)
        here = store.get(f"varcomm/answer/{name}").decode()
        store.delete_key(f"varcomm/answer/{name}")
        store.add(f"{here}/come", 1)
    return PrefixStore(here, store)


def _gather(store: Store, here: str, size: int, limit: timedelta) -> None:
    """Answer the other ranks with `here`, until all have come there."""
    deadline = time.monotonic() + limit.total_seconds()
    keys = [f"varcomm/rank/{rank}" for rank in range(1, size)]
    answered: set[bytes] = set()
    while (come := store.add(f"{here}/come", 0)) < size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"after {limit.total_seconds():g} s, {come + 1} of {size} ranks have come."
            )
        if store.check(keys):
            for name in set(store.multi_get(keys)) - answered:
                store.set(f"varcomm/answer/{name.decode()}", here)
                answered.add(name)
        time.sleep(_PAUSE)
