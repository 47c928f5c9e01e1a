"""Linear layers whose weight is sharded over ranks, along its outputs or its inputs."""

from varcomm.tensor_parallel.linear.functional import column_parallel_linear, row_parallel_linear
from varcomm.tensor_parallel.linear.modules import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linear",
    "row_parallel_linear",
]
