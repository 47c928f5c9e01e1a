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
    function: Callable[..., torch.Tensor],
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    gradient: torch.Tensor | None,
) -> Contender:
    """Return what calls a function, or, with a gradient, what runs its backward again and again.

    Inputs require a gradient, as in training. The graph of a backward is built at the first call,
    which nobody times. Others have tensors of their own: some write into what they are given.
    """
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = [x.clone().requires_grad_() for x in given]
    if gradient is None:
        return Contender(name, kind, partial(function, *leaves))
    of_result, graph = gradient.clone(), list[torch.Tensor]()

    def backward() -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not graph:
            graph.append(function(*leaves))
        found = torch.autograd.grad(graph, leaves, of_result, retain_graph=True)
        return found if isinstance(inputs, tuple) else found[0]

    return Contender(name, kind, backward)
