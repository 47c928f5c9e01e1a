"""Tensor-parallel layers for shards of any sizes: linears, embedding, cross entropy."""

from varcomm.sharding import ShardSpec, shard_spec
from varcomm.tensor_parallel import mappings
from varcomm.tensor_parallel.attention import ParallelAttention, attention, split_heads
from varcomm.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint
from varcomm.tensor_parallel.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from varcomm.tensor_parallel.data import broadcast_data
from varcomm.tensor_parallel.embedding import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
    feature_parallel_embedding,
    vocab_parallel_embedding,
)
from varcomm.tensor_parallel.gradients import clip_grad_norm_, grad_norm
from varcomm.tensor_parallel.layout import param_is_not_tensor_parallel_duplicate
from varcomm.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    row_parallel_linear,
)
from varcomm.tensor_parallel.mappings import *  # noqa: F403
from varcomm.tensor_parallel.mappings import split_tensor_along_last_dim, vocab_range
from varcomm.tensor_parallel.parallelize import parallelize, sequence_parallel
from varcomm.tensor_parallel.random import RandomStreams

__all__ = [
    "CheckpointWithoutOutput",
    "ColumnParallelLinear",
    "FeatureParallelEmbedding",
    "ParallelAttention",
    "RandomStreams",
    "RowParallelLinear",
    "ShardSpec",
    "VocabParallelEmbedding",
    "attention",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm_",
    "column_parallel_linear",
    "feature_parallel_embedding",
    "grad_norm",
    "linear_cross_entropy",
    "parallelize",
    "param_is_not_tensor_parallel_duplicate",
    "row_parallel_linear",
    "sequence_parallel",
    "shard_spec",
    "split_heads",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_range",
]
__all__ += mappings.__all__
