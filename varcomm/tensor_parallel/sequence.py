"""Modules between parallel layers that see a part of the sequence: norms, say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.digest import differing, digest
from varcomm.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["agreed_parameters", "change", "sequence_parallel"]

M = TypeVar("M", bound=nn.Module)


def sequence_parallel(module: M, group: GroupLike = None) -> M:
    """Sum the gradients of a module's parameters over ranks that each give it a part of a sequence.

    The parameters are replicated, but each rank uses them for other rows; so their gradients are
    parts, and the whole is the sum. The module is changed in place: its class becomes one whose
    ``forward`` reads parameters through :func:`copy_to_tensor_model_parallel_region`. They stay
    what and where they are, in its state dict and in optimizers.

    Parameters
    ----------
    module : torch.nn.Module
        One whose ``forward`` reads its own parameters by their names, as those of torch do:
        LayerNorm, RMSNorm. Parameters of its submodules are not concerned.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    ArgumentError
        On every rank, if `module` is no module on one of them, or is one already.
    DisagreementError
        On every rank, if parameters differ.

    Notes
    -----
    Communication: in backward an all-reduce of each parameter's gradient. Do not sum them again.

    In one process: `module` as it is.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import sequence_parallel
    >>> def fn(rank):
    ...     norm = sequence_parallel(torch.nn.RMSNorm(2, eps=0.0))
    ...     norm(torch.ones(rank + 1, 2)).sum().backward()
    ...     return norm.weight.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [[3.0, 3.0], [3.0, 3.0]]
    """
    ranks = resolve(group)
    names = agreed_parameters(module, ranks)
    change(module, names, ranks)
    return module


def agreed_parameters(module: Any, group: Group) -> list[str]:
    """Return the names of a module's parameters if ranks have the same; collective."""

    def check() -> dict[str, object]:
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
        if isinstance(module, _SequenceParallel):
            raise ArgumentError(
                f"the gradients of this {type(module).__name__} are summed already; twice would be "
                "too much."
            )
        params = {name: p for name, p in module._parameters.items() if p is not None}
        return {name: (digest(p), p.requires_grad) for name, p in params.items()}

    told = share("sequence_parallel", check, group)
    others, names = differing(told)
    if others:
        raise DisagreementError(
            f"sequence_parallel: rank {others[0]} has other parameters than rank 0: "
            f"{', '.join(names)}. They are replicated, so they have to be the same, and require "
            "gradients alike."
        )
    return list(told[0])


def change(module: nn.Module, names: Iterable[str], group: Group) -> None:
    """Give a module the class that reads these parameters through a mapping."""
    kind = type(module)
    readers: dict[str, Any] = {name: _reader(name, group) for name in names}
    module.__class__ = type(f"SequenceParallel{kind.__name__}", (_SequenceParallel, kind), readers)


class _SequenceParallel(nn.Module):
    """What a module becomes, beside what it is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = self.__dict__.get(_COMPUTES, False)
        self.__dict__[_COMPUTES] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__[_COMPUTES] = before


# Whether a module is in its forward; whoever else reads a parameter gets the parameter itself.
_COMPUTES = "_varcomm_computes"


def _reader(name: str, group: Group) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        parameter = module._parameters[name]
        computes = module.__dict__.get(_COMPUTES, False) and torch.is_grad_enabled()
        if parameter is None or not computes:
            return parameter
        return copy_to_tensor_model_parallel_region(parameter, group=group.process_group)

    return property(read)
