"""The ranks that save or load together; one process needs no torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from varcomm.errors import ArgumentError, VarcommError
from varcomm.transport import agreement
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["Ranks", "alone"]

T = TypeVar("T")
S = TypeVar("S")


class Ranks:
    """A group of ranks, or this process alone if torch.distributed is not initialized."""

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @classmethod
    def of(cls, group: GroupLike) -> Ranks:
        """Resolve the `group` of a call."""
        initialized = dist.is_available() and dist.is_initialized()
        return cls(None if group is None and not initialized else resolve(group))

    def agree_and_share(
        self, what: str, local: Callable[[], T], tell: Callable[[T], S]
    ) -> tuple[T, list[S]]:
        """Return the result of `local` and ``tell(result)`` of every rank, or raise on all."""
        if self.group is not None:
            return agreement.agree_and_share(what, local, tell, self.group)
        try:
            value = local()
            return value, [tell(value)]
        except VarcommError as error:
            raise type(error)(f"{what}: {error}") from error
        except Exception as error:
            raise ArgumentError(f"{what}: {error}") from error

    def agree(self, what: str, local: Callable[[], T]) -> T:
        """Return the result of `local` on this rank, or raise on all."""
        return self.agree_and_share(what, local, lambda _: None)[0]

    def share(self, what: str, local: Callable[[], T]) -> list[T]:
        """Return the results of `local` on every rank, or raise on all."""
        return self.agree_and_share(what, local, lambda value: value)[1]


def alone(what: str, local: Callable[[], T]) -> T:
    """Run `local` without other ranks; errors name the call."""
    return Ranks(None).agree(what, local)
