"""Which rank owns which node, decided by ranks that each hold some of the positions."""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.partitioners.assign_checks import (
    check_node_weight,
    checked_positions,
    checked_weight,
)
from varcomm.graph.partitioners.coordinates import by_bisection, by_hilbert
from varcomm.graph.partitioners.totals import Together
from varcomm.sizes import exact_int
from varcomm.transport.agreement import agree, compare, share
from varcomm.transport.engines import engine_for
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
    """Decide which of `parts` ranks owns each node, where no rank has the positions of all.

    Collective: every rank calls it with the positions that it has, and all raise if one has to. The
    result is exactly that of :func:`assign` for all positions, those of lower ranks first.

    Parameters
    ----------
    pos : torch.Tensor
        This rank's positions, finite, of shape (n, D) or, for one coordinate, (n,); any n, zero
        included. D and the dtype are the same on all ranks.
    parts : int
        How many parts. They need not be as many as the ranks that decide.
    method : {"hilbert", "rcb"}
        As :func:`assign` has them.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that hold positions; None is the whole world.
    node_weight : torch.Tensor, optional
        What each node costs: non-negative integers of shape (n,), as :func:`assign` takes them; on
        all ranks or on none.

    Returns
    -------
    torch.Tensor
        The part of each of this rank's nodes, int64 of shape (n,), on the device of `pos`.

    Raises
    ------
    ArgumentError
        On every rank, if positions, weights, `parts` or `method` will not do on one of them.
    DisagreementError
        On every rank, if they have other numbers of coordinates, dtypes or devices, `parts` or
        methods, or only some have weights.
    GroupError
        If this rank is not in `group`; on every rank, if it does not communicate on the device of
        `pos`.

    Notes
    -----
    Positions stay where they are. The ranks only count how many of them, or what weight, lie in
    ranges of the curve or of a coordinate, and narrow the ranges that hold a cut by 8 bits a round.

    Communication: for ``"hilbert"`` at most 8 rounds, for ``"rcb"`` at most 8 for each of the
    ``log2(parts)`` levels of boxes, rounded up. A round is an :func:`all_reduce` of at most 2 KiB
    for each cut that is looked for, however many positions there are. What else travels is smaller:
    bounds of the boxes, and a few numbers a cut for positions that are equal.

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
    return _METHODS[method](rows, int(parts), Together(ranks), weight)


def _checked(
    pos: torch.Tensor, parts: int, method: str, node_weight: torch.Tensor | None, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return positions of shape (n, D) and weights in int64, if this rank's arguments will do."""
    if method not in _METHODS:
        raise ArgumentError(f"method must be one of {', '.join(_METHODS)}; got {method!r}.")
    if exact_int(parts) is None or parts < 1:
        raise ArgumentError(f"parts must be a positive integer; got {parts!r}.")
    if isinstance(pos, torch.Tensor):
        engine_for(group, pos.device)
    rows = checked_positions(pos, "pos", method)
    if node_weight is None:
        return rows, None
    if isinstance(node_weight, torch.Tensor) and node_weight.device != rows.device:
        raise ArgumentError(f"node_weight is on {node_weight.device}, pos is on {rows.device}.")
    return rows, checked_weight(node_weight, "node_weight", len(rows), "rows")
