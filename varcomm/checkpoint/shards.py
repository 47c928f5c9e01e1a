"""Boxes of tensors on this rank, and Rows as blocks of the full tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from varcomm.checkpoint.annotations import Rows
from varcomm.checkpoint.ranks import Ranks
from varcomm.errors import ArgumentError
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sharding import Box, Sharded, shard_spec
from varcomm.sizes import ShardSizes

__all__ = [
    "RowFetch",
    "block_of",
    "boxes_of",
    "check_parts",
    "check_target",
    "is_whole",
    "sorted_rows",
    "wrapped",
]

# torch can neither index nor send the first; the second have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of itself: neither Sharded nor DTensor."""
    return not hasattr(tensor, "__create_chunk_list__")


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, as Sharded if it carries a mark."""
    if not is_whole(tensor):
        return tensor
    spec = shard_spec(tensor)
    return tensor.detach() if spec is None else Sharded.of(tensor.detach(), spec)


def boxes_of(key: str, tensor: torch.Tensor) -> list[Box]:
    """Return the boxes of a tensor on this rank that are not empty."""
    return [box for _, box in _declared(key, tensor) if box.tensor.numel()]


def _declared(key: str, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], Box]]:
    """Return each box with the shape that the tensor declares for it."""
    if is_whole(tensor):
        return [(tuple(tensor.shape), Box((0,) * tensor.dim(), tensor.detach()))]
    if isinstance(tensor, Sharded):
        return [(tuple(box.tensor.shape), box) for box in tensor.boxes]
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    found = []
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        part = tensor.__get_tensor_shard__(MetadataIndex(key, chunk.offsets))  # type: ignore[attr-defined]
        found.append((tuple(chunk.sizes), Box(tuple(chunk.offsets), part.detach())))
    return found


def check_parts(key: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a DTensor has other shards than it declares."""
    declared = _declared(key, tensor)
    sizes = [shape for shape, _ in declared]
    found = [tuple(box.tensor.shape) for _, box in declared]
    if sizes != found:
        raise ArgumentError(
            f"{key!r}, a tensor of shape {tuple(tensor.shape)}, declares boxes of shapes {sizes} "
            f"on this rank, and has {found}. A DTensor has only torch's even shards; use "
            "varcomm.sharding.Sharded for others."
        )


def check_target(key: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a tensor cannot be loaded into."""
    if tensor.is_meta:
        raise ArgumentError(
            f"{key!r} is on the meta device and has no memory. Call to_empty(device=...) first."
        )
    check_parts(key, tensor)
    for box in boxes_of(key, tensor):
        part = box.tensor
        if part.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{key!r} was made in inference mode and can be overwritten only there. Load into "
                "its clone()."
            )
        if any(n > 1 and step == 0 for n, step in zip(part.shape, part.stride(), strict=True)):
            raise ArgumentError(
                f"{key!r} is an expanded tensor, of shape {tuple(part.shape)} and strides "
                f"{part.stride()}: several elements share memory. Load into its clone()."
            )


def block_of(total: int, rank: int, ranks: int) -> range:
    """Return the rows of a full tensor that a rank reads or writes for :class:`Rows`."""
    return ShardSizes.balanced(total, ranks).range(rank)


def sorted_rows(what: str, key: str, rows: Rows, ranks: Ranks) -> Sharded:
    """Send Rows to the ranks that write them, and return this rank's block; collective.

    Raises
    ------
    ArgumentError
        On every rank, if a row is on no rank or on several.
    """
    block = block_of(rows.total, ranks.rank, ranks.size)
    ids, tensor = rows.ids, _movable(rows.tensor)
    if ranks.group is not None:
        owner = ShardSizes.balanced(rows.total, ranks.size).owner(ids)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=ranks.size).tolist()
        group = ranks.group.process_group
        plan = ExchangePlan.from_indices(order.split(counts), len(ids), group=group)
        with torch.no_grad():
            ids, tensor = plan(ids), plan(tensor)

    def check() -> None:
        copies = (ids - block.start).bincount(minlength=len(block))
        if bool((copies != 1).any()):
            row = int((copies != 1).nonzero()[0])
            raise ArgumentError(
                f"{key!r}: row {block.start + row} of {rows.total} is given {int(copies[row])} "
                "times by all ranks together. The ids of Rows must have each row once."
            )

    ranks.agree(what, check)
    full = torch.empty_like(tensor)
    full[ids - block.start] = tensor
    return _as_block(rows, block, full.view(rows.tensor.dtype))


class RowFetch:
    """Rows that each rank reads as one block and then sends to the ranks that need them."""

    def __init__(self, rows: Rows, ranks: Ranks) -> None:
        self._rows = rows
        block = block_of(rows.total, ranks.rank, ranks.size)
        self._order = rows.ids.argsort(stable=True)
        self._plan = None
        if ranks.group is not None:
            sizes = ShardSizes.balanced(rows.total, ranks.size)
            needed, group = rows.ids[self._order], ranks.group.process_group
            self._plan = ExchangePlan.from_needed(needed, sizes, group=group)
        self._block = rows.tensor.new_empty((len(block), *rows.tensor.shape[1:]))
        self.target = _as_block(rows, block, self._block)

    def finish(self) -> None:
        """Send the rows that have been read into `target`; collective."""
        block, target = _movable(self._block), _movable(self._rows.tensor)
        with torch.no_grad():
            if self._plan is None:
                target.copy_(block[self._rows.ids])
            else:
                target[self._order] = self._plan(block)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def _as_block(rows: Rows, block: Sequence[int], tensor: torch.Tensor) -> Sharded:
    shape = (rows.total, *rows.tensor.shape[1:])
    at = (block[0] if block else 0, *(0,) * (len(shape) - 1))
    return Sharded(shape, [Box(at, tensor)] if len(block) else [], tensor.dtype)
