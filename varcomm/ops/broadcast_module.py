"""``broadcast_module``: all ranks get the parameters and buffers of one rank's model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.broadcast import Broadcast
from varcomm.ops.checks import checked_tensor, is_sharded_over
from varcomm.ops.digest import differing
from varcomm.ops.handle import apply
from varcomm.sizes import checked_rank
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, GroupLike, resolve


def broadcast_module(model: torch.nn.Module, src: int = 0, group: GroupLike = None) -> None:
    """Copy the parameters and buffers of one rank to every rank, in place; collective.

    Use this function after one rank has read a checkpoint, or after an initialisation without a
    seed.

    Parameters
    ----------
    model : torch.nn.Module
        The same structure on every rank. Tied parameters stay tied, and gradients do not change.
    src : int
        The rank, within `group`, whose values count.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Raises
    ------
    ArgumentError
        On every rank, if `model` or `src` is wrong on one rank, or if a parameter is not
        initialised, or is sharded over these ranks.
    DisagreementError
        On every rank, before any value changes, if names, shapes, dtypes or ties differ.

    See Also
    --------
    broadcast, varcomm.data_parallel.sum_gradients

    Notes
    -----
    Adjoint: none; values are overwritten in place.

    Communication: the bytes of the model, in a message per tensor.

    In one process: nothing.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     torch.manual_seed(rank)
    ...     layer = torch.nn.Linear(1, 1)
    ...     varcomm.broadcast_module(layer)
    ...     return layer.weight.item()
    >>> len(set(varcomm.launch(fn, 2)))
    1
    """
    what, ranks = "broadcast_module", resolve(group)
    tensors: dict[str, torch.Tensor] = {}

    def structure() -> dict[str, object]:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
        root = checked_rank(src, ranks.size, "src")
        named: dict[str, torch.Tensor] = {}
        named.update(model.named_parameters(remove_duplicate=False))
        named.update(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        found: dict[str, object] = {"the argument src": root}
        for name, tensor in sorted(named.items()):  # ranks may register them in another order
            is_lazy = torch.nn.parameter.is_lazy(tensor)
            if is_lazy or tensor.is_meta or tensor.layout != torch.strided:
                raise ArgumentError(
                    f"{name} is not initialised, or sparse. Call the model once, or to_empty."
                )
            checked_tensor(tensor, "", name)
            if is_sharded_over(tensor, ranks):
                raise ArgumentError(
                    f"{name} is this rank's shard, which the shard of rank {root} would replace. "
                    "Call broadcast_module before the model is sharded, or pass the data-parallel "
                    "group."
                )
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            if tensor.is_inference() or any(n > 1 and step == 0 for n, step in strides):
                raise ArgumentError(f"{name} is expanded, or made in inference mode. Clone it.")
            tied = first.setdefault(id(tensor), name)
            if tied == name:
                tensors[name] = tensor
            found[name] = str(tensor.dtype), tuple(tensor.shape), tied
        return found

    others, names = differing(share(what, structure, ranks))
    if others:
        raise DisagreementError(
            f"{what}: ranks {others} differ from rank 0 in {', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}. Pass the same model and src on all ranks."
        )
    overwrite(tensors.values(), src, ranks)


@torch.no_grad()
def overwrite(tensors: Iterable[torch.Tensor], src: int, group: Group) -> None:
    """Overwrite tensors on every rank with those of one rank; collective."""
    for tensor in tensors:
        operator = Broadcast(group, src, tuple(tensor.shape), (0,), use_fp32=True)
        tensor.copy_(apply(operator, tensor.detach()))
