"""GPT: a small decoder transformer that runs in one process, or sharded over ranks.

Plain modules: RMSNorm [1]_ before each layer, grouped-query attention [2]_ with rotary embeddings
[3]_, SwiGLU [4]_. ``parallelize`` replaces them with parallel modules that the same code calls.

.. [1] B. Zhang and R. Sennrich, "Root mean square layer normalization", 2019,
   https://arxiv.org/abs/1910.07467
.. [2] J. Ainslie et al., "GQA: Training generalized multi-query transformer models from multi-head
   checkpoints", 2023, https://arxiv.org/abs/2305.13245
.. [3] J. Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021,
   https://arxiv.org/abs/2104.09864
.. [4] N. Shazeer, "GLU variants improve transformer", 2020, https://arxiv.org/abs/2002.05202
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    sequence_parallel,
    vocab_parallel_cross_entropy,
)
from varcomm.tensor_parallel.attention import attention, split_heads
from varcomm.transport.group import GroupLike

from .generation import generate
from .sizes import agreed_sizes, check_sizes

EPS = 1e-5  # of the norms
Turn = Callable[[Tensor], Tensor]


def rotary(length: int, head_dim: int, like: Tensor, base: float = 10_000.0) -> Turn:
    """Return a rotation of heads ``(S, *F, heads, head_dim)`` by angles proportional to the place.

    The product of a rotated query and a rotated key depends only on the distance between their
    places. Feature ``i`` of the first half and of the second half are rotated together.

    Examples
    --------
    >>> turn = rotary(2, 2, torch.zeros(()))
    >>> turn(torch.tensor([1.0, 0.0]).expand(2, 1, 2))
    tensor([[[1.0000, 0.0000]],
    <BLANKLINE>
            [[0.5403, 0.8415]]])
    """
    half = torch.arange(head_dim // 2, dtype=torch.float64, device=like.device)
    places = torch.arange(length, dtype=torch.float64, device=like.device)
    angles = torch.outer(places, base ** (-2 * half / head_dim))
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def turn(x: Tensor) -> Tensor:
        shape = (length, *[1] * (x.dim() - 2), head_dim // 2)
        c, s = cos.view(shape), sin.view(shape)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * c - second * s, first * s + second * c], dim=-1)

    return turn


class Attention(nn.Module):
    """Causal grouped-query attention: each head of keys serves several heads of queries."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.queries_per_key = hidden_size // num_heads, num_heads // num_kv_heads
        width = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(hidden_size, width, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """Update tokens, (S, *F, H); between the two layers, this rank has its own heads only."""
        query, key, value = split_heads(self.qkv(x), self.head_dim, self.queries_per_key)
        read = attention(turn(query), turn(key), value)
        return cast(Tensor, self.out(read.flatten(-2)))


class SwiGLU(nn.Module):
    """Two layers with a gate between them."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Update tokens, (S, *F, H); each rank has its parts of gate and up side by side."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return cast(Tensor, self.down(functional.silu(gate) * up))


class Block(nn.Module):
    """Attention and SwiGLU with residual connections, each after a norm."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, mlp_size: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=EPS)
        self.attention = Attention(hidden_size, num_heads, num_kv_heads)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=EPS)
        self.mlp = SwiGLU(hidden_size, mlp_size)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """Update tokens, (S, *F, H), or this rank's part of the sequence."""
        x = x + self.attention(self.attention_norm(x), turn)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Predict each token of a text from the tokens before it.

    The sequence is the first dimension: ids are ``(S, *F)``, with any number of batch dimensions.

    Parameters
    ----------
    vocab_size : int
        Number of tokens ``V``.
    hidden_size : int
        Features ``H`` per token: `num_heads` times an even number.
    num_layers : int
        Number of blocks.
    num_heads : int
        Heads of queries, a divisor of `hidden_size`.
    num_kv_heads : int, optional
        Heads of keys and values, a divisor of `num_heads`; None means `num_heads`.
    mlp_size : int, optional
        Features between the layers of each SwiGLU; None means ``8 / 3 * hidden_size``.
    tied : bool
        Whether the head and the embedding share one weight.
    recompute : bool
        Store only the input of each block, and recompute everything else in backward.

    Raises
    ------
    ArgumentError
        If `num_heads` does not divide `hidden_size`, `num_kv_heads` does not divide `num_heads`, or
        a size is not positive; `num_layers` may be 0.

    See Also
    --------
    varcomm.tensor_parallel.parallelize, varcomm.models.generation.generate

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.models import GPT
    >>> from varcomm.tensor_parallel import parallelize
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     model = GPT(131, 40, num_layers=1, num_heads=5).double()
    ...     text = torch.randint(131, (8,))
    ...     alone = model.loss(text[:-1], text[1:])
    ...     parallelize(model, model.tensor_parallel_plan())
    ...     return torch.allclose(model.loss(text[:-1], text[1:]), alone)
    >>> varcomm.launch(fn, 3)
    [True, True, True]
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        mlp_size: int | None = None,
        tied: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes("GPT", vocab_size=vocab_size, hidden_size=hidden_size)
        check_sizes("GPT", least=0, num_layers=num_layers)
        mlp_size = 8 * hidden_size // 3 if mlp_size is None else mlp_size
        check_sizes("GPT", num_heads=num_heads, num_kv_heads=kv_heads, mlp_size=mlp_size)
        if hidden_size % (2 * num_heads) or num_heads % kv_heads:
            raise ArgumentError(
                f"GPT: hidden_size {hidden_size} must be an even number for each of {num_heads} "
                f"heads, and num_kv_heads {kv_heads} a divisor of their number."
            )
        self.head_dim, self.queries_per_key = hidden_size // num_heads, num_heads // kv_heads
        self.kv_heads, self.mlp_size, self.recompute = kv_heads, mlp_size, recompute
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, kv_heads, mlp_size) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=EPS)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=hidden_size**-0.5)  # logits of the order of 1
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens, (S, *F, V); `ids` are identical on all ranks.

        If the model is sharded, the result has this rank's part of the vocabulary for the full
        sequence.
        """
        return cast(Tensor, self.head(self.hidden(ids)))

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the input of the head: (S, *F, H), or this rank's part of the sequence."""
        x = self.embedding(ids)
        turn = rotary(len(ids), self.head_dim, x)
        for block in self.blocks:
            x = checkpoint(block, x, turn) if self.recompute else block(x, turn)
        return cast(Tensor, self.norm(x))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, replicated: each rank calls ``backward`` on its own copy.

        `targets` are the next tokens of `ids`, int64 of the same shape (S, *F) and identical on all
        ranks. Targets of -100 are ignored.
        """
        logits = self(ids)
        if not isinstance(self.head, ColumnParallelLinear):
            return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        options = {"sizes": self.head.spec.sizes, "group": self.head.group.process_group}
        return vocab_parallel_cross_entropy(logits, targets, reduction="mean", **options)

    def tensor_parallel_plan(
        self,
        sequence_sizes: Sequence[int] | None = None,
        group: GroupLike = None,
        *,
        head_sizes: Sequence[int] | None = None,
        mlp_sizes: Sequence[int] | None = None,
        vocab_sizes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the sharding plan for ``parallelize(model, plan, group=group)``; collective.

        Sizes have one int per rank; zeros are allowed. None means balanced sizes.

        Parameters
        ----------
        sequence_sizes : sequence of int, optional
            Places of the sequence per rank, between layers (sequence parallelism). All ids must
            then have ``sum(sequence_sizes)`` places.
        group : ProcessGroup or DeviceMesh, optional
            The ranks that share the model; None means the whole world.
        head_sizes : sequence of int, optional
            Heads of keys and values per rank, with the heads of queries that they serve.
        mlp_sizes : sequence of int, optional
            Features between the layers of each SwiGLU.
        vocab_sizes : sequence of int, optional
            Rows of embedding and head.

        Raises
        ------
        ArgumentError
            On every rank, if the sizes of one rank do not match the model.
        """
        wholes = {
            "head_sizes": (head_sizes, self.kv_heads),
            "mlp_sizes": (mlp_sizes, self.mlp_size),
            "vocab_sizes": (vocab_sizes, self.embedding.num_embeddings),
        }
        heads, features, tokens = agreed_sizes("GPT.tensor_parallel_plan", wholes, group)
        keys = heads * self.head_dim
        queries = keys * self.queries_per_key
        options: dict[str, Any] = {"sequence_sizes": sequence_sizes, "group": group}
        column = partial(ColumnParallelLinear.from_linear, **options)
        row = partial(RowParallelLinear.from_linear, **options)
        plan = {
            "embedding": partial(VocabParallelEmbedding.from_embedding, sizes=tokens, **options),
            "blocks.*.attention.qkv": partial(column, sizes=[queries, keys, keys]),
            "blocks.*.attention.out": partial(row, sizes=queries),
            "blocks.*.mlp.gate_up": partial(column, sizes=[features, features]),
            "blocks.*.mlp.down": partial(row, sizes=features),
            "head": partial(column, sizes=tokens),
        }
        norm = {} if sequence_sizes is None else {"*norm": partial(sequence_parallel, group=group)}
        return plan | norm

    def generate(
        self,
        ids: Tensor,
        steps: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        context: int | None = None,
    ) -> Tensor:
        """Append `steps` tokens to `ids`, (S, *F): (S + steps, *F), identical on all ranks.

        :func:`varcomm.models.generation.generate` describes the arguments.
        """
        return generate(self, ids, steps, temperature, generator, context)
