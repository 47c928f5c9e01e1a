"""The loss of each token from what all shards tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from varcomm.ops.autograd import apply
from varcomm.ops.replicated import ReplicatedGather
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.cross_entropy.in_graph import statistics_in_graph
from varcomm.tensor_parallel.cross_entropy.row_map import in_chunks
from varcomm.tensor_parallel.cross_entropy.statistics import Statistics
from varcomm.transport.group import Group

__all__ = ["Options", "Reduction", "SmoothOver", "Targets"]

Reduction = Literal["none", "mean", "sum"]
SmoothOver = Literal["all", "wrong"]


@dataclass(frozen=True)
class Options:
    """What both losses take, checked."""

    label_smoothing: float
    ignore_index: int
    reduction: Reduction
    z_loss: float
    smooth_over: SmoothOver


class Targets:
    """The distribution over classes that each token is to have, as one rank needs to know it.

    For the target `y` and smoothing `s`, class `c` has ``(1 - s) [c = y] + s / K``, or, where only
    the wrong classes share `s`, ``(1 - s) [c = y] + s / (K - 1) [c != y]``; times its weight. Both
    are `share` for each class, and `own` more for the target.
    """

    def __init__(
        self,
        target: torch.Tensor,
        sizes: ShardSizes,
        weight: torch.Tensor | None,
        options: Options,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        self.options, self.group = options, group
        smoothing, classes = options.label_smoothing, sizes.total
        self.share = smoothing / (classes if options.smooth_over == "all" else classes - 1 or 1)
        own = 1 - smoothing - (0 if options.smooth_over == "all" else self.share)

        self.ignored = target == options.ignore_index
        target = target.masked_fill(self.ignored, 0)
        self.weights = None if weight is None else weight.detach().to(dtype)
        counted = torch.ones_like(target, dtype=dtype)
        if self.weights is not None:
            counted = self.weights[target]
        self.counted = counted.masked_fill(self.ignored, 0)
        self.q = own * self.counted

        ends = torch.tensor(list(sizes), device=target.device).cumsum(0)
        self.owner = torch.bucketize(target, ends, right=True)
        first, columns = sizes.offsets[group.rank], sizes[group.rank]
        mine = self.owner == group.rank
        self.local_q = self.q.masked_fill(~mine, 0)
        self.column = (target - first).masked_fill(~mine, 0)
        self.local_weights = (
            () if self.weights is None else (self.weights[first : first + columns],)
        )
        if self.weights is None:
            self.of_shards = torch.tensor(list(sizes), dtype=dtype, device=target.device)
        else:
            self.of_shards = torch.stack([part.sum() for part in self.weights.split(list(sizes))])

    def loss(
        self,
        values: torch.Tensor,
        head: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        chunk_rows: int | None = None,
    ) -> torch.Tensor:
        """Take statistics of logits, or of hidden states and a head, and make of all ranks' a loss.

        One collective, whose backward is a slice.
        """
        weighted = self.weights is not None
        of = Statistics(self.share, head is not None, bias is not None, weighted, chunk_rows)
        rows = (values, self.column, self.local_q)
        shared = (*(x for x in (head, bias) if x is not None), *self.local_weights)
        if torch.compiler.is_compiling():
            found = statistics_in_graph(of, rows, shared)
        else:
            chunks = of.chunks(values, shared, tuple(self.q.shape))
            found = in_chunks(of.row_map, chunks, rows, shared)
        told = torch.stack(found)
        gather = ReplicatedGather(self.group, (len(told),) * self.group.size, 0, use_fp32=True)
        of_ranks = apply(gather, told).unflatten(0, (self.group.size, len(told)))
        return self._reduced(self._of_tokens(*of_ranks.unbind(1)))

    def _of_tokens(self, top: torch.Tensor, log: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token from (P, *T) statistics."""
        top = top.detach()
        # A shift near the log-sum-exp. Its own rounding cancels, since nothing but its difference
        # from tops is used; so above must not be computed from their sum, which would be rounded.
        peak = (top + log.detach()).amax(0)
        rest = torch.logsumexp(top - peak + log, 0)
        above = peak - top + rest  # the log-sum-exp above the top of each shard
        loss = part.sum(0) + self.q * above.gather(0, self.owner.unsqueeze(0)).squeeze(0)
        if self.share:
            shares = self.of_shards.view(-1, *[1] * self.q.dim())
            loss = loss + self.share * (shares * above).sum(0)
        if self.options.z_loss:
            loss = loss + self.options.z_loss * (peak + rest) ** 2
        return loss.masked_fill(self.ignored, 0)

    def _reduced(self, loss: torch.Tensor) -> torch.Tensor:
        if self.options.reduction == "none":
            return loss
        total = loss.sum()
        return total if self.options.reduction == "sum" else total / self.counted.sum()
