"""What ranks tell each other when they make a layer together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from varcomm.errors import DisagreementError
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["agree_on_layer", "module_seed"]


def agree_on_layer(
    what: str, arguments: Callable[[], dict[str, Any]], group: Group
) -> tuple[dict[str, Any], int]:
    """Return checked arguments, which are the same on all ranks, and one seed for all; collective.

    One round of messages. `arguments` checks them and returns them by name; what they print as is
    compared.

    Raises
    ------
    VarcommError
        On every rank, if `arguments` raised on one of them.
    DisagreementError
        On every rank, if they differ; it names the first that does.
    """

    def tell(checked: dict[str, Any]) -> tuple[dict[str, str], int]:
        return {name: repr(value) for name, value in checked.items()}, _drawn()

    checked, told = agree_and_share(what, arguments, tell, group)
    first, seed = told[0]
    for name in dict.fromkeys(name for given, _ in told for name in given):
        value = first.get(name)
        if others := [rank for rank, (given, _) in enumerate(told) if given.get(name) != value]:
            got = told[others[0]][0].get(name)
            raise DisagreementError(
                f"{what}: ranks disagree on {name}: rank 0 has {value}; rank {others[0]} has {got}."
            )
    return checked, seed


def module_seed(group: GroupLike = None) -> int:
    """Return a seed for new parameters, the same on all ranks; collective, one round of messages.

    Every rank draws from torch's default CPU generator, as it would to draw weights, and the draw
    of the group's first rank counts: ``torch.manual_seed`` there decides.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.agreement import module_seed
    >>> def fn(rank):
    ...     torch.manual_seed(rank)
    ...     return module_seed()
    >>> a, b = varcomm.launch(fn, 2)
    >>> a == b
    True
    """
    return share("module_seed", _drawn, resolve(group))[0]


def _drawn() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))
