"""Backwards whose gradients are summed later, together with those of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from varcomm.data_parallel.replica import replicas_in
from varcomm.errors import ArgumentError

__all__ = ["no_sync"]


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Sum no gradients in the backwards within; the next one outside sums all there are.

    So several micro-batches cost one sum. All ranks enter and leave it at the same places, which
    is what :func:`varcomm.debug` compares. It is where ``backward()`` runs that counts.

    Parameters
    ----------
    model : torch.nn.Module
        That was replicated or marked as shared, or has modules within that were: all of them.

    Raises
    ------
    ArgumentError
        If no module in `model` was replicated. In backward, if some of the groups of a parameter
        are in it and some are not. In the next backward that sums, if a gradient has been changed
        meanwhile by anything but ``zero_grad()``.

    Notes
    -----
    The gradient that the sum adds to ``grad`` is that of all backwards since the last sum: sums,
    means and divisors of a :class:`GlobalCount` too are of them together. A parameter that was
    used in any of them has been used.

    Meanwhile ``grad`` is not what one process would have. A parameter that had none has this rank's
    part in it; that of one that had a sum is kept beside it, with a copy of that, and ``grad`` is
    still the old sum. ``zero_grad()`` drops all of it, and what a :class:`GlobalCount` has counted
    for it: where that divides, a rank to which a backward brings nothing has zeros in the smallest
    ``grad`` until the next sum. What else changes a gradient in between (clipping, scaling, a step
    of the optimizer that writes to it) makes it unknown what has been summed, and is an error where
    the part is kept beside.

    It is up to the caller that a summing backward comes before the optimizer's step: without one,
    each rank would take a step of its own. There is no hook by which it could be seen;
    :func:`replicate`, called anew, and :func:`sum_gradients` do see it, and raise.

    Communication: none within.

    In one process: nothing: gradients accumulate in ``grad``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import no_sync, replicate
    >>> def fn(rank):
    ...     model = replicate(torch.nn.Linear(1, 1, bias=False))
    ...     with no_sync(model):
    ...         model(torch.full((1, 1), 10.0 * rank)).sum().backward()
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     return model.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [12.0, 12.0]
    """
    replicas = replicas_in(model) if isinstance(model, torch.nn.Module) else []
    if not replicas:
        raise ArgumentError(
            f"no_sync: model must be a module that was replicated, or holds one; got "
            f"{type(model).__name__}, in which nothing was. Pass what replicate was given."
        )
    for replica in replicas:
        replica.paused += 1
    try:
        yield
    finally:
        for replica in replicas:
            replica.paused -= 1
