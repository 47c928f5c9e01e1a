"""The suite of tensor parallelism: uneven rows of a sequence, features and classes.

Bytes are those of the whole input: as many tokens as features for the linears, and eight times as
many classes as tokens for the cross entropy. ``column_linear`` gathers the rows of a sequence and
computes own columns, ``row_linear`` sums the products of all ranks and keeps own rows; in backward
both give the gradients of input and weight. ``cross_entropy`` is a loss for each token, of logits
that are split over classes. The floors are the same products and sums by torch, into new memory,
and bare collectives, one after the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear

import varcomm.tensor_parallel as tp
from varcomm.cli.bench.case import FLOOR, OURS, Case, Contender, Task
from varcomm.cli.bench.floors import schedules
from varcomm.cli.bench.layout import Layout
from varcomm.cli.bench.peers.offer import PEERS
from varcomm.cli.bench.sizes import shard_sizes
from varcomm.cli.bench.suites.ops import tolerance
from varcomm.cli.bench.timing import Effort
from varcomm.cli.bench.ways import contender

__all__ = ["OPERATIONS", "build"]

# Of a cross entropy each rank tells the others, for each token, three numbers in fp32: its largest
# logit, its sum of exponentials, and the target's logit.
_TOLD = 3


@dataclass(frozen=True)
class _Parts:
    """Whole tensors, and which part of each dimension is this rank's."""

    case: Case
    rank: int
    tokens: int
    features: int
    device: torch.device

    @classmethod
    def of(cls, case: Case, rank: int, device: torch.device) -> _Parts:
        count = case.nbytes / getattr(torch, case.dtype).itemsize
        if case.operation == "cross_entropy":
            tokens = max(1, round((count / 8) ** 0.5))
            return cls(case, rank, tokens, 8 * tokens, device)
        tokens = max(1, round(count**0.5))
        return cls(case, rank, tokens, tokens, device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.case.dtype)  # type: ignore[no-any-return]

    def sizes(self, count: int) -> list[int]:
        """Return how many of so many each rank has."""
        return shard_sizes(self.case.skew, count, self.case.world)

    def own(self, count: int) -> slice:
        """Return which are this rank's."""
        sizes = self.sizes(count)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def made(self, what: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return values that are the same on all ranks."""
        generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
        return (torch.randn(*shape, generator=generator) * scale).to(self.device, self.dtype)

    def gathered(self) -> Layout:
        """Return the layout of rows that all ranks get."""
        sizes = self.sizes(self.tokens)
        return self._layout(sizes, [[size] * len(sizes) for size in sizes])

    def scattered(self) -> Layout:
        """Return the layout of rows that are summed over ranks."""
        sizes = self.sizes(self.tokens)
        return self._layout(sizes, [sizes] * len(sizes))

    def _layout(self, sizes: list[int], matrix: list[list[int]]) -> Layout:
        return Layout(self.rank, sizes, matrix, self.features, self.dtype, self.device, "")


@dataclass(frozen=True)
class _Made:
    """What an operation is: varcomm's contender, bare ones, and what they must return."""

    ours: Contender
    floors: Mapping[str, Callable[[], Any]]
    expected: Any
    sent: int
    received: int


def build(case: Case, effort: Effort, device: torch.device) -> Task:
    """Prepare a case on this rank."""
    parts = _Parts.of(case, dist.get_rank(), device)
    made = _MAKE[case.operation](parts)
    split = parts.sizes(parts.features if case.operation == "cross_entropy" else parts.tokens)
    return Task(
        [made.ours, *(Contender(name, FLOOR, run) for name, run in made.floors.items())],
        made.expected,
        3 * tolerance(case),
        parts.tokens * parts.features * parts.dtype.itemsize,
        max(split) * len(split) / max(sum(split), 1),
        made.sent,
        made.received,
        dict.fromkeys(PEERS, "no uneven tensor parallelism") if effort.peers else {},
    )


def _column_linear(parts: _Parts) -> _Made:
    tokens, features = parts.tokens, parts.features
    rows, columns = parts.own(tokens), parts.own(features)
    x = parts.made("x", tokens, features)
    weight = parts.made("weight", features, features, scale=features**-0.5)
    own, own_weight = x[rows], weight[columns].contiguous()
    ours = partial(tp.column_parallel_linear, sequence_sizes=parts.sizes(tokens), save="gathered")
    gather = _schedules(parts, "all_gather", parts.gathered())
    layout = parts.gathered()
    if not parts.case.backward:
        floors = {
            name: partial(lambda way: linear(way(own), own_weight), way)
            for name, way in gather.items()
        }
        expected = _wide(linear, x, own_weight)
        return _Made(
            contender(OURS, OURS, ours, (own, own_weight), None),
            *(floors, expected, layout.sent, layout.received),
        )
    gradients = parts.made("y", tokens, features)
    gradient = gradients[:, columns].contiguous()
    scatter = _schedules(parts, "reduce_scatter", parts.scattered())

    def backward(way: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return way(gradient @ own_weight), gradient.T @ x

    layout = parts.scattered()
    both = _wide(torch.matmul, gradients, weight)[rows], _wide(torch.matmul, gradient.T, x)
    return _Made(
        contender(OURS, OURS, ours, (own, own_weight), gradient),
        {name: partial(backward, way) for name, way in scatter.items()},
        *(both, layout.sent, layout.received),
    )


def _row_linear(parts: _Parts) -> _Made:
    tokens, features = parts.tokens, parts.features
    rows, columns = parts.own(tokens), parts.own(features)
    x = parts.made("x", tokens, features)
    weight = parts.made("weight", features, features, scale=features**-0.5)
    own, own_weight = x[:, columns].contiguous(), weight[:, columns].contiguous()
    ours = partial(tp.row_parallel_linear, sequence_sizes=parts.sizes(tokens))
    layout = parts.scattered()
    if not parts.case.backward:
        scatter = _schedules(parts, "reduce_scatter", layout)
        floors = {
            name: partial(lambda way: way(linear(own, own_weight)), way)
            for name, way in scatter.items()
        }
        return _Made(
            contender(OURS, OURS, ours, (own, own_weight), None),
            *(floors, _wide(linear, x, weight)[rows], layout.sent, layout.received),
        )
    gradients = parts.made("y", tokens, features)
    gradient = gradients[rows]
    layout = parts.gathered()
    gather = _schedules(parts, "all_gather", layout)

    def backward(way: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        whole = way(gradient)
        return whole @ own_weight, whole.T @ own

    expected = (
        _wide(torch.matmul, gradients, own_weight),
        _wide(torch.matmul, gradients.T, own),
    )
    return _Made(
        contender(OURS, OURS, ours, (own, own_weight), gradient),
        {name: partial(backward, way) for name, way in gather.items()},
        *(expected, layout.sent, layout.received),
    )


def _cross_entropy(parts: _Parts) -> _Made:
    tokens, classes = parts.tokens, parts.features
    own = parts.own(classes)
    whole = parts.made("logits", tokens, classes)
    logits = whole[:, own].contiguous()
    of_loss = torch.promote_types(parts.dtype, torch.float32)
    target = torch.arange(tokens, device=parts.device) * 7 % classes
    here = ((target >= own.start) & (target < own.stop)).nonzero().view(-1)
    local = target[here] - own.start

    def ours(x: torch.Tensor) -> torch.Tensor:
        return tp.vocab_parallel_cross_entropy(x, target, parts.sizes(classes))

    if not parts.case.backward:
        # three numbers a token, of all ranks
        sizes = [tokens] * parts.case.world
        told = Layout(
            *(parts.rank, sizes, [[size] * len(sizes) for size in sizes], _TOLD),
            *(of_loss, parts.device, ""),
        )

        def forward(way: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            wide = logits.to(of_loss)
            mine = wide.new_zeros(tokens, _TOLD)
            if wide.shape[1]:
                mine[:, 0] = wide.amax(1)
                mine[:, 1] = (wide - mine[:, :1]).exp_().sum(1)
            else:
                mine[:, 0] = -torch.inf
            mine[here, 2] = wide[here, local]
            largest, total, found = way(mine).view(-1, tokens, _TOLD).unbind(2)
            highest = largest.amax(0)
            summed = (total * (largest - highest).exp()).sum(0)
            return summed.log() + highest - found.sum(0)

        gather = schedules(parts.case.engine, "all_gather", told)
        expected = cross_entropy(whole.double(), target, reduction="none").to(of_loss)
        return _Made(
            contender(OURS, OURS, ours, logits, None),
            {name: partial(forward, way) for name, way in gather.items()},
            *(expected, told.sent, told.received),
        )
    gradient = parts.made("loss", tokens).to(of_loss)
    wide = whole.double().requires_grad_()
    loss = cross_entropy(wide, target, reduction="none")
    (of_logits,) = torch.autograd.grad(loss, wide, gradient.double())
    likely = whole.double().softmax(1)[:, own].to(of_loss)

    def backward() -> torch.Tensor:
        result = likely * gradient[:, None]
        result[here, local] -= gradient[here]
        return result.to(parts.dtype)

    return _Made(
        contender(OURS, OURS, ours, logits, gradient),
        {"no messages": backward},
        *(of_logits[:, own].to(parts.dtype), 0, 0),
    )


_MAKE: dict[str, Callable[[_Parts], _Made]] = {
    "column_linear": _column_linear,
    "row_linear": _row_linear,
    "cross_entropy": _cross_entropy,
}
OPERATIONS = tuple(_MAKE)


def _schedules(
    parts: _Parts, primitive: str, layout: Layout
) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    return schedules(parts.case.engine, primitive, layout)


def _wide(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Compute in fp64 what is expected."""
    return function(*(x.double() for x in inputs)).to(inputs[0].dtype)
