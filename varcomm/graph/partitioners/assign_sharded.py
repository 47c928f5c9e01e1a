"""``assign_sharded``: the owner of each node, computed from positions spread over ranks."""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.partitioners.coordinates import (
    AllRows,
    by_bisection,
    by_hilbert,
    check_node_weight,
    checked_positions,
    checked_weight,
)
from varcomm.sizes import at_least
from varcomm.transport.agreement import agree, compare, share
from varcomm.transport.engine import engine_for
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["assign_sharded"]

_METHODS = {"rcb": by_bisection, "hilbert": by_hilbert}


def assign_sharded(
    pos: torch.Tensor,
    parts: int,
    method: str = "hilbert",
    group: GroupLike = None,
    *,
    node_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decide which of `parts` ranks owns each node, if no rank has all positions.

    Collective; an error on one rank is raised on all ranks. The result equals that of
    :func:`assign` for the positions of all ranks in rank order.

    Parameters
    ----------
    pos : torch.Tensor
        This rank's positions, finite, of shape (n, D) or (n,); n may be zero. D and the dtype are
        identical on all ranks.
    parts : int
        Number of parts, independent of the number of ranks in `group`.
    method : {"hilbert", "rcb"}
        As in :func:`assign`.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.
    node_weight : torch.Tensor, optional
        Cost of each node: non-negative integers of shape (n,); on all ranks or on none.

    Returns
    -------
    torch.Tensor
        The part of each of this rank's nodes, int64 of shape (n,), on the device of `pos`.

    Raises
    ------
    ArgumentError
        On every rank, if positions, weights, `parts` or `method` are invalid on one rank.
    DisagreementError
        On every rank, if coordinates, dtypes, devices, `parts` or methods differ across ranks, or
        only some ranks have weights.
    GroupError
        If this rank is not in `group`; on every rank, if `group` does not serve the device.

    Notes
    -----
    Positions stay on their rank. The ranks count positions, or weights, in ranges of the curve or
    of a coordinate, and narrow the ranges that hold a cut by 8 bits per round.

    Communication: at most 8 rounds for ``"hilbert"``; for ``"rcb"`` at most 8 for each of the
    ``log2(parts)`` levels of boxes. A round is an :func:`all_reduce` of at most 2 KiB per cut, for
    any number of positions.

    In one process: :func:`assign`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.graph.partitioners.assign_sharded import assign_sharded
    >>> def fn(rank):
    ...     pos = torch.tensor([0.0, 3.0, 1.0]) if rank == 0 else torch.tensor([2.0])
    ...     return assign_sharded(pos, 2, "rcb")
    >>> varcomm.launch(fn, 2)
    [tensor([0, 1, 0]), tensor([1])]
    """
    ranks, what = resolve(group), "graph.assign_sharded"
    rows, weight = agree(what, lambda: _checked(pos, parts, method, node_weight, ranks), ranks)
    compare(
        ranks,
        {
            "operation": what,
            "parts": int(parts),
            "method": method,
            "coordinates": rows.shape[1],
            "dtype": str(rows.dtype),
            "device": rows.device.type,
            "node_weight": "none" if weight is None else "given",
        },
    )
    if weight is not None:
        total = float(weight.double().sum())
        totals, counts = zip(*share(what, lambda: (total, len(rows)), ranks), strict=True)
        if any(counts):
            check_node_weight(sum(totals), parts, f"{what}: node_weight")
    return _METHODS[method](rows, int(parts), AllRows(ranks), weight)


def _checked(
    pos: torch.Tensor, parts: int, method: str, node_weight: torch.Tensor | None, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return positions of shape (n, D) and weights in int64, if this rank's arguments will do."""
    if method not in _METHODS:
        raise ArgumentError(f"method must be one of {', '.join(_METHODS)}; got {method!r}.")
    at_least(1, parts, "parts")
    if isinstance(pos, torch.Tensor):
        engine_for(group, pos.device)
    rows = checked_positions(pos, "pos", method)
    if node_weight is None:
        return rows, None
    if isinstance(node_weight, torch.Tensor) and node_weight.device != rows.device:
        raise ArgumentError(f"node_weight is on {node_weight.device}, pos is on {rows.device}.")
    return rows, checked_weight(node_weight, "node_weight", len(rows), "rows")
