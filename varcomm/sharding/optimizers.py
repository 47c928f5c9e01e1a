"""Optimizers that mix the elements of parameters, which are wrong on a rank's part of them."""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from varcomm.errors import ArgumentError

# By the names of their classes in torch, transformers and common packages. A rank would compute
# what one process computes of whole tensors: products or norms of all gradients, factors, inverse
# roots, orthogonal matrices.
OF_ALL = frozenset({"LBFGS", "FullBatchLBFGS"})
OF_A_TENSOR = frozenset(
    {
        *("Adafactor", "Muon", "SOAP", "Shampoo", "DistributedShampoo", "KFAC", "KFACOptimizer"),
        *("GaLoreAdamW", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "NovoGrad", "FusedNovoGrad"),
        *("Adam_mini", "AdamMini", "PSGD", "Kron"),
    }
)


def names_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the optimizer's class and of its bases."""
    return {kind.__name__ for kind in type(optimizer).__mro__}


@functools.cache  # one hook per process
def refuse_mixing(mark: str) -> None:
    """Refuse steps of such optimizers from now on, if a parameter has the attribute `mark`."""

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if names_of(optimizer).isdisjoint(OF_ALL | OF_A_TENSOR):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter, mark) and getattr(parameter, mark).spec.group.size > 1:
                    raise ArgumentError(
                        f"{type(optimizer).__name__} computes with whole parameters, and this "
                        f"rank has a part of one, of shape {tuple(parameter.shape)}. Use an "
                        "optimizer whose update of an element needs only this element, such as "
                        "AdamW or SGD, for sharded parameters."
                    )

    register_optimizer_step_pre_hook(check)
