"""Which boxes of a tensor this rank has: of a plain one all, of others those that they tell of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from varcomm.errors import ArgumentError
from varcomm.sharding import Sharded, shard_spec
from varcomm.transport.serialization import travels

__all__ = [
    "Piece",
    "check_parts",
    "check_target",
    "chunks_of",
    "in_pieces",
    "is_whole",
    "piece_of",
    "wrapped",
]


@travels
@dataclass(frozen=True, order=True)
class Piece:
    """A box of a tensor, or a plain value: what is written once.

    Attributes
    ----------
    key : str
    offsets, sizes : tuple of int or None
        Where the box is; None of a plain value.
    """

    key: str
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def index(self) -> MetadataIndex:
        """By which torch knows it."""
        return MetadataIndex(self.key, self.offsets)

    def item(self, dtype: torch.dtype | None, shape: tuple[int, ...]) -> WriteItem:
        """Return how torch plans to write it."""
        if self.offsets is None or self.sizes is None or dtype is None:
            return WriteItem(self.index, WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        whole = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=whole)


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or what tells of which part of the whole it is where a mark says so."""
    if not is_whole(tensor):
        return tensor
    spec = shard_spec(tensor)
    return tensor.detach() if spec is None else Sharded.of(tensor.detach(), spec)


def is_whole(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is all of itself, rather than a part that tells which."""
    return not hasattr(tensor, "__create_chunk_list__")


def chunks_of(tensor: Any) -> list[ChunkStorageMetadata]:
    """Return the boxes of a tensor that this rank has, as torch describes them."""
    if is_whole(tensor):
        return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    return tensor.__create_chunk_list__()  # type: ignore[no-any-return]


def in_pieces(key: str, tensor: torch.Tensor) -> list[Piece]:
    """Return the boxes of a tensor that this rank has and that are not empty."""
    return [
        Piece(key, tuple(chunk.offsets), tuple(chunk.sizes))
        for chunk in chunks_of(tensor)
        if prod(chunk.sizes)
    ]


def piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return what is in a box."""
    return find_tensor_shard(tensor, piece.index).detach()


def check_parts(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what is in all boxes of a tensor that this rank has, or raise ArgumentError.

    A DTensor that was made of whatever each rank has tells of boxes as if they were even.
    """
    pieces = in_pieces(key, tensor)
    parts = [piece_of(tensor, piece) for piece in pieces]
    told, found = [piece.sizes for piece in pieces], [tuple(part.shape) for part in parts]
    if isinstance(tensor, DTensor) and not pieces and tensor.to_local().numel():
        found = [tuple(tensor.to_local().shape)]
    if told != found:
        raise ArgumentError(
            f"{key!r} tells that of a tensor of shape {tuple(tensor.shape)} this rank has boxes of "
            f"shapes {told}, and has {found}. A DTensor cannot tell of other shards than even "
            "ones; varcomm.sharding.Sharded can."
        )
    return parts


def check_target(key: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a tensor cannot be loaded into."""
    if tensor.is_meta:
        raise ArgumentError(
            f"{key!r} is on the meta device, where nothing can be loaded to. Call "
            "to_empty(device=...) before."
        )
    for part in [tensor] if is_whole(tensor) else check_parts(key, tensor):
        if part.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{key!r} was made in inference mode, and can be overwritten only there. Load into "
                "its clone()."
            )
        steps = zip(part.shape, part.stride(), strict=True)
        if part.numel() and any(size > 1 and step == 0 for size, step in steps):
            raise ArgumentError(
                f"{key!r} is an expanded tensor, several elements of which are one in memory: "
                f"shape {tuple(part.shape)}, strides {part.stride()}. Load into its clone()."
            )
