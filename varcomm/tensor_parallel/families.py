"""One function per family of transformers models: the layers to shard, in order.

Each function can be read and copied for another model; ``FAMILIES`` and :func:`from_tp_plan` are
the list. Only attributes of a model are read; no package of models is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes
from varcomm.tensor_parallel.foreign import (
    Conv1DColumn,
    Conv1DRow,
    Experts,
    HeadTable,
    sharded_embedding,
)
from varcomm.tensor_parallel.heads import Heads, KeyValueLinear
from varcomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.pretrained import end
from varcomm.transport.group import Group

Make = Callable[[Any], nn.Module]

# Names of projections in attention modules, and of attributes with the features per head.
QUERIES = ("q_proj", "query", "q", "c_attn", "q_attn", "query_key_value")
KEYS = ("k_proj", "v_proj", "key", "value", "k", "v")
PROJECTIONS = (*QUERIES, *KEYS, "o_proj", "o", "out_proj", "c_proj", "dense")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")

SUM_GRADIENTS = "replicated_with_grad_allreduce"  # style of norms over the features of a head


class ModelPlan:
    """Replacements of a model's layers by name, and sizes that its modules keep in attributes."""

    def __init__(self, model: Any, group: Group, replicate_kv: bool, gather_output: bool):
        self.model, self.group = model, group
        self.replicate_kv, self.gather_output = replicate_kv, gather_output
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.layers: dict[str, str | Make] = {}
        self.attributes: dict[nn.Module, dict[str, int]] = {}
        self.ends: list[str] = []  # layers of embedding and head
        self.followers: set[str] = set()  # parameters outside replaced layers, tied to the head's
        family: Any = getattr(getattr(model, "config", None), "model_type", None)
        if getattr(model, "_tp_plan", None):
            from_tp_plan(self)
        elif family in FAMILIES:
            try:
                FAMILIES[family](self)
            except (AttributeError, KeyError) as error:
                raise ArgumentError(
                    f"{type(model).__name__} has other modules than its family's function reads in "
                    f"this version of transformers: {error}. Pass a plan of your own."
                ) from error
        else:
            raise ArgumentError(
                f"{type(model).__name__} has no tp_plan, and its family is not in the table "
                f"({', '.join(FAMILIES)}). Pass a plan: parallelize(model, {{name: style}})."
            )
        if all(name in self.ends or how == "sequence" for name, how in self.layers.items()):
            names = [name for name, layer in self.modules.items() if not list(layer.children())]
            raise ArgumentError(
                f"the plan of {type(model).__name__} matches no layer of attention or MLP; names "
                f"are like {names[:3]}. Pass a plan of your own."
            )

    def named(self, pattern: str) -> Iterator[tuple[str, Any]]:
        """Return the modules whose names match, with their names."""
        return ((name, m) for name, m in self.modules.items() if fnmatchcase(name, pattern))

    def balanced(self, number: int) -> ShardSizes:
        """Return balanced sizes of all ranks, for example heads per rank."""
        return ShardSizes.balanced(number, self.group.size)

    def column(self, name: str, *blocks: ShardSizes, fused: int = 1, **options: Any) -> None:
        """Shard the outputs of a linear layer: in these blocks, or in equal ones, balanced."""
        outputs = _features(self.modules[name])[1]
        blocks = blocks or fused * (self.balanced(outputs // fused),)
        self.replace(name, ColumnParallelLinear.from_linear, sizes=blocks, **options)

    def row(self, name: str, sizes: ShardSizes | None = None, **options: Any) -> None:
        """Shard the inputs of a linear layer, balanced or in these sizes."""
        sizes = sizes or self.balanced(_features(self.modules[name])[0])
        self.replace(name, RowParallelLinear.from_linear, sizes=sizes, **options)

    def replace(self, name: str, make: Callable[..., nn.Module], **options: Any) -> None:
        """Replace a layer by ``make(layer, group=group, **options)``."""
        self.layers[name] = partial(make, group=self.group.process_group, **options)

    def vocabulary(self) -> None:
        """Shard embedding and head by ids, and all layers that share their weights."""
        ends = [end(self.model, side) for side in ("input", "output")]
        shared = {id(x.weight) for x in ends if isinstance(x, nn.Embedding | nn.Linear)}
        self.ends = [n for n, m in self.modules.items() if id(getattr(m, "weight", None)) in shared]
        for name in self.ends:
            layer, parent = self.modules[name], self.modules[name.rpartition(".")[0]]
            if isinstance(layer, nn.Embedding):
                self.replace(name, sharded_embedding)
            elif isinstance(layer, nn.Linear):
                self.column(name, gather_output=self.gather_output)
                if layer.bias is not None and getattr(parent, "bias", None) is layer.bias:
                    self.followers.add(f"{name.rpartition('.')[0]}.bias")  # its head's, as its own


def bert(plan: ModelPlan) -> None:
    """Shard BERT, RoBERTa, XLM-RoBERTa or ELECTRA."""
    for name, attention in plan.named("*attention.self"):  # also crossattention
        heads = plan.balanced(attention.num_attention_heads)
        features = heads * attention.attention_head_size
        for child in ("query", "key", "value"):
            plan.column(f"{name}.{child}", features)
        plan.row(f"{name.removesuffix('self')}output.dense", features)
        rank = plan.group.rank
        plan.attributes[attention] = {
            "num_attention_heads": heads[rank],
            "all_head_size": features[rank],
        }
    for name, _ in plan.named("*.intermediate"):
        plan.column(f"{name}.dense")
        plan.row(f"{name.removesuffix('intermediate')}output.dense")
    plan.vocabulary()


def t5(plan: ModelPlan) -> None:
    """Shard T5 or mT5."""
    for name, attention in plan.named("*Attention"):
        heads = plan.balanced(attention.n_heads)
        features = heads * attention.key_value_proj_dim
        for child in ("q", "k", "v"):
            plan.column(f"{name}.{child}", features)
        plan.row(f"{name}.o", features)
        if attention.has_relative_attention_bias:
            plan.replace(f"{name}.relative_attention_bias", HeadTable.from_embedding, sizes=heads)
        rank = plan.group.rank
        plan.attributes[attention] = {"n_heads": heads[rank], "inner_dim": features[rank]}
    for name, _ in plan.named("*.DenseReluDense.wi*"):  # wi, or wi_0 and wi_1
        plan.column(name)
    for name, _ in plan.named("*.DenseReluDense.wo"):
        plan.row(name)
    plan.vocabulary()


def gpt2(plan: ModelPlan) -> None:
    """Shard GPT-2, which fuses queries, keys and values and splits them by attributes."""
    for name, attention in (*plan.named("*.attn"), *plan.named("*.crossattention")):
        heads, width = plan.balanced(attention.num_heads), attention.head_dim
        features = heads * width
        if attention.is_cross_attention:
            plan.replace(f"{name}.q_attn", Conv1DColumn, blocks=[features], padding=width)
        blocks = [features] * (2 if attention.is_cross_attention else 3)
        padding = len(blocks) * width
        plan.replace(f"{name}.c_attn", Conv1DColumn, blocks=blocks, padding=padding)
        plan.replace(f"{name}.c_proj", Conv1DRow, weight=(features, 0))
        shown = max(heads[plan.group.rank], 1)  # with padding, a rank without heads has one
        plan.attributes[attention] = {"num_heads": shown, "split_size": shown * width}
    for name, mlp in plan.named("*.mlp"):
        inner = plan.balanced(mlp.c_fc.weight.shape[1])
        plan.replace(f"{name}.c_fc", Conv1DColumn, blocks=[inner])
        plan.replace(f"{name}.c_proj", Conv1DRow, weight=(inner, 0))
    plan.vocabulary()


def vit(plan: ModelPlan) -> None:
    """Shard ViT."""
    for name, attention in plan.named("*.attention"):
        heads = plan.balanced(attention.num_attention_heads)
        features = heads * attention.head_dim
        for child in ("q_proj", "k_proj", "v_proj"):
            plan.column(f"{name}.{child}", features)
        plan.row(f"{name}.o_proj", features)
        plan.attributes[attention] = {"num_attention_heads": heads[plan.group.rank]}
    for name, _ in plan.named("*.mlp"):
        plan.column(f"{name}.fc1")
        plan.row(f"{name}.fc2")


FAMILIES: Mapping[str, Callable[[ModelPlan], None]] = {
    "bert": bert,
    "roberta": bert,
    "xlm-roberta": bert,
    "electra": bert,
    "t5": t5,
    "mt5": t5,
    "gpt2": gpt2,
    "vit": vit,
}


def from_tp_plan(plan: ModelPlan) -> None:
    """Shard a model by its own tp_plan, and its attention by complete heads."""
    styles = _styles(plan)
    for name, style in styles.items():
        STYLES[style](plan, name)
    columns = [name for name, style in styles.items() if style == "colwise"]
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in columns):
        _attention(plan, parent, styles)
    plan.vocabulary()


# Styles of tp_plans, current and earlier names.
STYLES: Mapping[str, Callable[[ModelPlan, str], None]] = {
    "colwise": ModelPlan.column,
    "colwise_gather_output": partial(ModelPlan.column, gather_output=True),
    "colwise_rep": partial(ModelPlan.column, gather_output=True),
    "packed_colwise": partial(ModelPlan.column, fused=2),
    "rowwise": ModelPlan.row,
    "rowwise_split_input": partial(ModelPlan.row, input_is_parallel=False),
    "rowwise_rep": partial(ModelPlan.row, input_is_parallel=False),
    "embedding_rowwise": partial(ModelPlan.replace, make=sharded_embedding),
    "moe_tp_experts": partial(ModelPlan.replace, make=Experts),
    SUM_GRADIENTS: lambda plan, name: plan.layers.update({name: "sequence"}),
}


def _styles(plan: ModelPlan) -> dict[str, str]:
    """Return the style of each module that the model's tp_plan matches, except "replicate"."""
    styles = {p: style for p, style in plan.model._tp_plan.items() if style != "replicate"}
    experts = [pattern for pattern, style in styles.items() if style == "moe_tp_experts"]
    matched: dict[str, str] = {}
    for pattern, style in styles.items():
        modules = dict(plan.named(pattern))
        for name, layer in modules.items():
            if matched.setdefault(name, style) not in STYLES:
                raise ArgumentError(
                    f"the model's plan has {pattern!r}: {style!r}, a style without a parallel "
                    f"layer here, for {type(layer).__name__}. Pass a plan of your own."
                )
        for name, _ in () if modules else plan.model.named_parameters():
            parent = name.rpartition(".")[0]
            if fnmatchcase(name, pattern) and not any(fnmatchcase(parent, p) for p in experts):
                raise ArgumentError(
                    f"the model's plan has {pattern!r}: {style!r}, which matches the parameter "
                    f"{name!r} and no module. Pass a plan of your own."
                )
    return {name: matched[name] for name in plan.modules if name in matched}


def _attention(plan: ModelPlan, name: str, styles: Mapping[str, str]) -> None:
    """Shard a module by complete heads in place of features, if it is attention."""
    attention, width = plan.modules[name], head_dim(plan.modules[name])
    style = {child: styles.get(f"{name}.{child}") for child, _ in attention.named_children()}
    columns, rows = ([c for c in style if style[c] == s] for s in ("colwise", "rowwise"))
    words = f"{name.rpartition('.')[2]} {type(attention).__name__}".lower()
    if "attention" in words or "attn" in words:
        if unknown := [child for child in columns if child not in (*QUERIES, *KEYS)]:
            raise ArgumentError(
                f"{name}.{unknown[0]} is a projection of an attention module with an unknown name, "
                "so it could be cut through heads. Pass a plan of your own."
            )
        if width is None:
            raise ArgumentError(
                f"{name} has no attribute with its features per head ({', '.join(_HEAD_DIM)}), so "
                f"{name}.{columns[0]} could be cut through heads. Pass a plan of your own."
            )
    queries, keys = ([c for c in columns if c in names] for names in (QUERIES, KEYS))
    if width is None or not queries:
        return
    outputs = {child: _features(plan.modules[f"{name}.{child}"])[1] for child in columns}
    features = _features(plan.modules[f"{name}.{rows[0]}"])[0] if rows else outputs[queries[0]]
    of_keys = outputs[keys[0]] if keys else features
    if features % width or of_keys % width or not of_keys or features % of_keys:
        raise ArgumentError(
            f"{name} has {features} features of queries and {of_keys} of keys, which are not whole "
            f"heads of {width}. Pass a plan of your own."
        )
    counts = features // width, of_keys // width
    for child, layer in attention.named_children():
        weights = (x for x in layer.parameters(recurse=False) if x.dim() > 1)
        if style[child] is None and any(len(x) in counts for x in weights):
            raise ArgumentError(
                f"{name}.{child} has parameters per head, which the model's plan leaves whole. "
                "Pass a plan of your own."
            )
    heads = Heads.of(*counts, plan.group.size, plan.replicate_kv)
    for child in columns:
        sizes = heads.keys if child in KEYS else heads.queries
        per_head = outputs[child] // sizes.total
        if child in KEYS and heads.owners != tuple(range(plan.group.size)):
            of_heads = KeyValueLinear.of_heads
            plan.replace(f"{name}.{child}", of_heads, heads=heads, width=per_head)
        else:
            plan.column(f"{name}.{child}", sizes * per_head)
    for child in rows:
        plan.row(f"{name}.{child}", heads.queries * width)
    own, read = heads.queries[plan.group.rank], heads.read(plan.group.rank)
    numbers = {"num_heads": own, "num_attention_heads": own, "num_key_value_heads": read}
    numbers["num_key_value_groups"] = own // read if read else 1
    plan.attributes[attention] = {n: each for n, each in numbers.items() if n in vars(attention)}


def head_dim(module: Any) -> int | None:
    """Return the features per head of an attention module; None for other modules."""
    widths = (vars(module).get(name) for name in _HEAD_DIM) if module is not None else ()
    return next((width for width in widths if isinstance(width, int)), None)


def _features(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    raise ArgumentError(
        f"the model's plan shards a {type(layer).__name__}, which is not a torch.nn.Linear. Pass a "
        "plan of your own."
    )
