"""First and second derivatives of functions that communicate, against finite differences.

:func:`torch.autograd.gradcheck` does not apply: it calls the function once per coordinate of one
rank's inputs, so that ranks with uneven shards would make different numbers of calls, and it
ignores the outputs of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError
from varcomm.testing.adjoint import check_recorded, inner_product, random_like, total
from varcomm.transport.agreement import share
from varcomm.transport.group import GroupLike, resolve

__all__ = ["gradcheck", "gradgradcheck"]

Tensors = tuple[torch.Tensor, ...]


def gradcheck(
    fn: Callable[..., torch.Tensor | Tensors],
    *inputs: torch.Tensor,
    group: GroupLike = None,
    eps: float = 1e-6,
    tol: float = 1e-6,
    forward_mode: bool = True,
    fast_mode: bool = False,
) -> None:
    """Assert that derivatives of `fn` across ranks equal finite differences.

    Every coordinate of every rank's inputs moves in turn while all ranks call `fn`.

    Parameters
    ----------
    fn : callable
        From the inputs to a tensor or a tuple of tensors. Every rank calls it twice per coordinate
        of all ranks.
    *inputs : torch.Tensor
        This rank's inputs, in fp64 or complex128; the same number on every rank, of any shapes.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    eps : float
        Step of a coordinate.
    tol : float
        Largest error, relative to the larger of 1 and the finite difference.
    forward_mode : bool
        Also check forward-mode differentiation.
    fast_mode : bool
        Move all coordinates together, in three random directions.

    Raises
    ------
    AssertionError
        On every rank, if a derivative on any rank is wrong.
    ArgumentError
        If an input has another dtype.

    Notes
    -----
    Communication: that of each call of `fn` and of its backward, and a few numbers per rank.

    In one process: :func:`torch.autograd.gradcheck`.

    Examples
    --------
    >>> import torch, varcomm, varcomm.testing
    >>> def fn(rank):
    ...     shard = torch.randn(rank + 1, dtype=torch.float64)
    ...     varcomm.testing.gradcheck(lambda x: varcomm.all_gather_v(x, [1, 2]) ** 2, shard)
    >>> varcomm.launch(fn, 2)
    [None, None]
    """
    ranks = resolve(group)
    if narrow := {x.dtype for x in inputs} - {torch.float64, torch.complex128}:
        raise ArgumentError(
            f"inputs must be torch.float64 or torch.complex128; got {narrow}. Convert them."
        )
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    results = _as_tuple(fn(*leaves))
    check_recorded(results, group)
    weights = tuple(random_like(y, "weight", ranks.rank, i) for i, y in enumerate(results))
    gradients = _gradients(results, leaves, weights)

    def slope(direction: Tensors) -> float:
        up = _inner_product(weights, _as_tuple(fn(*_moved(leaves, direction, eps))))
        down = _inner_product(weights, _as_tuple(fn(*_moved(leaves, direction, -eps))))
        return (up - down) / (2 * eps)

    if fast_mode:
        for k in range(3):
            drawn = (random_like(x, "direction", k, ranks.rank, i) for i, x in enumerate(leaves))
            direction = tuple(drawn)
            numeric = total(slope(direction), group)
            exact = total(_inner_product(direction, gradients), group)
            _judge("backward", [_error(exact, numeric)], tol, group)
    else:
        counts = share("gradcheck", lambda: sum(_coordinates(x) for x in leaves), ranks)
        errors = []  # of the gradients of this rank
        for rank, count in enumerate(counts):
            for k in range(count):
                unit = _unit(leaves, k if rank == ranks.rank else None)
                numeric = total(slope(unit), group)
                if rank == ranks.rank:
                    errors.append(_error(_inner_product(unit, gradients), numeric))
        _judge("backward", errors, tol, group)

    if forward_mode:
        tangents = tuple(random_like(x, "tangent", ranks.rank, i) for i, x in enumerate(inputs))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
            moving = tuple(_tangent(y) for y in _as_tuple(fn(*duals)))
        forward = total(_inner_product(weights, moving), group)
        backward = total(_inner_product(tangents, gradients), group)
        _judge("forward mode", [_error(forward, backward)], tol, group)


def gradgradcheck(
    fn: Callable[..., torch.Tensor | Tensors],
    *inputs: torch.Tensor,
    group: GroupLike = None,
    eps: float = 1e-6,
    tol: float = 1e-6,
    forward_mode: bool = True,
    fast_mode: bool = False,
) -> None:
    """Assert that second derivatives of `fn` across ranks equal finite differences.

    This is :func:`gradcheck` of the backward of `fn`, from inputs and incoming gradients.

    Parameters
    ----------
    fn, *inputs, group, eps, tol, forward_mode, fast_mode
        As in :func:`gradcheck`; forward mode is then forward over backward.

    Raises
    ------
    AssertionError, ArgumentError
        As :func:`gradcheck`.

    Notes
    -----
    Communication: as :func:`gradcheck`.

    In one process: :func:`torch.autograd.gradgradcheck`.

    Examples
    --------
    >>> import torch, varcomm, varcomm.testing
    >>> def fn(rank):
    ...     shard = torch.randn(rank + 1, dtype=torch.float64)
    ...     varcomm.testing.gradgradcheck(lambda x: varcomm.all_gather_v(x, [1, 2]) ** 2, shard)
    >>> varcomm.launch(fn, 2)
    [None, None]
    """
    rank = resolve(group).rank
    results = _as_tuple(fn(*(x.detach().clone().requires_grad_() for x in inputs)))
    check_recorded(results, group)
    weights = tuple(random_like(y, "incoming gradient", rank, i) for i, y in enumerate(results))

    def backward(*args: torch.Tensor) -> Tensors:
        # All ranks differentiate, even if an input on this rank receives no gradient.
        leaves = tuple(x if x.requires_grad else x.requires_grad_() for x in args)
        xs, ws = leaves[: len(inputs)], leaves[len(inputs) :]
        gradients = _gradients(_as_tuple(fn(*xs)), xs, ws)
        # Zeros of an input that this rank does not use belong to the graph, as on other ranks.
        pairs = zip(gradients, xs, strict=True)
        return tuple(g if g.requires_grad else g + 0 * x for g, x in pairs)

    gradcheck(
        backward,
        *inputs,
        *weights,
        group=group,
        eps=eps,
        tol=tol,
        forward_mode=forward_mode,
        fast_mode=fast_mode,
    )


def _gradients(results: Tensors, inputs: Tensors, weights: Tensors) -> Tensors:
    """Return differentiable gradients; zeros if a result does not depend on an input."""
    recorded = [(y, w) for y, w in zip(results, weights, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in recorded],
        inputs,
        [w for _, w in recorded],
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


def _as_tuple(value: torch.Tensor | Tensors) -> Tensors:
    return (value,) if isinstance(value, torch.Tensor) else value


def _coordinates(x: torch.Tensor) -> int:
    return x.numel() * (2 if x.is_complex() else 1)


def _unit(inputs: Tensors, k: int | None) -> Tensors:
    """Return zeros like the inputs, with a one at coordinate `k`, counted through all of them."""
    units = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
    for unit in units:
        if k is None:
            break
        coordinates = (torch.view_as_real(unit) if unit.is_complex() else unit).view(-1)
        if k < len(coordinates):
            coordinates[k] = 1
            break
        k -= len(coordinates)
    return units


def _moved(inputs: Tensors, direction: Tensors, step: float) -> Tensors:
    return tuple(x.detach() + step * d for x, d in zip(inputs, direction, strict=True))


def _inner_product(a: Tensors, b: Tensors) -> float:
    return sum(inner_product(x, y) for x, y in zip(a, b, strict=True))


def _tangent(y: torch.Tensor) -> torch.Tensor:
    """Return the forward-mode derivative; zeros if `y` has none."""
    primal, tangent = forward_ad.unpack_dual(y)
    return torch.zeros_like(primal) if tangent is None else tangent


def _error(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


def _judge(what: str, own: list[float], tol: float, group: GroupLike) -> None:
    # NaN is the worst error, but every comparison with it is false.
    errors = share(what, lambda: max(own, key=lambda e: (isnan(e), e), default=0.0), resolve(group))
    worst = max(range(len(errors)), key=lambda rank: (isnan(errors[rank]), errors[rank]))
    assert errors[worst] <= tol, (
        f"{what}: a derivative on rank {worst} differs from finite differences by "
        f"{errors[worst]:.3g}, allowed are {tol:.3g}."
    )
