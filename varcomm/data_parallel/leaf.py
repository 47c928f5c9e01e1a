"""The node of the graph at which a parameter's gradient ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["accumulator", "accumulators", "notes"]


def accumulator(leaf: torch.Tensor) -> Node:
    """Return the node that adds to ``grad`` of a leaf; a frozen one has it in reserve.

    It is the same one as long as somebody keeps it, and the leaf keeps dtype and device.
    """
    wanted = leaf.requires_grad
    leaf.requires_grad_(True)
    try:
        return get_gradient_edge(leaf).node
    finally:
        leaf.requires_grad_(wanted)


def accumulators(leaves: Sequence[torch.Tensor]) -> list[Node | None]:
    """Return the nodes of many leaves in one call, which takes less time; None for frozen ones.

    One of them has to learn, and gradients have to be enabled.
    """
    # torch's own node of many inputs; no operation, so that transforms of torch.func see nothing
    made = torch._C._functions.DelayedError(b"", len(leaves))(*leaves)
    joined = made if isinstance(made, torch.Tensor) else made[0]
    assert joined.grad_fn is not None
    return [node for node, _ in joined.grad_fn.next_functions]


def notes(node: Node) -> dict[str, Any]:
    """Return what may be written down at a node, by those who keep it."""
    return cast(dict[str, Any], node.metadata)
