"""What a shard's columns add to the loss of a token, in three numbers.

The loss of a token is ``sum_c q_c (lse - z_c)``, with `q` the target's distribution over classes,
times their weights, and `lse` the log-sum-exp of all logits `z`. Of its own columns each rank tells

- ``top``, their largest logit, a constant in derivatives: the loss does not depend on it;
- ``log``, the log of their sum of ``exp(z - top)``;
- ``part``, their sum of ``q (top - z)``.

All are differences within the shard, so that nothing is lost where logits are large and alike. A
shard without columns, or with none above minus infinity, has 0, minus infinity and its part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from varcomm.ops.reduction import accumulation_dtype
from varcomm.tensor_parallel.cross_entropy.row_map import (
    Chunks,
    Gradients,
    Product,
    RowMap,
    Sums,
    Tensors,
)

__all__ = ["Statistics", "chunk_elements", "computed_in"]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return in what dtype the loss of logits of `dtype` is computed: at least fp32."""
    return accumulation_dtype(dtype, use_fp32=True)


def chunk_elements(device: torch.device) -> int:
    """Return how many logits are looked at together.

    On a CPU they are to stay in a cache, elsewhere to give each kernel enough to do.
    """
    return 2**19 if device.type == "cpu" else 2**24


@dataclass(frozen=True)
class Statistics:
    """Which map it is, and how many rows of it at a time.

    Attributes
    ----------
    share : float
        What smoothing gives to each class.
    of_hidden, biased : bool
        Whether logits are made of hidden states by a head, and that has a bias.
    weighted : bool
        Whether classes have weights.
    chunk_rows : int, optional
        Rows at a time, where the caller says how many.
    """

    share: float
    of_hidden: bool
    biased: bool
    weighted: bool
    chunk_rows: int | None = None

    @property
    def row_map(self) -> RowMap:
        """The map; after its rows it takes head, bias and weights, as far as there are such."""
        if self.of_hidden:
            return _of_hidden(self.share, self.weighted, self.biased)
        return _of_logits(self.share, self.weighted)

    def chunks(self, values: torch.Tensor, shared: Tensors, shape: tuple[int, ...]) -> Chunks:
        """Return the chunks of rows of this shape."""
        if self.chunk_rows is not None:
            return Chunks(shape, self.chunk_rows)
        most, columns = chunk_elements(values.device), values.shape[-1]
        if self.of_hidden:
            # no more than hidden states take
            most, columns = max(values.numel(), most), len(shared[0])
        return Chunks(shape, max(1, most // max(1, columns)))


def statistics(
    z: torch.Tensor, y: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None, share: float
) -> Tensors:
    """Compute ``(top, log, part)`` of logits.

    Parameters
    ----------
    z : torch.Tensor
        (*T, K) logits of this rank.
    y : torch.Tensor
        (*T) the targets as columns of `z`; any column where `q` is 0.
    q : torch.Tensor
        (*T) the targets' own `q`, without smoothing; 0 where another rank has the target.
    weight : torch.Tensor, optional
        (K,) weights of the classes; None are ones.
    share : float
        What smoothing gives to each class.

    Returns
    -------
    tuple of torch.Tensor
        Each (*T), of the dtype of `q`.
    """
    if z.shape[-1] == 0:
        nothing = torch.zeros_like(q)
        return nothing, torch.full_like(q, -torch.inf), nothing
    top = z.detach().amax(-1).to(q.dtype)
    top = top.masked_fill(top == -torch.inf, 0)
    below = z - top.unsqueeze(-1)
    of_target = below.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    # where q is 0, the column is any, and may be minus infinity
    part = -q * of_target.masked_fill(q == 0, 0)
    if share:
        part = part - share * (below if weight is None else below * weight).sum(-1)
    return top, below.exp_().sum(-1).log(), part


def gradient(
    z: torch.Tensor,
    y: torch.Tensor,
    q: torch.Tensor,
    weight: torch.Tensor | None,
    share: float,
    gradients: Gradients,
) -> torch.Tensor:
    """Return the gradient of the logits, in their dtype, from those of `log` and `part`."""
    if z.shape[-1] == 0:
        return torch.zeros_like(z)
    top, log, _ = gradients.results
    of_log, of_part = gradients.of_results
    # where no logit is above minus infinity, none gets a gradient: exp(below) is 0 there
    scale = of_log * torch.exp(-log.masked_fill(log == -torch.inf, 0))
    result = (z - top.unsqueeze(-1)).exp_() * scale.unsqueeze(-1)
    if share:
        smooth = (share * of_part).unsqueeze(-1)
        if weight is None:
            result.sub_(smooth)
        else:
            result.addcmul_(smooth, weight, value=-1)
    return result.scatter_add_(-1, y.unsqueeze(-1), -(q * of_part).unsqueeze(-1)).to(z.dtype)


def _of_logits(share: float, weighted: bool) -> RowMap:
    """Return the map from logits: ``rows = (z, y, q)``, ``shared = (weight,)`` if `weighted`."""

    def forward(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        z, y, q = rows
        return statistics(z, y, q, shared[0] if weighted else None, share), ()

    def adjoint(rows: Tensors, shared: Tensors, g: Gradients) -> tuple[Tensors, Tensors]:
        z, y, q = rows
        return (gradient(z, y, q, shared[0] if weighted else None, share, g),), ()

    return RowMap(forward, results=3, constants=1, adjoint=adjoint)


def _of_hidden(share: float, weighted: bool, biased: bool) -> RowMap:
    """Return the map from hidden states, which makes a chunk's logits and forgets them.

    ``rows = (hidden, y, q)``, with hidden (*T, H); ``shared = (head, bias, weight)``, with head
    (K, H) and bias (K,), the last two if `biased` and if `weighted`.
    """

    def split(shared: Tensors) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return shared[0], shared[1] if biased else None, shared[-1] if weighted else None

    def forward(rows: Tensors, shared: Tensors) -> tuple[Tensors, Sums]:
        hidden, y, q = rows
        head, bias, weight = split(shared)
        return statistics(F.linear(hidden, head, bias), y, q, weight, share), ()

    def adjoint(rows: Tensors, shared: Tensors, g: Gradients) -> tuple[Tensors, Sums]:
        hidden, y, q = rows
        head, bias, weight = split(shared)
        of_logits = gradient(F.linear(hidden, head, bias), y, q, weight, share, g)
        tokens = q.numel()
        flat = of_logits.reshape(tokens, len(head))
        sums: list[torch.Tensor | Product] = []
        if g.needed[len(rows)]:
            sums.append(Product(flat.t(), hidden.reshape(tokens, head.shape[1])))
        if biased and g.needed[len(rows) + 1]:
            sums.append(flat.sum(0))
        return (of_logits @ head,) if g.needed[0] else (), tuple(sums)

    return RowMap(forward, results=3, constants=1, adjoint=adjoint)
