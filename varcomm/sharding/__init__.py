"""Tensors of which each rank has a part, for any way to split them."""

from varcomm.sharding.dtensor import from_dtensor, to_dtensor
from varcomm.sharding.sharded import Box, Sharded
from varcomm.sharding.spec import ShardSpec, mark, shard_spec

__all__ = [
    "Box",
    "ShardSpec",
    "Sharded",
    "from_dtensor",
    "mark",
    "shard_spec",
    "to_dtensor",
]
