"""Embeddings whose table is sharded, by ids or by features, in shards of any sizes."""

from varcomm.tensor_parallel.embedding.functional import (
    feature_parallel_embedding,
    vocab_parallel_embedding,
)
from varcomm.tensor_parallel.embedding.modules import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
)

__all__ = [
    "FeatureParallelEmbedding",
    "VocabParallelEmbedding",
    "feature_parallel_embedding",
    "vocab_parallel_embedding",
]
