"""Parallel forms of modules of transformers that are not torch's Linear or Embedding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.sharding import ShardSpec
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from varcomm.tensor_parallel.layout import (
    AFTER,
    MarkedModule,
    Sizes,
    agreed,
    digests,
    in_log,
    lost_state,
)
from varcomm.tensor_parallel.linear import column_parallel_linear, row_parallel_linear
from varcomm.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from varcomm.transport.agreement import agree
from varcomm.transport.group import GroupLike, resolve


class _Shards(MarkedModule):
    """Module with the parameters of another, some as this rank's part; made collectively.

    `shards` are sizes and dimensions of the sharded parameters, by name.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, layer: nn.Module, group: GroupLike, **shards: tuple[Sizes, int]) -> None:
        def check() -> dict[str, Any]:
            _refuse_hooks(layer)
            return digests(layer)

        super().__init__()
        self.group = resolve(group)
        self._specs = {name: ShardSpec.of(*how, group) for name, how in shards.items()}
        agreed(f"a sharded {type(layer).__name__}", check, self.group)
        self._in_log = in_log(self, self.group)
        self._keep_parts(layer)


def _refuse_hooks(layer: nn.Module) -> None:
    if hooks := [key for key in lost_state(layer) if "hooks" in key]:
        raise ArgumentError(
            f"{type(layer).__name__} has hooks ({hooks}), which would be lost. Remove them, and "
            f"add them to the sharded model. {AFTER}"
        )


class Conv1DColumn(_Shards):
    """Column-parallel linear of GPT-2, whose weight is (in, out).

    A rank without heads has `padding` outputs, zeros, so that the model can split them; the row
    layer that follows drops them.
    """

    def __init__(self, layer: nn.Module, group: GroupLike, blocks: Sizes, padding: int = 0) -> None:
        super().__init__(layer, group, weight=(blocks, 1), bias=(blocks, 0))
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or `padding` zeros."""
        pg = self.group.process_group
        y = column_parallel_linear(x, self.weight.mT, self.bias, group=pg)
        return y if y.shape[-1] else functional.pad(y, (0, self.padding))


class Conv1DRow(_Shards):
    """Row-parallel linear of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for this rank's inputs, and padding after them."""
        pg, weight = self.group.process_group, self.weight
        return row_parallel_linear(x[..., : weight.shape[0]], weight.mT, self.bias, group=pg)


class HeadTable(FeatureParallelEmbedding):
    """Table of T5's position biases, with the columns of this rank's heads."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the biases of this rank's heads."""
        return functional.embedding(ids, self.weight)


# Rows of multiples of 8 features are multiples of 16 bytes, as torch's grouped products require.
_UNIT = 8


def _of_any_width(experts: Any, *args: Any) -> Tensor:
    """Call the forward of experts, or its plain loop for a width without grouped products."""
    weight, forward = experts.down_proj, type(experts).forward
    row = weight.shape[-1] * weight.element_size()
    how = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if how == "grouped_mm" and (row == 0 or row % 16):
        forward = unwrap(forward)
    y: Tensor = forward(experts, *args)
    return y


class Experts(_Shards):
    """Experts of which each rank has a part of every one's hidden features.

    The model's own forward runs with the parameters of this module.
    """

    def __init__(self, layer: Any, group: GroupLike) -> None:
        up, down = (getattr(layer, name, None) for name in ("gate_up_proj", "down_proj"))
        shapes = [tuple(getattr(x, "shape", ())) for x in (up, down)]
        usual = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][1] == 2 * shapes[1][2]
        odd = [word for word in ("is_transposed", "has_bias") if getattr(layer, word, False)]
        if not usual or odd or len(list(layer.parameters())) != 2:
            raise ArgumentError(
                f"{type(layer).__name__} must have gate_up_proj (experts, 2 * f, h) and down_proj "
                f"(experts, h, f) and no other parameter; got {shapes}, {odd}. Pass a plan of your "
                "own."
            )
        features, ranks = shapes[1][2], resolve(group)
        in_units = features % _UNIT == 0 and features >= _UNIT * ranks.size
        hidden = ShardSizes.balanced(features, ranks.size, _UNIT if in_units else 1)
        super().__init__(layer, group, gate_up_proj=([hidden, hidden], 1), down_proj=(hidden, 2))
        # a copy without values, with the config of the model itself
        config = getattr(layer, "config", None)
        no_values = {id(p): nn.Parameter(p.detach().to("meta")) for p in layer.parameters()}
        plain = copy.deepcopy(layer, {**no_values, id(config): config})
        if vars(plain).get("intermediate_dim") == features:
            plain.intermediate_dim = hidden[ranks.rank]
        plain.forward = MethodType(_of_any_width, plain)
        self._call = partial(functional_call, plain)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        pg = self.group.process_group
        x, weights = (copy_to_tensor_model_parallel_region(t, group=pg) for t in (x, weights))
        y: Tensor = self._call(dict(self.named_parameters()), (x, index, weights))
        return reduce_from_tensor_model_parallel_region(y, group=pg)


class _ScaledEmbedding(VocabParallelEmbedding):
    """Table sharded by ids, whose rows are multiplied by ``embed_scale``, as in Gemma."""

    embed_scale: Tensor | float

    def forward(self, ids: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        rows, scale = super().forward(ids, sequence_sizes), self.embed_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def sharded_embedding(layer: nn.Embedding, group: GroupLike) -> nn.Module:
    """Shard an embedding by ids; one with a forward of its own may only scale its rows."""
    if type(layer).forward is nn.Embedding.forward or not isinstance(layer, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(layer, group=group)
    rows, columns = layer.weight.shape
    plain = nn.Embedding(rows, columns, layer.padding_idx, _weight=layer.weight)
    plain.weight = layer.weight
    made = _ScaledEmbedding.from_embedding(plain.train(layer.training), group=group)
    scale = getattr(layer, "embed_scale", 1.0)
    made.embed_scale = nn.Buffer(scale, persistent=False) if torch.is_tensor(scale) else scale

    def check() -> None:
        _refuse_hooks(layer)
        ids = torch.arange(layer.num_embeddings, device=layer.weight.device)
        ids = ids[:: made.sizes.total - 1 or 1]
        with torch.no_grad():
            if layer.weight.is_meta or torch.equal(made(ids), layer(ids)):
                return
        raise ArgumentError(
            f"{type(layer).__name__} looks up rows in a way of its own, which sharding would "
            "change. Pass a plan that leaves it, and the head if both share a table."
        )

    agree("the look-up of an embedding", check, made.group)
    return made
