"""The store by which ranks find each other: one that only the ranks of this start know.

torchrun's agent serves the store in which ranks find each other. After a failure it starts the
ranks again with the same store, which still holds the addresses of those that are gone, under the
keys that the new ones would read. [1]_ Nothing that torchrun tells a rank names the start: agents
count restarts each for itself, and do not count those after a change of membership.

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

__all__ = ["fresh_store", "meeting_store"]

_PAUSE = 0.02  # seconds between two looks at who has come


def meeting_store(place: Place, limit: timedelta) -> Store:
    """Meet the other ranks at their meeting point; collective.

    Parameters
    ----------
    place : Place
        Of this rank.
    limit : timedelta
        How long to wait for the others. It becomes the limit of the store.

    Returns
    -------
    Store
        Common to the ranks of this start, and to them alone.

    Raises
    ------
    RuntimeError
        If the others do not come in time.
    """
    if place.size == 1:
        return HashStore()
    if place.lasting_store:
        return fresh_store(place, limit)
    met = rendezvous(str(place.meeting_point), place.rank, place.size, timeout=limit)
    store: Store = next(met)[0]
    store.set_timeout(limit)
    return store


def fresh_store(place: Place, limit: timedelta) -> Store:
    """Meet the ranks of this start in the store at their meeting point; collective.

    Each rank leaves a name that nobody has used before, and waits for an answer to that name. Rank
    0 answers every name that it sees, those of ranks that are gone as well, until as many have come
    to the place in its answer as there are ranks.

    Parameters
    ----------
    place : Place
        Of this rank; it has a meeting point.
    limit : timedelta
        How long to wait for the others. It becomes the limit of the store.

    Returns
    -------
    Store
        A part of the store in which nobody has written anything but the ranks of this start.

    Raises
    ------
    RuntimeError
        If the others do not come in time: of torch, or on rank 0 one that says how many have.
    """
    met = rendezvous(str(place.meeting_point), place.rank, place.size, timeout=limit)
    store: Store = next(met)[0]
    store.set_timeout(limit)
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
    """Call the other ranks to `here`, until all have come."""
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
