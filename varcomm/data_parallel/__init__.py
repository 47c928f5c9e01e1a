"""Gradients over ranks: summed for all, or reduced onto pieces that ranks own."""

from varcomm.data_parallel.global_count import GlobalCount
from varcomm.data_parallel.no_sync import no_sync
from varcomm.data_parallel.replicate import replicate
from varcomm.data_parallel.sharded import ShardedGradients
from varcomm.data_parallel.shared import mark_module_as_shared, unmark_module_as_shared
from varcomm.data_parallel.sum_gradients import sum_gradients
from varcomm.data_parallel.sum_hook import sum_hook

__all__ = [
    "GlobalCount",
    "ShardedGradients",
    "mark_module_as_shared",
    "no_sync",
    "replicate",
    "sum_gradients",
    "sum_hook",
    "unmark_module_as_shared",
]
