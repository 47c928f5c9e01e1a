"""Sums over ranks that every rank then uses alike: a loss, a norm, a count.

``loss.backward()`` runs on every rank from the same number. With the adjoint of ``all_reduce`` each
of these P identical losses would count, and gradients would be P times too large. So here, and only
here, the result is understood as one number that ranks have copies of, and a gradient as one that
they have copies of too: each rank takes its copy, once.
"""

from __future__ import annotations

import torch

from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.autograd import apply
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

__all__ = ["replicated_sum"]


def replicated_sum(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Assume that the gradient of the result is the same on all ranks, and sum over ranks."""
    return apply(_PartialToReplicated(group, use_fp32=True), partial)


class _PartialToReplicated(AllReduce):
    """From parts to their sum, of which each rank has a copy."""

    name = "replicated_sum"

    @property
    def adjoint(self) -> _ReplicatedToPartial:
        return _ReplicatedToPartial(self.group, self.use_fp32)


class _ReplicatedToPartial(AllReduce):
    """From copies of one value to one use of it on each rank; no communication."""

    name = "replicated_use"

    def start(self, x: torch.Tensor) -> Pending:
        """Copy, since an operator's result does not share memory with its input."""
        return Pending([], x.clone)

    @property
    def adjoint(self) -> _PartialToReplicated:
        return _PartialToReplicated(self.group, self.use_fp32)
