"""From one layout to another: what tensor-parallel layers do between their matrix products.

A tensor is *replicated* (every rank has a copy of one value), *sharded* (each has its own rows) or
*partial* (the value is the sum over ranks). A mapping is exact under the assumption in the first
line of its docstring; nobody looks whether it holds. Derivatives are of any order.
"""

from varcomm.tensor_parallel.mappings.all_to_all import (
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
)
from varcomm.tensor_parallel.mappings.sequence import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from varcomm.tensor_parallel.mappings.tensor import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
