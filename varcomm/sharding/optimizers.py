"""Optimizers that mix the elements of parameters, which are wrong on a rank's part of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from varcomm.errors import ArgumentError
from varcomm.ops.checks import shard_of
from varcomm.transport.call_log import word_of
from varcomm.transport.group import Group

_REPLACED = "_varcomm_replaced"

# By the names of their classes in torch, transformers and common packages. A rank would compute
# what one process computes of whole tensors: products or norms of all gradients, factors, inverse
# roots, orthogonal matrices.
OF_ALL = frozenset(
    {
        *("LBFGS", "FullBatchLBFGS", "SAM", "ASAM", "Prodigy", "ProdigyPlusScheduleFree"),
        *("DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "DAdaptAdan"),
    }
)
OF_A_TENSOR = frozenset(
    {
        *("Adafactor", "Muon", "SOAP", "Shampoo", "DistributedShampoo", "KFAC", "KFACOptimizer"),
        *("GaLoreAdamW", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "NovoGrad", "FusedNovoGrad"),
        *("Adam_mini", "AdamMini", "PSGD", "Kron", "AdaFactor", "CAME", "SM3", "AdaHessian"),
        *("MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"),
        *("StableAdamW", "AdamP", "SGDP", "Ranger21"),
    }
)


def names_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the optimizer's class and of its bases."""
    return {kind.__name__ for kind in type(optimizer).__mro__}


@functools.cache  # one hook per process
def check_steps() -> None:
    """Check steps of optimizers from now on.

    Those of parameters that were replaced are refused, and for sharded parameters those that mix
    elements. Ranks compare at their next sum whether all of them have made a step of sharded
    parameters: a GradScaler on each rank sees the gradients of this rank's part alone.
    """

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        mixes = not names_of(optimizer).isdisjoint(OF_ALL | OF_A_TENSOR)
        kind, groups = type(optimizer).__name__, set[Group]()
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            # the caller may go on to train the old layers elsewhere
            if parameter.grad is None and hasattr(parameter, _REPLACED):
                raise ArgumentError(
                    f"{kind} has a parameter of shape {tuple(parameter.shape)} that "
                    "tensor_parallel.parallelize has replaced, and would not train the model. "
                    "Make the optimizer after parallelize."
                )
            spec = shard_of(parameter)
            if spec is None or spec.group.size == 1:
                continue
            if mixes:
                raise ArgumentError(
                    f"{kind} computes with whole parameters, and this rank has a part of one, of "
                    f"shape {tuple(parameter.shape)}. Use an optimizer whose update of an element "
                    "needs only this element, such as AdamW or SGD, for sharded parameters."
                )
            groups.add(spec.group)
        name = f"{kind}.step of sharded parameters, which all ranks make or skip"
        for log in (group.log for group in groups):
            if log is not None:
                log.add((name, word_of(name)))

    register_optimizer_step_pre_hook(check)


def refuse_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse steps of optimizers that still have these parameters, which no longer train."""
    check_steps()
    for parameter in parameters:
        setattr(parameter, _REPLACED, True)
