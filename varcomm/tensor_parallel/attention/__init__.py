"""Attention whose heads are sharded over ranks."""

from varcomm.tensor_parallel.attention.functional import attention, split_heads
from varcomm.tensor_parallel.attention.modules import ParallelAttention, Rotary

__all__ = ["ParallelAttention", "Rotary", "attention", "split_heads"]
