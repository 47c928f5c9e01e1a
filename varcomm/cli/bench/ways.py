"""Contenders made of functions that autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from varcomm.cli.bench.case import Contender

__all__ = ["contender"]


def contender(
    name: str,
    kind: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    gradient: torch.Tensor | None,
) -> Contender:
    """Return what calls a function, or, with a gradient, what runs its backward again and again.

    The input requires a gradient, as in training. The graph of a backward is built at the first
    call, which nobody times. Others have tensors of their own: some write into what they are given.
    """
    leaf = x.clone().requires_grad_()
    if gradient is None:
        return Contender(name, kind, partial(function, leaf))
    given, graph = gradient.clone(), list[torch.Tensor]()

    def backward() -> torch.Tensor:
        if not graph:
            graph.append(function(leaf))
        (of_leaf,) = torch.autograd.grad(graph, leaf, given, retain_graph=True)
        return of_leaf

    return Contender(name, kind, backward)
