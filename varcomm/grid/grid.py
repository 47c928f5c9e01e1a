"""``Grid``: a grid whose rows, and with a mesh of two dimensions columns, are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.grid.field import RULES, Field, ranks_of, wrap
from varcomm.grid.layout import Layout, Split
from varcomm.ops.gather_v import scatter_v
from varcomm.ops.loss_parameters import compare_parameters
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.group import Group, GroupLike, resolve


class Grid:
    """A grid that is split over ranks, in any sizes; the module's page shows its use.

    Parameters
    ----------
    shape : sequence of int
        Points along each spatial dimension, such as ``(721, 1440)``, which are the last dimensions
        of fields.
    mesh : ProcessGroup or DeviceMesh, optional
        Ranks that share the grid; None means the whole world. A group splits the first dimension
        (or the one that has `sizes`); a DeviceMesh of two dimensions splits the first two.
    sizes : sequence, optional
        For each spatial dimension the rows of each rank, or None: balanced along the dimensions
        that are split, and whole along the others. Zeros are allowed.

    Attributes
    ----------
    shape : tuple of int
        The points of the grid along each dimension.
    ranges : tuple of range
        The part of this rank along each dimension, for reading only that part of a file.
    sizes : tuple
        For each dimension the rows of all ranks, or None.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if arguments of a rank are wrong, or differ.

    See Also
    --------
    Field, varcomm.data_parallel.sum_gradients

    Notes
    -----
    Communication: set-up agrees once. A function of fields sends the rows that a rank reads and
    does not have.
    In one process: a tensor, and the functions of torch.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     grid = varcomm.grid.Grid((5, 4))
    ...     x = torch.arange(20.0).reshape(1, 1, 5, 4) if rank == 0 else None
    ...     x = grid.scatter(x)
    ...     y = torch.nn.functional.avg_pool2d(x, 3, stride=1, padding=1)
    ...     return len(x.local[0, 0]), tuple(y.shape), round(grid.mean(y).item(), 1)
    >>> varcomm.launch(fn, 2)
    [(3, (1, 1, 5, 4), 6.9), (2, (1, 1, 5, 4), 6.9)]
    """

    def __init__(
        self,
        shape: Sequence[int],
        mesh: GroupLike = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        groups = _groups(mesh)

        def check() -> tuple[tuple[int, ...], list[tuple[int, ...] | None]]:
            points = checked_sizes(shape, "shape")
            return points, _sizes(points, groups, sizes)

        found = [agree_and_share("Grid", check, lambda value: value, group) for group in groups]
        for _, all_ranks in found:
            if any(other != all_ranks[0] for other in all_ranks):
                raise DisagreementError("Grid: ranks disagree on shape or sizes.")
        points, rows = found[0][0]
        self.shape, self.sizes = points, tuple(rows)
        dims = [dim for dim, n in enumerate(rows) if n is not None]
        # a group of one rank splits nothing
        pairs = zip(dims, groups, strict=True)
        splits = [
            Split(dim - len(points), rows[dim] or (), group)
            for dim, group in pairs
            if group.size > 1
        ]
        self.grid_layout = Layout(tuple(groups), tuple(splits))
        self._whole = Layout(tuple(groups))
        self.ranges = tuple(
            range(n) if sizes is None else ShardSizes(sizes).range(groups[dims.index(dim)].rank)
            for dim, (n, sizes) in enumerate(zip(points, rows, strict=True))
        )

    def field(self, local: Tensor) -> Field:
        """Return the field of which each rank has this part, in the same memory.

        Parameters
        ----------
        local : torch.Tensor
            This rank's part; its last dimensions have the lengths of `ranges`.

        Raises
        ------
        ArgumentError
            If a dimension has another length: on this rank, before any message.
        """
        own = tuple(len(part) for part in self.ranges)
        if isinstance(local, Field):
            raise ArgumentError("Grid.field: this is a field already.")
        if tuple(local.shape[-len(own) :]) != own:
            raise ArgumentError(
                f"Grid.field on {self.grid_layout.groups[0]}: this rank has {own} points, in the "
                f"last dimensions of a tensor; got {tuple(local.shape)}."
            )
        made: Field = wrap(local, self.grid_layout)
        return made

    def scatter(self, whole: Tensor | None, src: int = 0) -> Field:
        """Return the field of a tensor that rank `src` has; collective.

        Parameters
        ----------
        whole : torch.Tensor or None
            On `src` the tensor, whose last dimensions are those of the grid; else None.
        src : int
            The rank, counted over the mesh row by row.
        """
        groups, roots = self.grid_layout.groups, ranks_of(self.grid_layout, src)
        x: Any = whole
        done: list[Group] = []
        for split in self.grid_layout.splits:
            group = split.group
            later = [g for g in groups if g not in (*done, group)]
            done.append(group)
            if any(g.rank != roots[g] for g in later):
                continue  # this rank gets its part of a later group's root
            dim = split.dim
            try:
                x = scatter_v(x, split.sizes, dim=dim, src=roots[group], group=group.process_group)
            except ArgumentError as error:
                raise ArgumentError(f"Grid.scatter to a grid of {self.shape}: {error}") from None
        return self.field(x)

    def sum(
        self, value: Tensor, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Field:
        """Return the sum over all ranks, whole; its gradient counts once. As :meth:`mean`."""
        total: Field = wrap(self._times(value, mask, weights)[0].sum(), self._whole)
        return self._compared(total)

    def mean(
        self, value: Tensor, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Field:
        """Return the mean over all ranks, whole; its gradient counts once.

        Parameters
        ----------
        value : Field or torch.Tensor
            A field, or an ordinary tensor that every rank has computed alike.
        mask : torch.Tensor, optional
            Points that count; bool, broadcast against `value`. A field, or whole on every rank.
        weights : torch.Tensor, optional
            Weights of points, such as cosines of latitudes in the shape (rows, 1).
        """
        product, factors = self._times(value, mask, weights)
        total: Any = product.sum()
        for factor in factors:
            total = total * (factor.numel() / factor.sum())
        mean: Field = total / product.numel()
        return self._compared(mean)

    def _compared(self, loss: Field) -> Field:
        """Return a loss; inside debug() its parameters are compared between ranks."""
        for group in self.grid_layout.groups:
            compare_parameters(loss.local, group)
        return loss

    def _times(
        self, value: Tensor, mask: Tensor | None, weights: Tensor | None
    ) -> tuple[Field, list[Tensor]]:
        x = value if isinstance(value, Field) else wrap(value, self._whole)
        if mask is not None and weights is not None:
            weights, mask = weights * mask, None
        factors = [f.to(x.dtype) for f in (mask, weights) if f is not None]
        for factor in factors:
            x = x * factor
        return x, factors

    def max(self, value: Tensor, mask: Tensor | None = None) -> Field:
        """Return the largest value over all ranks, whole; points outside of a mask do not count."""
        x = value if isinstance(value, Field) else wrap(value, self._whole)
        largest = (x if mask is None else x.masked_fill(~mask, -torch.inf)).amax()
        return wrap(largest, self._whole)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Grid({self.shape}, sizes={self.sizes})"


def functions() -> list[str]:
    """Return the names of torch's functions that run on fields; of methods, without underscores.

    Returns
    -------
    list of str
        In alphabetical order.

    See Also
    --------
    Field

    Notes
    -----
    A name is not a promise for each of its options: one without a rule is refused by name.

    Communication: none.
    In one process: all functions of torch.

    Examples
    --------
    >>> import varcomm
    >>> "conv2d" in varcomm.grid.functions(), "grid_sample" in varcomm.grid.functions()
    (True, False)
    """
    below = ("get ", "upsample_")  # the latter are called by torch's interpolate
    return sorted(name for name in RULES if not name.startswith(below))


def _groups(mesh: GroupLike) -> list[Group]:
    if not isinstance(mesh, DeviceMesh):
        return [resolve(mesh)]
    return [resolve(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def _sizes(
    shape: Sequence[int], groups: Sequence[Group], sizes: Sequence[Any] | None
) -> list[tuple[int, ...] | None]:
    """Return the rows of each rank along each dimension, or None where it is not split."""
    if not 1 <= len(groups) <= len(shape):
        raise ArgumentError(
            f"Grid: a mesh of {len(groups)} dimensions splits as many of a grid; got {len(shape)}."
        )
    given = [None] * len(shape) if sizes is None else [*sizes]
    if len(given) != len(shape):
        raise ArgumentError(f"Grid: sizes must have an entry for each of {len(shape)} dimensions.")
    named = [dim for dim, rows in enumerate(given) if rows is not None]
    free = [dim for dim in range(len(shape)) if dim not in named]
    split = sorted([*named, *free[: len(groups) - len(named)]])
    if len(split) != len(groups):
        raise ArgumentError(
            f"Grid: sizes for {len(named)} dimensions, of which a mesh of {len(groups)} dimensions "
            f"splits {len(groups)}."
        )
    found: list[tuple[int, ...] | None] = [None] * len(shape)
    for dim, group in zip(split, groups, strict=True):
        rows = given[dim]
        if rows is None:
            found[dim] = tuple(ShardSizes.balanced(shape[dim], group.size))
            continue
        found[dim] = checked_sizes(rows, f"sizes[{dim}]", group.size)
        if sum(found[dim] or ()) != shape[dim]:
            raise ArgumentError(
                f"Grid: sizes[{dim}] sum to {sum(rows)}, but the grid has {shape[dim]} points."
            )
    return found
