"""Sums over ranks, and losses of pooled values, whose gradients count once.

Every rank calls ``loss.backward()`` on the same number. The adjoint of ``all_reduce`` would count
each of these P identical losses. Here a value is one number that all ranks have copies of, and so
is its gradient. The copies are assumed to be equal; :func:`varcomm.debug` compares them.

``replicated_sum(part)`` is ``replicated(all_reduce(part))`` without the messages of a backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import digest
from varcomm.ops.operator import Operator, apply, checking, torch_operator
from varcomm.ops.replicated import ReplicatedSum
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["replicated", "replicated_sum"]


class _Partitioned(Protocol):
    """A partitioned graph."""

    @property
    def group(self) -> Group: ...


def replicated_sum(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over ranks; the gradient of the result is assumed to be the same on all ranks."""
    return apply(ReplicatedSum(group, use_fp32=True), partial)


def replicated(value: torch.Tensor, group: _Partitioned | GroupLike = None) -> torch.Tensor:
    """Count a value once that every rank computed identically.

    For a loss, or an energy, of values that all ranks have, such as the results of
    :func:`~varcomm.graph.global_mean_pool`. Those are exact operators, whose backward sums the
    gradients of all ranks: a loss that each of P ranks computes from them would count P times.
    After this, it counts once::

        loss = replicated(F.cross_entropy(head(global_mean_pool(x, batch, graph)), y), graph)
        loss.backward()
        varcomm.data_parallel.sum_gradients(model)  # of layers before the pool and of the head

    ``torch.autograd.grad(replicated(energy, graph), pos, create_graph=True)`` returns the forces on
    this rank's nodes. The results of :meth:`PartitionedGraph.sum` and ``mean`` count once already;
    the two kinds can be added.

    Parameters
    ----------
    value : torch.Tensor
        Floats or complex, of any shape; the same bits on every rank.
    group : PartitionedGraph, ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        A copy of `value`. Its gradient, assumed to be the same on all ranks, reaches `value`
        divided by P.

    Raises
    ------
    ArgumentError
        On this rank, before any communication, if `value` is no tensor of floats.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if values differ: for example after dropout
        that follows a pool.

    Notes
    -----
    Adjoint: division by P. As a map from P copies ``x_r``, for the inner product summed over ranks,
    to one value it is their mean.

    Communication: none, in forward and in derivatives of any order.

    In one process: ``value.clone()``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     x = torch.tensor(rank + 1.0, requires_grad=True)
    ...     loss = varcomm.all_reduce(x) ** 2  # 9 on both ranks; its derivative is 6
    ...     varcomm.graph.reductions.replicated(loss).backward()
    ...     return x.grad.item()
    >>> varcomm.launch(fn, 2)
    [6.0, 6.0]
    """
    ranks = getattr(group, "group", None)
    ranks = ranks if isinstance(ranks, Group) else resolve(cast(GroupLike, group))
    with checking("replicated", ranks) as where:
        checked_tensor(value, where, "value")
        if not (value.is_floating_point() or value.is_complex()):
            raise ArgumentError(
                f"{where}value must be of floats, to have a gradient; got {value.dtype}."
            )
    return apply(_CopiesToOne(ranks, compared=True), value)


@torch_operator
@dataclass(frozen=True)
class _CopiesToOne(Operator):
    """From equal copies on all ranks to one value: their mean."""

    name = "replicated"
    group: Group
    compared: bool = False

    def start(self, x: torch.Tensor) -> Pending:
        """Copy: the result of an operator never shares memory with its input."""
        return Pending([], x.clone)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def adjoint(self) -> _OneToCopies:
        return _OneToCopies(self.group)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Compare the values of a user; derivatives may differ in their last bit."""
        value = x.item() if x.numel() == 1 else digest(x)
        return {"shape": list(x.shape)} | ({"the value": repr(value)} if self.compared else {})


@torch_operator
@dataclass(frozen=True)
class _OneToCopies(Operator):
    """From one value to the part of each copy: parts that sum to the value."""

    name = "replicated_part"
    group: Group

    def start(self, x: torch.Tensor) -> Pending:
        return Pending([], lambda: x / self.group.size)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def adjoint(self) -> _CopiesToOne:
        return _CopiesToOne(self.group)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        return {"shape": list(x.shape)}
