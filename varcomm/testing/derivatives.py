"""Adjoints, and first and second derivatives, of functions that communicate.

:func:`torch.autograd.gradcheck` ignores the outputs of other ranks, and makes different numbers of
calls on ranks with uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm.errors import ArgumentError
from varcomm.ops.all_reduce import all_reduce
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["dot_test", "gradcheck", "gradgradcheck"]

Tensors = tuple[torch.Tensor, ...]


def dot_test(
    fn: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    group: GroupLike = None,
    rtol: float | None = None,
) -> None:
    """Assert ``<A x, y> == <x, A* y>``, the inner products summed over ranks.

    `A` is the linear map `fn` on the inputs of all ranks, and `A*` is its backward.

    Parameters
    ----------
    fn : callable
        Linear and differentiable; called once on every rank.
    x : torch.Tensor
        This rank's input, of floats or complex numbers.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    rtol : float, optional
        Largest difference relative to ``<|A x|, |y|>``; by default 64 times the rounding error of
        the dtype.

    Raises
    ------
    AssertionError
        On every rank, if the difference is larger, or if a result does not require a gradient.

    See Also
    --------
    gradcheck, gradgradcheck

    Notes
    -----
    Communication: the calls of `fn` and its backward, and a few numbers per rank.

    In one process: the same call.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     shard = torch.randn(rank + 1, dtype=torch.float64)
    ...     varcomm.testing.dot_test(lambda x: varcomm.all_gather_v(x, [1, 2]), shard)
    >>> import varcomm.testing
    >>> varcomm.launch(fn, 2)
    [None, None]
    """
    rank = resolve(group).rank
    x = x.detach().clone().requires_grad_()
    result = fn(x)
    _check_recorded([result], group)
    y = _random_like(result, "dot test", rank)
    (back,) = torch.autograd.grad(result, x, y)
    size = (result.detach().to(torch.complex128) * y).abs().sum().item()
    products = [_inner_product((result,), (y,)), _inner_product((x,), (back,)), size]
    forward, backward, scale = _total(products, group)
    limit = (64 * torch.finfo(x.dtype).eps if rtol is None else rtol) * scale
    assert abs(forward - backward) <= limit, (
        f"not an adjoint pair: <A x, y> = {forward!r}, <x, A* y> = {backward!r}; "
        f"they differ by {abs(forward - backward):.3g}, allowed are {limit:.3g}."
    )


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
    _check_recorded(results, group)
    weights = tuple(_random_like(y, "weight", ranks.rank, i) for i, y in enumerate(results))
    gradients = _gradients(results, leaves, weights)

    def judge(name: str, numeric: float, exact: float) -> None:
        numeric, exact = _total([numeric, exact], group)
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
        tangents = tuple(_random_like(x, "tangent", ranks.rank, i) for i, x in enumerate(inputs))
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
    _check_recorded(results, group)
    weights = tuple(_random_like(y, "incoming gradient", rank, i) for i, y in enumerate(results))

    def backward(*args: torch.Tensor) -> Tensors:
        # All ranks differentiate, even if an input on this rank receives no gradient.
        leaves = tuple(x if x.requires_grad else x.requires_grad_() for x in args)
        xs, ws = leaves[: len(inputs)], leaves[len(inputs) :]
        gradients = _gradients(_as_tuple(fn(*xs)), xs, ws)
        # Zeros of an input that this rank does not use belong to the graph, as on other ranks.
        pairs = zip(gradients, xs, strict=True)
        return tuple(g if g.requires_grad else g + 0 * x for g, x in pairs)

    gradcheck(backward, *inputs, *weights, group=group, **options)


def _check_recorded(results: Sequence[torch.Tensor], group: GroupLike) -> None:
    """Assert on all ranks that results have a graph: all ranks must enter backward."""
    recorded = share(
        "results", lambda: [result.requires_grad for result in results], resolve(group)
    )
    bad = [rank for rank, flags in enumerate(recorded) if not any(flags)]
    assert not bad, f"on ranks {bad} no result requires a gradient: fn has left the graph there."
    assert all(flags == recorded[0] for flags in recorded), (
        f"ranks disagree on which results require a gradient: {recorded}."
    )


def _inner_product(a: Tensors, b: Tensors) -> float:
    """Return the real part of ``sum(conj(a) * b)`` in fp64."""
    products = 0.0
    for x, y in zip(a, b, strict=True):
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        products += float((x.detach().to(wide).conj() * y.detach().to(wide)).real.sum())
    return products


def _random_like(x: torch.Tensor, *purpose: object) -> torch.Tensor:
    """Draw a normal tensor that differs for each purpose.

    Equal vectors would hide defects: ``<w, J w>`` is the same for ``J`` and its transpose.
    """
    seed = crc32(repr(purpose).encode())
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.complex128 if x.is_complex() else torch.float64
    drawn = torch.randn(x.shape, dtype=wide, generator=generator, device="cpu")
    return drawn.to(x.device, x.dtype)


def _total(values: Sequence[float], group: GroupLike) -> list[float]:
    """Return sums over ranks, identical on all ranks."""
    part = torch.tensor(values, dtype=torch.float64, device=resolve(group).device())
    return all_reduce(part, group=group).tolist()


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
            drawn = (_random_like(x, "direction", k, ranks.rank, i) for i, x in enumerate(inputs))
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


def _tangent(y: torch.Tensor) -> torch.Tensor:
    """Return the forward-mode derivative; zeros if `y` has none."""
    primal, tangent = forward_ad.unpack_dual(y)
    return torch.zeros_like(primal) if tangent is None else tangent
