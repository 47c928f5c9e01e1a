"""Values that every rank computes alike: sums over ranks, and a loss of pooled values.

``loss.backward()`` runs on every rank from the same number. With the adjoint of ``all_reduce`` each
of these P identical losses would count, and gradients would be P times too large. So here, and only
here, a value is understood as one number that ranks have copies of, and its gradient as one that
they have copies of too. That they are equal is assumed; inside :func:`varcomm.debug` it is looked
at where it can be wrong.

``replicated_sum(part)`` is ``replicated(all_reduce(part))`` without the messages of a backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.autograd import apply
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import digest
from varcomm.ops.library import torch_operator
from varcomm.ops.operator import Operator, checking
from varcomm.ops.replicated import ReplicatedSum
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

if TYPE_CHECKING:
    from varcomm.graph.partitioned_graph import PartitionedGraph

__all__ = ["replicated", "replicated_sum"]


def replicated_sum(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Assume that the gradient of the result is the same on all ranks, and sum over ranks."""
    return apply(ReplicatedSum(group, use_fp32=True), partial)


def replicated(value: torch.Tensor, group: PartitionedGraph | GroupLike = None) -> torch.Tensor:
    """Assume that every rank computed the same value and uses it alike, and count it once.

    For a loss, or an energy, that is computed from what all ranks have, such as the results of
    :func:`~varcomm.graph.global_mean_pool`. Those are exact operators: what arrives at them in
    backward is summed over ranks. A loss that each of P ranks computes from them would then count P
    times. After this, it counts once::

        loss = replicated(F.cross_entropy(head(global_mean_pool(x, batch, graph)), y), graph)
        loss.backward()
        varcomm.data_parallel.sum_gradients(model)  # of layers before the pool and of the head

    and ``torch.autograd.grad(replicated(energy, graph), pos, create_graph=True)`` gives the forces
    on this rank's own nodes. Not for what :meth:`PartitionedGraph.sum` and ``mean`` give, which
    count once already; the two kinds can be added.

    Parameters
    ----------
    value : torch.Tensor
        Floats or complex, of any shape; equal on every rank, bit for bit.
    group : PartitionedGraph, ProcessGroup or DeviceMesh, optional
        The ranks that computed it; None is the whole world.

    Returns
    -------
    torch.Tensor
        A copy of `value`. Its gradient, assumed to be the same on all ranks as well, arrives at
        `value` divided by P.

    Raises
    ------
    ArgumentError
        Before any communication, if `value` is no tensor of floats.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if values differ: by dropout after a pool, say,
        of which every rank draws its own.

    Notes
    -----
    Adjoint: division by P. As a map from P copies ``x_r``, for the inner product summed over ranks,
    to one value it is their mean; where copies are equal, the mean is any of them.

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
    ranks = getattr(group, "group", None)  # of a graph
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
    """From what each rank computed alike to one value: the mean of equal copies."""

    name = "replicated"
    group: Group
    compared: bool = False

    def start(self, x: torch.Tensor) -> Pending:
        """Copy, since an operator's result does not share memory with its input."""
        return Pending([], x.clone)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def adjoint(self) -> _OneToCopies:
        return _OneToCopies(self.group)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Compare the values that a user gives; derivatives may differ in their last bit."""
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
