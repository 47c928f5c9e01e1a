"""What ranks tell each other when they make a layer together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch

from varcomm.errors import DisagreementError
from varcomm.ops import wire
from varcomm.transport.agree import share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["agreed_seed", "digest", "module_seed"]


def agreed_seed(what: str, arguments: Callable[[], Mapping[str, Any]], group: Group) -> int:
    """Check arguments on all ranks, and that they are the same; return one seed for all.

    One round of messages. `arguments` checks them, and returns plain values by name, all of which
    are compared.

    Raises
    ------
    VarcommError
        On every rank, if `arguments` raised on one of them.
    DisagreementError
        On every rank, if they differ; it names the arguments and the ranks.
    """

    def local() -> tuple[dict[str, str], int]:
        return {name: repr(value) for name, value in arguments().items()}, _drawn()

    told = share(what, local, group)
    first, seed = told[0]
    for name in dict.fromkeys(name for given, _ in told for name in given):
        value = first.get(name)
        if others := [rank for rank, (given, _) in enumerate(told) if given.get(name) != value]:
            got = told[others[0]][0].get(name)
            raise DisagreementError(
                f"{what}: ranks disagree on {name}: rank 0 has {value}; rank {others[0]} has {got}."
            )
    return seed


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


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    """Return a few bytes that tell tensors apart, of any device and strides.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2))[:2]
    (True, ('torch.float32', (2,)))
    """
    content = wire.as_bytes(wire.flat(tensor.detach().cpu())).numpy()
    return str(tensor.dtype), tuple(tensor.shape), crc32(content.data)
