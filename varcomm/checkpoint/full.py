"""``full_state_dict``: the whole state dict of a sharded model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from varcomm.checkpoint.index import Keys, nested
from varcomm.checkpoint.parts import Ranks
from varcomm.checkpoint.save import Piece, Plan, State, check_copies
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.digest import require_equal
from varcomm.ops.gather_v import gather_v
from varcomm.sharding.tied import named_tensors
from varcomm.sizes import checked_rank
from varcomm.transport.group import GroupLike
from varcomm.transport.serialization import decoded, dtype_of

_WHAT = "checkpoint.full_state_dict"


@torch.no_grad()
def full_state_dict(
    model: torch.nn.Module, dst: int | None = 0, group: GroupLike = None
) -> dict[str, Any]:
    """Gather the full state dict of a sharded model on one rank, or on all ranks.

    Collective: all ranks of `group` call it. Parameters of tensor-parallel layers, DTensors and
    parameters under ``fully_shard`` become full tensors. One process needs no torch.distributed.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters and buffers that are not sharded must be identical on all ranks.
    dst : int, optional
        Rank of `group` that gets the state dict; None means all ranks.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    dict
        The names of ``model.state_dict()`` with full tensors on the CPU; empty on other ranks.
        Names that share a parameter share its tensor. Unsharded tensors share the memory of the
        model, as in ``state_dict()``.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if `model` or `dst` is wrong, a tensor is on the meta device, shards leave
        gaps or overlap, or unsharded values differ between ranks.

    See Also
    --------
    export, save

    Notes
    -----
    Tensors are gathered one by one. At any time, `dst` holds at most one additional full tensor,
    and other ranks hold at most one additional shard.

    Communication: every shard is sent once to ``dst``, or to all ranks. Unsharded tensors are not
    sent. Three rounds of small messages compare the ranks first.

    In one process: ``model.state_dict()`` on the CPU.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.checkpoint import full_state_dict
    >>> from varcomm.tensor_parallel import ColumnParallelLinear
    >>> def fn(rank):
    ...     layer = ColumnParallelLinear(3, 5)
    ...     whole = full_state_dict(layer)
    ...     return {name: tuple(tensor.shape) for name, tensor in whole.items()}
    >>> varcomm.launch(fn, 2)
    [{'weight': (5, 3), 'bias': (5,)}, {}]
    """
    ranks = Ranks.of(group)

    def collect() -> State:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a Module; got {type(model).__name__}.")
        if dst is not None:
            checked_rank(dst, ranks.size, "dst")
        own = State(model, ranks)
        for _, (first, *others) in named_tensors(model):
            for name in others:
                own.common[name]["tied"] = first
        return own

    own, shared = ranks.agree(_WHAT, collect, lambda own: ({"dst": dst}, own.brief()))
    calls, briefs = zip(*shared, strict=True)
    require_equal(_WHAT, calls)
    plan = Plan.of(_WHAT, own, briefs, ranks)
    check_copies(_WHAT, own.tensors, plan, ranks)
    # Every rank gathers in sorted order, because state dicts of ranks may have other orders.
    gathered = {
        key: _gathered(entry, sorted(plan.boxes[key]), own, plan, dst, ranks)
        for key, entry in sorted(plan.entries.items())
        if "shape" in entry and "tied" not in entry
    }
    found: dict[Keys, Any] = {}
    for key, entry in plan.entries.items():
        is_tensor = "shape" in entry
        value = gathered[entry.get("tied", key)] if is_tensor else decoded(entry["value"])
        found[entry["path"]] = value
    whole: dict[str, Any] = nested(found)
    return whole if dst in (None, ranks.rank) else {}


def _gathered(
    entry: Mapping[str, Any],
    pieces: Sequence[Piece],
    own: State,
    plan: Plan,
    dst: int | None,
    ranks: Ranks,
) -> torch.Tensor | None:
    """Return a full tensor, or None on ranks that do not get it; collective."""
    shape, dtype = tuple(entry["shape"]), dtype_of(entry["dtype"])
    receiving = range(ranks.size) if dst is None else [dst]
    if not pieces:
        return torch.empty(shape, dtype=dtype)
    if len(pieces) == 1 and {*receiving} <= {*plan.holders[pieces[0]]}:
        return own.tensors[pieces[0]].cpu() if ranks.rank in receiving else None
    assert ranks.group is not None  # in one process the tensor is its only piece
    sent: list[list[Piece]] = [[] for _ in range(ranks.size)]
    for piece in pieces:
        able = plan.holders[piece]
        sent[dst if dst in able else able[0]].append(piece)
    device = ranks.group.device()
    flat = [own.tensors[piece].reshape(-1).to(device) for piece in sent[ranks.rank]]
    local = torch.cat([torch.empty(0, dtype=dtype, device=device), *flat])
    sizes = [sum(prod(piece[2]) for piece in some) for some in sent]
    group = ranks.group.process_group
    gathered: Any = (
        all_gather_v(local, sizes, group=group)
        if dst is None
        else gather_v(local, sizes, dst=dst, group=group)
    )
    if ranks.rank not in receiving:
        return None
    arrived = [piece for some in sent for piece in some]
    whole = torch.empty(shape, dtype=dtype)
    parts = gathered.cpu().split([prod(lengths) for _, _, lengths in arrived])
    for (_, offsets, lengths), part in zip(arrived, parts, strict=True):
        box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        whole[box] = part.view(lengths)
    return whole
