"""Whether targets are classes: what depends on their values, of which a graph knows nothing."""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError

__all__ = ["check_classes", "checked_in_graph"]


def check_classes(target: torch.Tensor, classes: int, ignore_index: int, where: str) -> None:
    """Raise ArgumentError if a target is none of so many classes, and not to be ignored."""
    outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(outside.any()):
        first = tuple(outside.nonzero()[0].tolist())
        raise ArgumentError(
            f"{where}target{list(first)} is {int(target[first])}, which is no class, "
            f"0...{classes - 1}, and not ignore_index, {ignore_index}; so are "
            f"{int(outside.sum()) - 1} more."
        )


@torch.library.custom_op(
    "varcomm::checked_targets",
    mutates_args=(),
    schema="(Tensor target, SymInt classes, int ignored, str name, int rank, int ranks) -> Tensor",
)
def checked_in_graph(
    target: torch.Tensor, classes: int, ignored: int, name: str, rank: int, ranks: int
) -> torch.Tensor:
    """Return a copy of targets, or raise ArgumentError when the graph runs."""
    check_classes(target, classes, ignored, f"{name} on rank {rank} of {ranks}: ")
    return target.clone(memory_format=torch.contiguous_format)


@checked_in_graph.register_fake
def _(target: torch.Tensor, *_: object) -> torch.Tensor:
    return target.new_empty(target.shape)
