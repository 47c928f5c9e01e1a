"""Gradients and optimizer states of which each rank owns an uneven piece."""

from varcomm.data_parallel.sharded.sharded_gradients import ShardedGradients
from varcomm.data_parallel.sharded.shard import Piece

__all__ = ["Piece", "ShardedGradients"]
