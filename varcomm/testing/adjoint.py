"""Dot test: backward applies the adjoint of forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import torch

from varcomm.ops.all_reduce import all_reduce
from varcomm.transport.agreement import share
from varcomm.transport.group import GroupLike, resolve

__all__ = ["check_recorded", "dot_test", "inner_product", "random_like", "total"]


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
    check_recorded([result], group)
    y = random_like(result, "dot test", rank)
    (back,) = torch.autograd.grad(result, x, y)
    size = (result.detach().to(torch.complex128) * y).abs().sum().item()
    products = [inner_product(result, y), inner_product(x, back), size]
    forward, backward, scale = total(products, group)
    limit = (64 * torch.finfo(x.dtype).eps if rtol is None else rtol) * scale
    assert abs(forward - backward) <= limit, (
        f"not an adjoint pair: <A x, y> = {forward!r}, <x, A* y> = {backward!r}; "
        f"they differ by {abs(forward - backward):.3g}, allowed are {limit:.3g}."
    )


def check_recorded(results: Sequence[torch.Tensor], group: GroupLike) -> None:
    """Assert on all ranks that results have a graph: all ranks must enter backward."""
    recorded = share(
        "results", lambda: [result.requires_grad for result in results], resolve(group)
    )
    bad = [rank for rank, flags in enumerate(recorded) if not any(flags)]
    assert not bad, f"on ranks {bad} no result requires a gradient: fn has left the graph there."
    assert all(flags == recorded[0] for flags in recorded), (
        f"ranks disagree on which results require a gradient: {recorded}."
    )


def inner_product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the real part of ``sum(conj(a) * b)`` in fp64."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    product = a.detach().to(wide).conj() * b.detach().to(wide)
    return float(product.real.sum())


def random_like(x: torch.Tensor, *purpose: object) -> torch.Tensor:
    """Draw a normal tensor that differs for each purpose.

    Equal vectors would hide defects: ``<w, J w>`` is the same for ``J`` and its transpose.
    """
    seed = crc32(repr(purpose).encode())
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.complex128 if x.is_complex() else torch.float64
    drawn = torch.randn(x.shape, dtype=wide, generator=generator, device="cpu")
    return drawn.to(x.device, x.dtype)


def total(values: Sequence[float], group: GroupLike) -> list[float]:
    """Return sums over ranks, identical on all ranks."""
    part = torch.tensor(values, dtype=torch.float64, device=resolve(group).device())
    return all_reduce(part, group=group).tolist()
