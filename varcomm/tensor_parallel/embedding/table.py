"""What layers with a sharded table share: how they are made, from nn.Embedding and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.digest import digest
from varcomm.sharding import ShardSpec, mark
from varcomm.sizes import ShardSizes, checked_sizes, exact_int
from varcomm.tensor_parallel.agreement import agree_on_layer, module_seed
from varcomm.tensor_parallel.embedding.checks import checked_padding
from varcomm.tensor_parallel.initial import Fill, check_fill, initialised
from varcomm.tensor_parallel.replaced import check_plain
from varcomm.tensor_parallel.sharding import ShardedModule
from varcomm.transport.agreement import agree
from varcomm.transport.group import GroupLike, resolve

__all__ = ["ShardedTable"]


def _normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


class ShardedTable(ShardedModule):
    """A table of embeddings that is sharded along one of its dimensions."""

    def _set_up(
        self,
        dim: int,
        shape: tuple[int, int],
        sizes: Sequence[int] | None,
        padding_idx: int | None,
        max_norm: float | None,
        init: Fill | None,
        group: GroupLike,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Agree on the arguments, make the weight, and return the checked `options`."""
        ranks, words = resolve(group), ("num_embeddings", "embedding_dim")

        def arguments() -> dict[str, Any]:
            checked: dict[str, Any] = {}
            for word, value in zip(words, shape, strict=True):
                checked[word] = exact_int(value)
                if checked[word] is None or value < 0:
                    raise ArgumentError(f"{word} must be an int, not negative; got {value!r}.")
            if max_norm is not None:
                raise ArgumentError(
                    "max_norm is not for a sharded table: it would overwrite rows while they are "
                    "looked up, behind the back of autograd. Normalise the result, or the rows of "
                    "the weight after the optimizer's step."
                )
            total = checked[words[dim]]
            plain = ShardSizes.balanced(total, ranks.size)
            if sizes is not None:
                plain = ShardSizes(checked_sizes(sizes, "sizes", ranks.size))
            if plain.total != total:
                raise ArgumentError(
                    f"sizes {list(plain)} sum to {plain.total}, but {words[dim]} is {total}."
                )
            checked["padding_idx"] = checked_padding(padding_idx, checked[words[0]], "")
            check_fill(init)
            checked |= {"an init": init is not None, "dtype": dtype}
            return {**checked, "sizes": plain, **options(ranks.size)}

        name = type(self).__name__
        checked, seed = agree_on_layer(name, arguments, ranks)
        self.num_embeddings: int = checked["num_embeddings"]
        self.embedding_dim: int = checked["embedding_dim"]
        self.padding_idx: int | None = checked["padding_idx"]
        self.init = _normal if init is None else init
        self.spec = ShardSpec(ranks, dim, (checked["sizes"],))
        # a device may be missing on one rank, or full, and `init` is the user's
        own = agree(name, lambda: torch.nn.Parameter(self._drawn(seed, dtype, device)), ranks)
        self.weight = mark(own, self.spec)
        return checked

    def _drawn(
        self, seed: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> torch.Tensor:
        shape = (self.num_embeddings, self.embedding_dim)
        values = initialised(shape, self.spec, self.init, seed, dtype, device)
        own = range(self.num_embeddings)
        if self.spec.dim == 0:
            own = self.spec.blocks[0].range(self.spec.group.rank)
        if self.padding_idx is not None and self.padding_idx in own:
            values[own.index(self.padding_idx)] = 0
        return values

    def reset_parameters(self) -> None:
        """Draw the weight anew, with a seed that the ranks agree on; collective."""
        seed = module_seed(self.spec.group.process_group)
        with torch.no_grad():
            self.weight.copy_(self._drawn(seed, self.weight.dtype, self.weight.device))

    @property
    def sizes(self) -> ShardSizes:
        """How many ids, or columns, each rank has."""
        return self.spec.blocks[0]

    @classmethod
    def _of(
        cls, embedding: torch.nn.Embedding, group: GroupLike, make: Callable[..., Self]
    ) -> Self:
        """Agree that all ranks have the same embedding, and make a layer with its part of it."""

        def arguments() -> dict[str, Any]:
            check_plain(embedding, torch.nn.Embedding, "embedding")
            refused = [
                word
                for word in ("max_norm", "scale_grad_by_freq", "sparse")
                if getattr(embedding, word)
            ]
            if refused:
                raise ArgumentError(f"a sharded table has no {' and no '.join(refused)}.")
            return {"weight": digest(embedding.weight), "padding_idx": embedding.padding_idx}

        # nothing random is made here, so the caller's generator stays where it is
        with torch.random.fork_rng(devices=[]):
            agree_on_layer(f"{cls.__name__}.from_embedding", arguments, resolve(group))
            layer = make(
                embedding.num_embeddings,
                embedding.embedding_dim,
                padding_idx=embedding.padding_idx,
                group=group,
                device="meta",
                dtype=embedding.weight.dtype,
            )
        own = layer.spec.shard(embedding.weight.detach())
        layer.weight = mark(torch.nn.Parameter(own, embedding.weight.requires_grad), layer.spec)
        return layer.train(embedding.training)

    def to_embedding(self) -> torch.nn.Embedding:
        """Return the whole table as a torch.nn.Embedding, on every rank; collective."""
        whole = self.spec.gather(self.weight.detach())
        embedding: torch.nn.Embedding = torch.nn.Embedding.from_pretrained(
            whole, freeze=not self.weight.requires_grad, padding_idx=self.padding_idx
        )
        return embedding.train(self.training)

    def extra_repr(self) -> str:
        """Return the sizes of the whole, and those of the shards."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, sizes={list(self.sizes)}{padding}"
