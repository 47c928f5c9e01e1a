"""Parts of tensors on ranks: rows by ids, boxes, and values of each rank's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from varcomm.errors import ArgumentError, VarcommError
from varcomm.ops.packing import signed
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sharding import Box, Sharded, shard_spec
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.group import Group, GroupLike, resolve

T = TypeVar("T")


@dataclass(eq=False)
class RowsById:
    r"""Rows of a larger tensor by their ids, such as a field on the nodes of a partitioned graph.

    A checkpoint holds the full tensor in the order of ids, so ranks can load any other rows of the
    tensor.

    Attributes
    ----------
    tensor : torch.Tensor
        Shape (n, \*F): the rank's rows. Loading overwrites them.
    ids : torch.Tensor
        Shape (n,), integers in any order, such as ``graph.owned_ids``. A save needs every row on
        exactly one rank. A load accepts rows on several ranks or on none.
    total : int
        N, the rows of the full tensor.

    See Also
    --------
    save, load, PerRank

    Examples
    --------
    >>> import torch
    >>> from varcomm.checkpoint import RowsById
    >>> RowsById(torch.tensor([20.0, 0.0]), torch.tensor([2, 0]), total=3).shape
    (3,)
    """

    tensor: torch.Tensor
    ids: torch.Tensor
    total: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, *F) of the full tensor."""
        return (self.total, *self.tensor.shape[1:])


@dataclass(eq=False)
class PerRank:
    """A value that differs between ranks, such as a generator of random numbers.

    Rank r loads the value that rank r saved. Additional ranks keep their values, so that no two
    ranks draw the same random numbers.

    Attributes
    ----------
    value : object
        Any value of a state. Loading replaces a plain value.

    See Also
    --------
    save, load, RowsById

    Examples
    --------
    >>> import torch
    >>> from varcomm.checkpoint import PerRank
    >>> state = {"noise": PerRank(torch.Generator())}
    """

    value: Any


class Ranks:
    """The ranks of a group, or this process alone if torch.distributed is not initialized."""

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)

    @classmethod
    def of(cls, group: GroupLike) -> Ranks:
        """Resolve the `group` of a call."""
        initialized = dist.is_available() and dist.is_initialized()
        return cls(None if group is None and not initialized else resolve(group))

    def agree(
        self, what: str, local: Callable[[], T], public: Callable[[T], Any] = lambda value: value
    ) -> tuple[T, list[Any]]:
        """Return the result of `local` and ``public(result)`` of every rank, or raise on all."""
        if self.group is not None:
            return agree_and_share(what, local, public, self.group)
        try:
            value = local()
        except Exception as error:
            kind = type(error) if isinstance(error, VarcommError) else ArgumentError
            raise kind(f"{what}: {error}") from error
        return value, [public(value)]


def alone(what: str, local: Callable[[], T]) -> T:
    """Run `local` without other ranks; errors name the call."""
    return Ranks(None).agree(what, local)[0]


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is whole: no Sharded and no DTensor."""
    return not hasattr(tensor, "__create_chunk_list__")


def wrapped(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor, as Sharded if it, or the parameter that it is like, carries a mark.

    A field of a grid has its place with it.
    """
    if hasattr(tensor, "sharded"):
        return tensor.sharded()  # type: ignore[no-any-return]
    if not is_whole(tensor):
        return tensor
    spec = shard_spec(tensor if like is None else like)
    part = tensor.detach() if like is None else tensor
    return part if spec is None else Sharded.of(part, spec)


def boxes_of(key: str, tensor: Any) -> list[Box]:
    """Return the boxes of a tensor on this rank that are not empty, or raise ArgumentError."""
    if is_whole(tensor):
        return [Box((0,) * tensor.dim(), tensor.detach())] if tensor.numel() else []
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    if isinstance(tensor, Sharded):
        return list(tensor.boxes)
    chunks = tensor.__create_chunk_list__()
    parts = [tensor.__get_tensor_shard__(MetadataIndex(key, chunk.offsets)) for chunk in chunks]
    declared = [tuple(chunk.sizes) for chunk in chunks]
    found = [tuple(part.shape) for part in parts]
    if declared != found:
        raise ArgumentError(
            f"{key!r}, a tensor of shape {tuple(tensor.shape)}, declares boxes of shapes {declared}"
            f" on this rank, and has {found}. Use varcomm.sharding.Sharded for uneven shards."
        )
    pairs = zip(chunks, parts, strict=True)
    return [Box(tuple(chunk.offsets), part.detach()) for chunk, part in pairs if part.numel()]


def few(items: Sequence[str]) -> str:
    """Return the first five items for a message."""
    return f"{', '.join(items[:5])}{', ...' if len(items) > 5 else ''}"


def checked_rows(key: str, rows: RowsById) -> RowsById:
    """Return RowsById with int64 ids on the device of their tensor, or raise ArgumentError."""
    tensor, ids, total = rows.tensor, rows.ids, exact_int(rows.total)
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not is_whole(tensor):
        raise ArgumentError(f"{key!r}: tensor of RowsById must be a plain tensor with rows.")
    integers = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
    if total is None or not integers or ids.shape != tensor.shape[:1]:
        raise ArgumentError(
            f"{key!r}: ids of RowsById must be {len(tensor)} integers in a tensor, total an int; "
            f"got {ids!r} and {rows.total!r}."
        )
    if (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < total) or total < 0:
        raise ArgumentError(f"{key!r}: ids of RowsById must be 0 ... total - 1, of {total} rows.")
    return RowsById(tensor.detach(), ids.to(tensor.device, torch.int64), total)


def sorted_rows(what: str, key: str, rows: RowsById, ranks: Ranks) -> torch.Tensor:
    """Send RowsById to the ranks that write them, and return this rank's block; collective."""
    sizes = ShardSizes.balanced(rows.total, ranks.size)
    ids, tensor = rows.ids, signed(rows.tensor)
    if ranks.group is not None:
        owner = sizes.owner(ids)
        counts = owner.bincount(minlength=ranks.size).tolist()
        sent = owner.argsort(stable=True).split(counts)
        plan = ExchangePlan.from_indices(sent, len(ids), group=ranks.group.process_group)
        ids, tensor = plan(ids), plan(tensor)
    first = sizes.offsets[ranks.rank]

    def check() -> None:
        copies = (ids - first).bincount(minlength=sizes[ranks.rank])
        for row in (copies != 1).nonzero()[:1, 0].tolist():
            raise ArgumentError(
                f"{key!r}: row {first + row} of {rows.total} is given {int(copies[row])} times by "
                "all ranks together. The ids of RowsById must have each row once."
            )

    ranks.agree(what, check)
    block = torch.empty_like(tensor)
    block[ids - first] = tensor
    return block.view(rows.tensor.dtype)


def row_block(rows: RowsById, ranks: Ranks) -> tuple[Box, Callable[[], None]]:
    """Return a block to read, and the call that sends all blocks to the rows; collective."""
    sizes = ShardSizes.balanced(rows.total, ranks.size)
    block = rows.tensor.new_empty((sizes[ranks.rank], *rows.tensor.shape[1:]))
    order = rows.ids.argsort(stable=True)
    needed = rows.ids[order]
    plan = None
    if ranks.group is not None:
        plan = ExchangePlan.from_needed(needed, sizes, group=ranks.group.process_group)

    def send() -> None:
        read = signed(block)
        signed(rows.tensor)[order] = read[needed] if plan is None else plan(read)

    return Box((sizes.offsets[ranks.rank], *(0,) * (block.dim() - 1)), block), send
