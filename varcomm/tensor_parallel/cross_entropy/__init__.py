"""Cross entropy over a vocabulary that is sharded, from logits or from what they are made of.

Each rank turns its own columns into three numbers a token (:mod:`.statistics`), a few rows at a
time (:mod:`.row_map`); these travel, and every rank makes the loss of them (:mod:`.loss`).
"""

from varcomm.tensor_parallel.cross_entropy.linear import linear_cross_entropy
from varcomm.tensor_parallel.cross_entropy.vocab_parallel import vocab_parallel_cross_entropy

__all__ = ["linear_cross_entropy", "vocab_parallel_cross_entropy"]
