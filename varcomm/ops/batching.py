"""Operators under ``vmap``: a batch is one more dimension of features, and the last one.

Operators are linear, and act alike on all dimensions but their own, so that a batch travels in the
messages of a single call. Ranks batch alike, if what they apply an operator to depends on the batch
there or not: tokens, which are batched as well, tell that it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.library import is_traced
from varcomm.transport.agreement import compare
from varcomm.transport.group import Group

__all__ = ["batch_last", "compare_batches", "of_batch", "of_each", "refuse_vmap", "wrappers"]


def batch_last(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Return `x` with its batch along the last dimension; repeated, where it has none."""
    if dim is None:
        return x.unsqueeze(-1).expand(*x.shape, size)
    return x.movedim(dim, -1)


def of_batch(token: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """Return one token for a batch of tokens, each of shape (0,)."""
    return token if token is None or dim is None else token.sum(dim)


def of_each(token: torch.Tensor, size: int) -> torch.Tensor:
    """Return the token of a batch for each of its entries, which are along the last dimension."""
    return token.unsqueeze(-1).expand(0, size)


def compare_batches(name: str, group: Group, size: int, *tensors: torch.Tensor) -> None:
    """Raise on every rank if batches are not of one size; collective.

    Always, and not only inside :func:`varcomm.debug`: it is jacrev, jacfwd and hessian that choose
    a size, by the shape of what this rank has. Not while `tensors` are traced.
    """
    if any(is_traced(_plain(x)) for x in tensors):
        return
    try:
        with torch._C._DisableFuncTorch():
            compare(group, {"operation": name, "the size of the batch of vmap": size})
    except DisagreementError as error:
        said, *table = str(error).splitlines(keepends=True)
        raise DisagreementError(
            f"{said.rstrip()} All ranks exchange one batch. jacfwd and hessian batch by the "
            "elements of this rank's input, jacrev by those of its output: make them as many on "
            "all ranks, or take torch.func.jvp or vjp of as many directions on all."
            + "".join(["\n"] * bool(table) + table)
        ) from None


def wrappers(x: torch.Tensor | None) -> list[int]:
    """Tell which transforms of ``torch.func`` reach `x`, the last one first.

    For vmap it is the size of the batch, for others -1.
    """
    found = []
    functorch = torch._C._functorch
    while x is not None and functorch.is_functorch_wrapped_tensor(x):
        inner = functorch.get_unwrapped(x)
        batched = functorch.is_batchedtensor(x)
        found.append(inner.shape[functorch.maybe_get_bdim(x)] if batched else -1)
        x = inner
    return found


def refuse_vmap(where: str, tensors: Sequence[object], instead: str) -> None:
    """Raise ArgumentError if vmap has made a batch of one of `tensors`."""
    if torch.compiler.is_compiling():  # which does not look into transforms
        return
    for x in tensors:
        if isinstance(x, torch.Tensor) and max(wrappers(x), default=-1) >= 0:
            raise ArgumentError(
                f"{where}vmap, and with it jacrev, jacfwd and hessian, has no rule for this. "
                f"{instead}"
            )


def _plain(x: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
