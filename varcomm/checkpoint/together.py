"""The ranks that save or load together; one process without torch.distributed is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from varcomm.errors import ArgumentError, VarcommError
from varcomm.transport import agreement as between
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["Alone", "Ranks", "agree", "agree_and_share", "share", "together"]

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Alone:
    """One process that has nobody to agree with."""

    rank: int = 0
    size: int = 1


Ranks: TypeAlias = Group | Alone


def together(group: GroupLike) -> Ranks:
    """Return the ranks of a group, or this process alone where there are no others to speak of."""
    initialized = dist.is_available() and dist.is_initialized()
    return Alone() if group is None and not initialized else resolve(group)


def agree_and_share(
    what: str, local: Callable[[], T], tell: Callable[[T], S], ranks: Ranks
) -> tuple[T, list[S]]:
    """Run `local` on every rank and return its result, and what each tells of its own.

    As :func:`varcomm.transport.agreement.agree_and_share`, and the same without other ranks.

    Raises
    ------
    CommunicationError
        If no answer comes from others: they are gone, or take longer than the group's limit.
    """
    if isinstance(ranks, Group):
        return between.agree_and_share(what, local, tell, ranks)
    try:
        value = local()
        return value, [tell(value)]
    except VarcommError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        raise ArgumentError(f"{what}: {error}") from error


def agree(what: str, local: Callable[[], T], ranks: Ranks) -> T:
    """Run `local` on every rank and return this rank's result, or raise on all."""
    return agree_and_share(what, local, lambda _: None, ranks)[0]


def share(what: str, local: Callable[[], T], ranks: Ranks) -> list[T]:
    """Run `local` on every rank and return all results in rank order, or raise on all."""
    return agree_and_share(what, local, lambda value: value, ranks)[1]
