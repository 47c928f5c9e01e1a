"""What copies of replicated modules have, so that nobody trains them as if they were."""

from __future__ import annotations

from typing import Any

import torch

from varcomm.errors import ArgumentError, GroupError
from varcomm.ops.operator import checking
from varcomm.transport.group import resolve

__all__ = ["CopyOfReplica"]


class CopyOfReplica:
    """What a copied or loaded module has in the place of its :class:`Replica`.

    Its parameters are its own, and nobody sums their gradients.
    """

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Refuse to train a copy as if it were replicated; alone, it is like any other module."""
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        try:
            group = resolve(None)
        except GroupError:
            return
        with checking("replicate", group) as where:
            raise ArgumentError(
                f"{where}this module is a copy of one that was replicated, and its gradients are "
                "not summed. Call replicate on it too, or use it under torch.no_grad() or with "
                "requires_grad_(False)."
            )
