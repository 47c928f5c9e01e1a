"""Modules between parallel layers that see a part of the sequence: norms, say."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from varcomm.errors import ArgumentError
from varcomm.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from varcomm.transport.agree import agree
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["sequence_parallel"]

M = TypeVar("M", bound=nn.Module)


def sequence_parallel(module: M, group: GroupLike = None) -> M:
    """Sum the gradients of a module's parameters over ranks that each give it a part of a sequence.

    The parameters are replicated, but each rank uses them for other rows; so their gradients are
    parts, and the whole is the sum. The module is changed in place: its class becomes one that
    reads parameters through :func:`copy_to_tensor_model_parallel_region`. They stay what and where
    they are, in its state dict and in optimizers.

    Parameters
    ----------
    module : torch.nn.Module
        One that reads its own parameters by their names, as those of torch do: LayerNorm, RMSNorm.
        Parameters of its submodules are not concerned.
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

    Notes
    -----
    Communication: in backward an all-reduce of each parameter's gradient. Do not sum them again.

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

    def check() -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
        if isinstance(module, _SequenceParallel):
            raise ArgumentError(
                f"the gradients of this {type(module).__name__} are summed already; twice would be "
                "too much."
            )

    agree("sequence_parallel", check, ranks)
    names = [name for name, param in module._parameters.items() if param is not None]
    kind = type(module)
    readers: dict[str, Any] = {name: _reader(name, ranks) for name in names}
    module.__class__ = type(f"SequenceParallel{kind.__name__}", (_SequenceParallel, kind), readers)
    return module


class _SequenceParallel(nn.Module):
    """What a module becomes, beside what it is."""


def _reader(name: str, group: Group) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        parameter = module._parameters[name]
        if parameter is None or not torch.is_grad_enabled():
            return parameter
        return copy_to_tensor_model_parallel_region(parameter, group=group.process_group)

    return property(read)
