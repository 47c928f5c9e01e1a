"""Plans of models: those that a model carries, and a table of families that carry none.

Only attributes of a model are read; no package of models is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops.digest import digest
from varcomm.sharding import ShardSpec, mark
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_embedding
from varcomm.tensor_parallel.heads import Heads, KeyValueLinear
from varcomm.tensor_parallel.layout import MarkedModule, agreed
from varcomm.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    row_parallel_linear,
)
from varcomm.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from varcomm.tensor_parallel.pretrained import end
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group

Make = Callable[[Any], nn.Module]

# Styles of transformers' plans, current and earlier names, by the style used here.
_STYLES = {
    "colwise": "column",
    "colwise_gather_output": "gathered column",
    "colwise_rep": "gathered column",
    "packed_colwise": "packed column",
    "rowwise": "row",
    "rowwise_split_input": "whole row",
    "rowwise_rep": "whole row",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "sequence",
    "replicate": None,
}

# Models without a plan: `row of heads` are rows whose inputs are heads of another module, `bias of
# heads` is a table with a column per head.
_BERT = {
    "*attention.self.query": "column",  # also crossattention
    "*attention.self.key": "column",
    "*attention.self.value": "column",
    "*attention.output.dense": "row of heads",
    "*.intermediate.dense": "column",
    "*.layer.*[0-9].output.dense": "row",  # not crossattention.output
}
_T5 = {
    "*Attention.[qkv]": "column",
    "*Attention.o": "row",
    "*Attention.relative_attention_bias": "bias of heads",
    "*.DenseReluDense.wi*": "column",
    "*.DenseReluDense.wo": "row",
}
_GPT2 = {
    "*attn.[cq]_attn": "column",
    "*crossattention.[cq]_attn": "column",
    "*attn.c_proj": "row",
    "*crossattention.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
}
_VIT = {
    "*.attention.[qkv]_proj": "column",
    "*.attention.o_proj": "row",
    "*.mlp.fc1": "column",
    "*.mlp.fc2": "row",
}
_FAMILIES = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "t5": _T5,
    "mt5": _T5,
    "gpt2": _GPT2,
    "vit": _VIT,
}

_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_QUERIES = ("q_proj", "query", "q", "c_attn", "q_attn", "query_key_value")
_KEYS = ("k_proj", "v_proj", "key", "value", "k", "v")
_OUT = ("o_proj", "o", "out_proj", "c_proj", "dense")

# Attributes in which attention modules keep numbers of heads, and of features of all heads.
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("split_size", "all_head_size", "inner_dim")


class Family:
    """How the layers of one model are replaced: its plan, and what changes beside the layers."""

    def __init__(self, model: nn.Module, group: Group, replicate_kv: bool, gather_output: bool):
        self.group, self.replicate_kv, self.gather_output = group, replicate_kv, gather_output
        self.names = dict(model.named_modules())
        styles = dict(self._styles(model))
        self.heads = dict(self._attentions(styles))
        self.plan: dict[str, str | Make] = {}
        for name, style in styles.items():
            self.plan[name] = "sequence" if style == "sequence" else self._make(name, style)
        self.followers = set(self._vocabulary(model))

    def _styles(self, model: Any) -> Iterator[tuple[str, str]]:
        """Return the styles of modules by their names."""
        kind: Any = getattr(getattr(model, "config", None), "model_type", None)
        own = getattr(model, "_tp_plan", None)
        if not own and kind not in _FAMILIES:
            raise ArgumentError(
                f"{type(model).__name__} has no tp_plan, and its family is not in the table "
                f"({', '.join(_FAMILIES)}). Pass a plan: parallelize(model, {{name: style}})."
            )
        plan = {p: _STYLES.get(s, s) for p, s in own.items()} if own else _FAMILIES[kind]
        known = {*_STYLES.values(), "row of heads", "bias of heads"}
        self._check_parameters(model, plan)
        sharded = False
        for name, layer in self.names.items():
            found = [(p, s) for p, s in plan.items() if fnmatchcase(name, p) and s is not None]
            for pattern, style in found[:1]:
                if style not in known:
                    raise ArgumentError(
                        f"the model's plan has {pattern!r}: {style!r}, a style without a parallel "
                        f"layer here, for {type(layer).__name__}. Pass a plan of your own."
                    )
                sharded = sharded or style not in ("gathered column", "vocabulary", "sequence")
                yield name, style
        if not sharded:
            names = [name for name, layer in self.names.items() if not list(layer.children())]
            raise ArgumentError(
                f"the plan of {type(model).__name__} matches no layer of attention or MLP; names "
                f"are like {names[:3]}. Pass a plan of your own."
            )

    def _check_parameters(self, model: nn.Module, plan: Mapping[str, str | None]) -> None:
        """Raise ArgumentError if a pattern matches parameters only, except those of experts."""
        experts = [p for p, style in plan.items() if style == "experts"]
        for pattern, style in plan.items():
            if style is None or any(fnmatchcase(name, pattern) for name in self.names):
                continue
            for name, _ in model.named_parameters():
                parent = name.rpartition(".")[0]
                if fnmatchcase(name, pattern) and not any(fnmatchcase(parent, p) for p in experts):
                    raise ArgumentError(
                        f"the model's plan has {pattern!r}: {style!r}, which matches the parameter "
                        f"{name!r} and no module. Pass a plan of your own."
                    )

    def _attentions(self, styles: Mapping[str, str]) -> Iterator[tuple[str, Heads]]:
        """Return the heads of attention modules, and check that they can be sharded."""
        for name, style in styles.items():
            parent, _, leaf = name.rpartition(".")
            width = head_dim(self.names.get(parent))
            if style != "column":
                continue
            if leaf not in (*_QUERIES, *_KEYS):
                if _is_attention(parent, self.names.get(parent)):
                    raise ArgumentError(
                        f"{name} is a projection of an attention module with an unknown name, so "
                        "it could be cut through heads. Pass a plan of your own."
                    )
                continue
            if width is None and _is_attention(parent, self.names.get(parent)):
                raise ArgumentError(
                    f"{parent} has no attribute with its features per head "
                    f"({', '.join(_HEAD_DIM)}), so {name} could be cut through heads. Pass a plan "
                    "of your own."
                )
            if width is None or leaf not in _QUERIES:
                continue
            outputs = [n for n in _OUT if styles.get(f"{parent}.{n}") == "row"]
            last = self.names[f"{parent}.{outputs[0]}"] if outputs else self.names[name]
            features = _features(last)[0 if outputs else 1]
            keys = [n for n in _KEYS if styles.get(f"{parent}.{n}") == "column"]
            of_keys = _features(self.names[f"{parent}.{keys[0]}"])[1] if keys else features
            if features % width or of_keys % width or not of_keys or features % of_keys:
                raise ArgumentError(
                    f"{parent} has {features} features of queries and {of_keys} of keys, which "
                    f"are not whole heads of {width}. Pass a plan of your own."
                )
            heads = features // width, of_keys // width
            for child, layer in self.names[parent].named_children():
                own = [x for x in layer.parameters(recurse=False) if x.dim() > 1]
                if f"{parent}.{child}" not in styles and any(len(x) in heads for x in own):
                    raise ArgumentError(
                        f"{parent}.{child} has parameters per head, which the model's plan leaves "
                        "whole. Pass a plan of your own."
                    )
            yield parent, Heads.of(*heads, self.group.size, self.replicate_kv)

    def _heads_near(self, name: str) -> tuple[str, Heads]:
        """Return the attention module whose name has the longest beginning in common."""

        def common(other: str) -> int:
            pairs = zip(f"{name}.", f"{other}.", strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(other))

        found = max(self.heads, key=common)
        return found, self.heads[found]

    def _make(self, name: str, style: str) -> Make:
        """Return the function that makes the replacement of a module."""
        pg, layer = self.group.process_group, self.names[name]
        parent, _, leaf = name.rpartition(".")
        of_heads = self.heads.get(parent)
        if style == "row of heads" or (style == "bias of heads" and of_heads is None):
            parent, of_heads = self._heads_near(name)
        width = head_dim(self.names.get(parent)) or 1
        if style == "bias of heads":
            assert of_heads is not None
            return partial(_sharded, specs={"weight": ShardSpec.of(of_heads.queries, 1, pg)})
        if style == "vocabulary":
            return partial(_embedding, group=self.group)
        if style == "experts":
            return partial(_experts, group=self.group)
        inputs, outputs = _features(layer)
        if style in ("row", "whole row", "row of heads"):
            rows = ShardSizes.balanced(inputs, self.group.size)
            if of_heads is not None and style != "whole row":
                rows = of_heads.queries * width
            if _is_conv1d(layer):
                return partial(_conv1d, kind=_Conv1DRow, blocks=[rows], group=self.group)
            whole: dict[str, Any] = {"input_is_parallel": style != "whole row"}
            return partial(RowParallelLinear.from_linear, sizes=rows, group=pg, **whole)
        blocks = [ShardSizes.balanced(outputs, self.group.size)]
        if style == "packed column":
            blocks = 2 * [ShardSizes.balanced(outputs // 2, self.group.size)]
        padding = 0
        if of_heads is not None and style == "column":
            total = of_heads.queries.total
            per_head, fused = outputs // total, 1
            sizes = of_heads.queries
            if leaf in _KEYS:
                per_head, sizes = outputs // of_heads.keys.total, of_heads.keys
            elif _is_conv1d(layer):  # queries, keys and values, one after the other
                per_head, fused = width, outputs // (total * width)
            blocks = fused * [sizes * per_head]
            if sum(block.total for block in blocks) != outputs:
                raise ArgumentError(
                    f"{name} has {outputs} outputs, which are not equal parts for {total} heads. "
                    "Pass a plan of your own."
                )
            padding = fused * per_head  # of a rank without heads, which must split them
            if leaf in _KEYS and (readers := of_heads.owners) != tuple(range(len(readers))):
                return partial(_key_value, heads=of_heads, width=per_head, group=self.group)
        if _is_conv1d(layer):
            made = partial(_conv1d, kind=_Conv1DColumn, blocks=blocks, group=self.group)
            return partial(made, padding=padding)
        gathered: dict[str, Any] = {"gather_output": style == "gathered column"}
        return partial(ColumnParallelLinear.from_linear, sizes=blocks, group=pg, **gathered)

    def _vocabulary(self, model: Any) -> Iterator[str]:
        """Shard embedding and head by ids, wherever they are; return parameters that follow."""
        found = [end(model, side) for side in ("input", "output")]
        ends = [x for x in found if isinstance(x, nn.Embedding | nn.Linear)]
        shared = {id(layer.weight) for layer in ends}
        for name, layer in self.names.items():
            if id(getattr(layer, "weight", None)) not in shared:
                continue
            if isinstance(layer, nn.Embedding):
                self.plan[name] = partial(_embedding, group=self.group)
            elif isinstance(layer, nn.Linear):
                options: dict[str, Any] = {"gather_output": self.gather_output}
                options["group"] = self.group.process_group
                self.plan[name] = partial(ColumnParallelLinear.from_linear, **options)
                parent = name.rpartition(".")[0]
                if layer.bias is not None and getattr(self.names[parent], "bias", 0) is layer.bias:
                    yield f"{parent}.bias"  # the module shows its head's bias as its own

    def finish(self) -> None:
        """Write this rank's numbers of heads where attention modules keep those of the model."""
        rank = self.group.rank
        for name, heads in self.heads.items():
            module, queries = self.names[name], heads.queries
            width, keys = head_dim(module) or 1, heads.keys
            own, read = queries[rank], heads.read(rank)
            padded = any(isinstance(child, _Conv1DColumn) for child in module.children())
            shown = max(own, 1) if padded else own
            changes = dict.fromkeys(_COUNTS, (queries.total, shown))
            changes |= dict.fromkeys(_KEY_COUNTS, (keys.total, read))
            changes |= dict.fromkeys(_WIDTHS, (queries.total * width, shown * width))
            if read:
                groups = queries.total // keys.total
                changes["num_key_value_groups"] = groups, own // read
            for attribute, (before, after) in changes.items():
                if vars(module).get(attribute) == before:
                    setattr(module, attribute, after)


def head_dim(module: Any) -> int | None:
    """Return the features per head of an attention module; None for other modules."""
    found = (vars(module).get(name) for name in _HEAD_DIM) if module is not None else ()
    return next((width for width in found if isinstance(width, int)), None)


def _is_attention(name: str, module: Any) -> bool:
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return "attention" in words or "attn" in words


def is_projection(name: str) -> bool:
    """Return whether modules of this name project to or from heads."""
    return name.rpartition(".")[2] in (*_QUERIES, *_KEYS, *_OUT)


def is_input_projection(name: str) -> bool:
    """Return whether modules of this name project to queries, keys or values."""
    return name in (*_QUERIES, *_KEYS)


def needs_sum(model: Any) -> list[str]:
    """Return patterns of modules that the model's plan uses with parts of heads."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    return [p for p, style in plan.items() if _STYLES.get(style) == "sequence"]


def _is_conv1d(layer: Any) -> bool:
    """Return whether a layer is a linear of GPT-2, whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _features(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if _is_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    raise ArgumentError(
        f"the model's plan shards a {type(layer).__name__}, which is not a torch.nn.Linear. Pass a "
        "plan of your own."
    )


class _Sharded(MarkedModule):
    """Module of another library with its own forward, and some parameters as this rank's part."""

    _shards: Mapping[str, ShardSpec]

    def _specs(self) -> Mapping[str, ShardSpec]:
        return self._shards

    @property
    def group(self) -> Group:
        return next(iter(self._shards.values())).group


def _sharded(
    layer: nn.Module,
    specs: Mapping[str, ShardSpec],
    kind: type[nn.Module] = _Sharded,
    last: bool = False,
    **attributes: Any,
) -> Any:
    """Return a module with sharded parameters, in a subclass that has the methods of `kind`.

    `kind` comes first, or `last`: then the module's own methods find it by ``super()``.
    """

    def check() -> dict[str, Any]:
        return {name: (digest(p), p.requires_grad) for name, p in layer.named_parameters()}

    first = next(iter(specs.values()))
    agreed(f"a sharded {type(layer).__name__}", check, first.group)
    # a copy with dictionaries of its own, which hold the same parameters, modules and hooks
    values = [each.values() if isinstance(each, dict) else [each] for each in vars(layer).values()]
    made: Any = copy.deepcopy(layer, {id(value): value for each in values for value in each})
    bases = (type(layer), kind) if last else (kind, type(layer))
    made.__class__ = type(f"Parallel{type(layer).__name__}", bases, {})
    vars(made).update(_shards=dict(specs), **attributes)
    for name, spec in specs.items():
        whole = getattr(layer, name)
        own = nn.Parameter(spec.shard(whole.detach()), whole.requires_grad)
        made.register_parameter(name, mark(own, spec))
    made.mark_what_it_loads()
    return made


class _Conv1D(_Sharded):
    """Linear of GPT-2, whose weight is (in, out)."""

    weight: nn.Parameter
    bias: nn.Parameter


class _Conv1DColumn(_Conv1D):
    """Column-parallel linear of GPT-2.

    A rank without heads has `padding` outputs, zeros, so that the model can split them; the row
    layer that follows drops them.
    """

    padding: int

    def forward(self, x: Tensor) -> Tensor:
        pg, weight, bias = self.group.process_group, self.weight, self.bias
        y = column_parallel_linear(x, weight.mT, bias, group=pg)
        return y if y.shape[-1] else functional.pad(y, (0, self.padding))


class _Conv1DRow(_Conv1D):
    """Row-parallel linear of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        pg, weight, bias = self.group.process_group, self.weight, self.bias
        return row_parallel_linear(x[..., : weight.shape[0]], weight.mT, bias, group=pg)


def _conv1d(
    layer: nn.Module,
    kind: type[nn.Module],
    blocks: Sequence[Sequence[int]],
    group: Group,
    padding: int = 0,
) -> nn.Module:
    column, pg = kind is _Conv1DColumn, group.process_group
    specs = {"weight": ShardSpec.of(blocks, int(column), pg)}
    if column:
        specs["bias"] = ShardSpec.of(blocks, 0, pg)
    return _sharded(layer, specs, kind, padding=padding)  # type: ignore[no-any-return]


def _key_value(layer: nn.Linear, heads: Heads, width: int, group: Group) -> nn.Module:
    sizes, pg = heads.keys * width, group.process_group
    made = KeyValueLinear.from_linear(layer, sizes=sizes, group=pg)
    readers = heads.plan(width, group)
    assert readers is not None
    made.readers = readers
    return made


class _Experts(_Sharded):
    """Experts of which each rank has a part of every one's hidden features."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        pg = self.group.process_group
        x, weights = (copy_to_tensor_model_parallel_region(t, group=pg) for t in (x, weights))
        y: Tensor = super().forward(x, index, weights)
        return reduce_from_tensor_model_parallel_region(y, group=pg)


def _experts(layer: Any, group: Group) -> nn.Module:
    up, down = (getattr(layer, name, None) for name in ("gate_up_proj", "down_proj"))
    shapes = [tuple(getattr(x, "shape", ())) for x in (up, down)]
    usual = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][1] == 2 * shapes[1][2]
    odd = [word for word in ("is_transposed", "has_bias") if getattr(layer, word, False)]
    if not usual or odd or len(list(layer.parameters())) != 2:
        raise ArgumentError(
            f"{type(layer).__name__} must have gate_up_proj (experts, 2 * f, h) and down_proj "
            f"(experts, h, f) and no other parameter; got {shapes}, {odd}. Pass a plan of your own."
        )
    hidden, pg = ShardSizes.balanced(shapes[1][2], group.size), group.process_group
    specs = {
        "gate_up_proj": ShardSpec.of([hidden, hidden], 1, pg),
        "down_proj": ShardSpec.of(hidden, 2, pg),
    }
    made = _sharded(layer, specs, _Experts)
    if vars(made).get("intermediate_dim") == shapes[1][2]:
        made.intermediate_dim = hidden[group.rank]
    return made  # type: ignore[no-any-return]


class _OwnEmbedding(_Sharded, nn.Embedding):
    """Look-up in a sharded table, for embeddings that change its result."""

    def forward(self, ids: Tensor) -> Tensor:
        (spec,) = self._shards.values()
        pg = spec.group.process_group
        return vocab_parallel_embedding(ids, self.weight, spec.sizes, self.padding_idx, group=pg)


def _embedding(layer: nn.Embedding, group: Group) -> nn.Module:
    """Shard an embedding by ids; one with a forward of its own must call its base class's."""
    pg = group.process_group
    if type(layer).forward is nn.Embedding.forward or not isinstance(layer, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(layer, group=pg)
    spec = ShardSpec.of(ShardSizes.balanced(layer.num_embeddings, group.size), 0, pg)
    made: nn.Module = _sharded(layer, {"weight": spec}, _OwnEmbedding, last=True)

    def same() -> None:
        ids = torch.arange(layer.num_embeddings, device=layer.weight.device)[:: spec.total - 1 or 1]
        with torch.no_grad():
            if layer.weight.is_meta or torch.equal(made(ids), layer(ids)):
                return
        raise ArgumentError(
            f"{type(layer).__name__} looks up rows in a way of its own, which sharding would "
            "change. Pass a plan that leaves it, and the head if both share a table."
        )

    agree("the look-up of an embedding", same, group)
    return made
