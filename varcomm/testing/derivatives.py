"""First and second derivatives of functions that communicate, against finite differences.

:func:`torch.autograd.gradcheck` ignores the outputs of other ranks, and makes different numbers of
calls on ranks with uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError
from varcomm.testing.adjoint import check_recorded, inner_product, random_like, total
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve

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
        A function from the inputs to a tensor or a tuple of tensors. Every rank calls fn twice per
        coordinate of all ranks.
    *inputs : torch.Tensor
        This rank's inputs, in fp64 or complex128; the same number on every rank, of any shapes.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
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

    See Also
    --------
    gradgradcheck, dot_test

    Notes
    -----
    Communication: the calls of `fn` and its backward, and a few numbers per rank.

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

    def judge(name: str, numeric: float, exact: float) -> None:
        numeric, exact = total([numeric, exact], group)
        error = abs(exact - numeric) / max(1.0, abs(numeric))
        assert error <= tol, (
            f"{name} differs from finite differences by {error:.3g}, allowed are {tol:.3g}."
        )

    def along(direction: Tensors, step: float) -> float:
        moved = (x.detach() + step * d for x, d in zip(leaves, direction, strict=True))
        return _inner_product(weights, _as_tuple(fn(*moved)))

    for rank, direction in _directions(leaves, ranks, fast_mode):
        numeric = (along(direction, eps) - along(direction, -eps)) / (2 * eps)
        # a NaN gradient on this rank is not an error of the rank whose coordinate moves
        exact = _inner_product(direction, gradients) if rank in (None, ranks.rank) else 0.0
        place = "" if rank is None else f" on rank {rank}"
        judge(f"backward: a derivative{place}", numeric, exact)

    if forward_mode:
        tangents = tuple(random_like(x, "tangent", ranks.rank, i) for i, x in enumerate(inputs))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
            moving = tuple(_tangent(y) for y in _as_tuple(fn(*duals)))
        numeric, exact = _inner_product(tangents, gradients), _inner_product(weights, moving)
        judge("forward mode: a derivative", numeric, exact)


def gradgradcheck(
    fn: Callable[..., torch.Tensor | Tensors],
    *inputs: torch.Tensor,
    group: GroupLike = None,
    **options: Any,
) -> None:
    """Assert that second derivatives of `fn` across ranks equal finite differences.

    The function applies :func:`gradcheck` to the backward of `fn`, as a function of inputs and
    incoming gradients.

    Parameters
    ----------
    fn, *inputs, group
        As in :func:`gradcheck`.
    **options
        `eps`, `tol`, `forward_mode`, which is then forward over backward, and `fast_mode`.

    Raises
    ------
    AssertionError
        As :func:`gradcheck`.

    See Also
    --------
    gradcheck, dot_test

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

    gradcheck(backward, *inputs, *weights, group=group, **options)


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


def _directions(
    inputs: Tensors, ranks: Group, fast_mode: bool
) -> Iterator[tuple[int | None, Tensors]]:
    """Yield directions in which inputs move, beside the rank of the one coordinate that moves."""
    if fast_mode:
        for k in range(3):
            drawn = (random_like(x, "direction", k, ranks.rank, i) for i, x in enumerate(inputs))
            yield None, tuple(drawn)
        return
    lengths = [x.numel() * (2 if x.is_complex() else 1) for x in inputs]
    for rank, count in enumerate(share("gradcheck", lambda: sum(lengths), ranks)):
        for k in range(count):
            flat = torch.zeros(sum(lengths), dtype=torch.float64, device=inputs[0].device)
            flat[k : k + 1] = rank == ranks.rank  # this rank may have fewer coordinates
            # cloned: memory of complex numbers starts at an even place
            parts = [
                torch.view_as_complex(part.view(-1, 2).clone()) if x.is_complex() else part
                for part, x in zip(flat.split(lengths), inputs, strict=True)
            ]
            yield rank, tuple(p.view(x.shape) for p, x in zip(parts, inputs, strict=True))


def _inner_product(a: Tensors, b: Tensors) -> float:
    return sum(inner_product(x, y) for x, y in zip(a, b, strict=True))


def _tangent(y: torch.Tensor) -> torch.Tensor:
    """Return the forward-mode derivative; zeros if `y` has none."""
    primal, tangent = forward_ad.unpack_dual(y)
    return torch.zeros_like(primal) if tangent is None else tangent
