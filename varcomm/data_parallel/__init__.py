"""Gradients over ranks: summed for all, or reduced onto pieces that ranks own."""

from varcomm.data_parallel.global_count import GlobalCount
from varcomm.data_parallel.sharded import ShardedGradients
from varcomm.data_parallel.sum_gradients import sum_gradients
from varcomm.data_parallel.sum_hook import sum_hook

__all__ = ["GlobalCount", "ShardedGradients", "sum_gradients", "sum_hook"]
