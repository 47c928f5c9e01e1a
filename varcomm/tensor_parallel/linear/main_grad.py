"""Gradients that are added up in another place and dtype than ``weight.grad``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from varcomm.errors import ArgumentError
from varcomm.ops.autograd import uncompiled

__all__ = ["MainGrad", "weight_gradient"]


@dataclass(frozen=True)
class MainGrad:
    """Where the gradients of a weight are added up.

    Attributes
    ----------
    values : torch.Tensor
        ``weight.main_grad``.
    accumulator : torch.autograd.graph.Node
        What would add them to ``weight.grad``.
    """

    values: torch.Tensor
    accumulator: Node

    @classmethod
    def of(cls, weight: torch.Tensor, where: str) -> MainGrad | None:
        """Return that of a weight which has one, and a gradient."""
        values = getattr(weight, "main_grad", None)
        recorded = weight.requires_grad and torch.is_grad_enabled()
        return cls._of(weight, values, where) if recorded and values is not None else None

    @classmethod
    @uncompiled("a graph does not know whether backward() adds to weight.main_grad; delete it")
    def _of(cls, weight: torch.Tensor, values: object, where: str) -> MainGrad | None:
        # what transforms of torch.func differentiate is returned to them, not accumulated
        if torch._C._functorch.peek_interpreter_stack():
            return None
        if not isinstance(values, torch.Tensor) or values.shape != weight.shape:
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else values
            raise ArgumentError(
                f"{where}weight.main_grad must be a tensor of the weight's shape, "
                f"{tuple(weight.shape)}; got {got!r}."
            )
        if not weight.is_leaf:
            raise ArgumentError(
                f"{where}weight.main_grad is for parameters; this weight is computed from others."
            )
        return cls(values, get_gradient_edge(weight).node)

    def is_due(self) -> bool:
        """Tell whether the backward that runs would add to ``weight.grad``.

        ``torch.autograd.grad`` would not: what it is asked for it returns.
        """
        try:
            return torch._C._will_engine_execute_node(self.accumulator)
        except RuntimeError:  # it is the weight's gradient that torch.autograd.grad is asked for
            return False


def weight_gradient(ctx: Any, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a weight, or add it to ``ctx.main_grad``."""
    main_grad: MainGrad | None = ctx.main_grad
    if main_grad is None or not main_grad.is_due():
        return gradient.T @ x.conj()
    if torch.is_grad_enabled():
        raise ArgumentError(
            "backward(create_graph=True) with a weight.main_grad: gradients that are added to it "
            "have no derivatives. Take torch.autograd.grad, or delete weight.main_grad."
        )
    dtype = main_grad.values.dtype
    main_grad.values.addmm_(gradient.T.to(dtype), x.conj().to(dtype))
    return None
