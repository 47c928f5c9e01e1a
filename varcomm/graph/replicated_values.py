"""Sums over ranks, and losses of pooled values, whose gradients count once.

Every rank calls ``loss.backward()`` on the same number. The adjoint of ``all_reduce`` would count
each of these P identical losses. Here a value is one number that all ranks have copies of, and so
is its gradient. The copies are assumed to be equal; :func:`varcomm.debug` compares them.

``replicated_sum(part)`` is ``replicated(all_reduce(part))`` without the messages of a backward.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_tensor, checking
from varcomm.ops.digest import digest
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import apply
from varcomm.ops.loss_parameters import compare_parameters, nodes_of
from varcomm.ops.replicated import ReplicatedSum
from varcomm.ops.rule import Operator
from varcomm.transport.agreement import share
from varcomm.transport.debug import debugging
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

_COUNTED_ONCE = "varcomm: counted once"  # of nodes of autograd's graph


def replicated_sum(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over ranks; the gradient of the result is assumed to be the same on all ranks."""
    compare_parameters(partial, group)
    return apply(ReplicatedSum(group, use_fp32=True), partial)


class HasGroup(Protocol):
    """An object that is split over the ranks of a group, such as a :class:`PartitionedGraph`."""

    @property
    def group(self) -> Group:
        """The ranks of the group."""


def replicated(value: torch.Tensor, group: HasGroup | GroupLike = None) -> torch.Tensor:
    """Count a value once if every rank computed it identically.

    Use this function for a loss or an energy that all ranks compute from equal values, such as
    results of PyG's ``global_mean_pool``. The backward of a pool sums the gradients of all ranks,
    so a loss that each of P ranks computes from pools would count P times. With this function, the
    loss counts once::

        loss = replicated(F.cross_entropy(head(global_mean_pool(x, graph.batch)), y), graph)
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
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.Tensor
        A copy of `value`. Backward divides its gradient by P. The gradient must be the same on all
        ranks.

    Raises
    ------
    ArgumentError
        On this rank, before any communication, if `value` is not a tensor of floats.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if values differ: for example after dropout
        that follows a pool.

    See Also
    --------
    distribute, partition

    Notes
    -----
    Adjoint: division by P. For the inner product summed over ranks, the map from P copies to one
    value is their mean.

    Communication: none, in forward and in derivatives of any order.

    In one process: ``value.clone()``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     x = torch.tensor(rank + 1.0, requires_grad=True)
    ...     loss = varcomm.all_reduce(x) ** 2  # 9 on both ranks; its derivative is 6
    ...     varcomm.graph.replicated(loss).backward()
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
    if debugging() and not torch.compiler.is_compiling():
        for node in nodes_of(value):
            node.metadata[_COUNTED_ONCE] = True
    return apply(_CopiesToOne(ranks, compared=True), value)


def of_all_ranks(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a pooled value; inside debug() its backward warns of a forgotten :func:`replicated`.

    A loss that each rank computes from it alone has the same gradient on all ranks.
    """
    node = value.grad_fn
    if torch.compiler.is_compiling() or not debugging() or node is None or group.size == 1:
        return value
    notes: dict[Any, Any] = node.metadata  # type: ignore[assignment]

    def check(gradient: torch.Tensor) -> None:
        if not debugging() or _COUNTED_ONCE in notes:
            return
        own = repr(digest(gradient)) if gradient.any() else f"no gradient on {group}"
        if len(set(share("gradient of a pool", lambda: own, group))) == 1:
            warnings.warn(
                f"all {group.size} ranks have the same loss of a pooled value, which counts "
                f"{group.size} times in gradients. Wrap the loss: "
                "vc.graph.replicated(loss, graph).",
                stacklevel=2,
            )

    value.register_hook(check)
    return value


@torch_operator
@dataclass(frozen=True)
class _CopiesToOne(Operator):
    """From equal copies on all ranks to one value, their mean; `parts`: the adjoint of this."""

    name = "replicated"
    communicates = False
    group: Group
    parts: bool = False
    compared: bool = False

    def send(self, x: torch.Tensor) -> Pending:
        """Copy: the result of an operator never shares memory with its input."""
        return Pending([], lambda: x / self.group.size if self.parts else x.clone())

    def result(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def adjoint(self) -> _CopiesToOne:
        return _CopiesToOne(self.group, parts=not self.parts)

    def describe(self, x: torch.Tensor) -> dict[str, Any]:
        """Compare the values of a user; derivatives may differ in their last bit."""
        value = x.item() if x.numel() == 1 else digest(x)
        return {"shape": list(x.shape)} | ({"the value": repr(value)} if self.compared else {})
