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

from varcomm.sharding import Sharded, shard_spec

__all__ = ["Piece", "chunks_of", "in_pieces", "is_whole", "piece_of", "wrapped"]


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
