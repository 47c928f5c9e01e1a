"""Gradients and optimizer states of which each rank owns an uneven piece."""

from varcomm.data_parallel.sharded.shard import Piece
from varcomm.data_parallel.sharded.sharded_gradients import ShardedGradients

__all__ = ["Piece", "ShardedGradients"]
