"""Linear layers whose weight is sharded over ranks, along its outputs or its inputs."""

from varcomm.tensor_parallel.linear.functional import column_parallel_linear, row_parallel_linear

__all__ = ["column_parallel_linear", "row_parallel_linear"]
