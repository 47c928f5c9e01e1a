"""Modules marked as shared: the names that other code knows for what :func:`replicate` does."""

from __future__ import annotations

from typing import TypeVar

import torch

from varcomm.data_parallel.replica import Replica
from varcomm.data_parallel.set_up import set_up
from varcomm.data_parallel.watching import replicas_of
from varcomm.errors import ArgumentError
from varcomm.transport.group import GroupLike

__all__ = ["mark_module_as_shared", "unmark_module_as_shared"]

Model = TypeVar("Model", bound=torch.nn.Module)


def mark_module_as_shared(
    module: Model, group: GroupLike = None, recurse: bool = True, use_fp32_reduction: bool = True
) -> Model:
    """Let every backward sum the gradients of a module's parameters over a group.

    Collective. It is :func:`replicate` for a module, or for the parameters that are its own and not
    those of modules within, beside which others may be left alone or be summed over other groups.

    Parameters
    ----------
    module : torch.nn.Module
        The same on all ranks of the group.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share it; None is the whole world.
    recurse : bool
        Whether parameters of modules within `module` are marked too.
    use_fp32_reduction : bool
        Sum floats narrower than 4 bytes in fp32 and round once; else in their own dtype.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    ArgumentError
        On every rank, if a parameter is marked already, and as :func:`replicate` does.
    DisagreementError
        On every rank, as :func:`replicate` does.
    GroupError
        If this rank is not in `group`.

    Notes
    -----
    Parameters and buffers get the values of the group's first rank. They are not checked instead:
    code that marks its layers as it makes them makes ranks equal only later, if each draws its own.
    Where they are equal already, nothing changes.

    What :func:`replicate` says of backward and of what it costs holds here. A parameter that is
    replicated over one dimension of a mesh may be marked over another.

    Communication: as :func:`replicate`.

    In one process: `module` as it is, and backward from the sum of the losses of all ranks.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import mark_module_as_shared
    >>> def fn(rank):
    ...     layer = mark_module_as_shared(torch.nn.Linear(1, 1, bias=False))
    ...     layer(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     return layer.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [3.0, 3.0]
    """
    set_up(
        "data_parallel.mark_module_as_shared",
        module,
        group,
        use_fp32=use_fp32_reduction,
        recurse=recurse,
        marked=True,
    )
    return module


def unmark_module_as_shared(module: Model, recurse: bool = True) -> Model:
    """Undo :func:`mark_module_as_shared` for parameters of a module, on all ranks of its group.

    Their gradients are this rank's own from then on, unless :func:`replicate` sums them.

    Parameters
    ----------
    module : torch.nn.Module
        Which was marked, or is within one that was.
    recurse : bool
        Whether parameters of modules within `module` are unmarked too.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    ArgumentError
        If a parameter is not marked, or gradients of backwards in :func:`no_sync` are yet to be
        summed. Nothing has changed then.

    Notes
    -----
    Communication: none.

    In one process: `module` as it is.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.data_parallel import mark_module_as_shared, unmark_module_as_shared
    >>> def fn(rank):
    ...     layer = mark_module_as_shared(torch.nn.Linear(1, 1, bias=False))
    ...     unmark_module_as_shared(layer)
    ...     layer(torch.full((1, 1), rank + 1.0)).sum().backward()
    ...     return layer.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [1.0, 2.0]
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "unmark_module_as_shared: module must be a torch.nn.Module; got "
            f"{type(module).__name__}."
        )
    leaving: dict[Replica, set[int]] = {}
    for name, parameter in module.named_parameters(recurse=recurse):
        marks = [replica for replica in replicas_of(parameter) if replica.options.marked]
        if not marks:
            raise ArgumentError(
                f"unmark_module_as_shared: parameter {name!r} is not marked as shared. Pass the "
                "module that was, or recurse=False if only its own parameters were."
            )
        (replica,) = marks
        index = next(i for i, own in enumerate(replica.parameters) if own is parameter)
        leaving.setdefault(replica, set()).add(index)
    for replica in leaving:
        if replica.unsummed.any():
            raise ArgumentError(
                "unmark_module_as_shared: gradients of a backward in no_sync have not been summed. "
                "Call backward() outside of no_sync, or zero_grad(), before."
            )
    for replica, indices in leaving.items():
        replica.leave_out(indices)
    return module
