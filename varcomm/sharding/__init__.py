"""Tensors of which each rank has a part, whatever it is that splits them."""

from varcomm.sharding.sharded import Box, Sharded
from varcomm.sharding.spec import ShardSpec, mark, shard_spec

__all__ = ["Box", "ShardSpec", "Sharded", "mark", "shard_spec"]
