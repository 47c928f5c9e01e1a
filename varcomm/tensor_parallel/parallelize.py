"""Parallel layers and norms inside an existing model: ``parallelize`` and ``sequence_parallel``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag
from varcomm.sharding import shard_spec
from varcomm.sharding.optimizers import refuse_replaced
from varcomm.tensor_parallel.embedding import VocabParallelEmbedding
from varcomm.tensor_parallel.families import (
    KEYS,
    PROJECTIONS,
    QUERIES,
    SUM_GRADIENTS,
    Make,
    ModelPlan,
    head_dim,
)
from varcomm.tensor_parallel.layout import FeatureCheck, agreed, digests
from varcomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from varcomm.tensor_parallel.pretrained import (
    check_guard,
    end,
    guard,
    has_causal_loss,
    pretrained_models,
    refuse_dropout,
)
from varcomm.transport.agreement import agree, on_all_ranks
from varcomm.transport.group import Group, GroupLike, resolve

M = TypeVar("M", bound=nn.Module)
_WHAT = "parallelize"
_STYLES: dict[str, Any] = {
    "column": ColumnParallelLinear.from_linear,
    "row": RowParallelLinear.from_linear,
    "embedding": VocabParallelEmbedding.from_embedding,
    "sequence": None,
}


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str | Make] | None = None,
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    sequence_dim: int = 0,
    replicate_kv: bool = True,
    gather_output: bool = True,
) -> nn.Module:
    """Replace layers of a model by parallel layers, in place, by name patterns; collective.

    A model of Hugging Face transformers needs no plan. If one rank fails, all ranks raise, and
    nothing is replaced.

    Parameters
    ----------
    module : torch.nn.Module
        Identical on all ranks, weights included.
    plan : mapping of str to str or callable, optional
        None shards complete heads, and embedding and output head by ids, by the ``tp_plan`` of a
        transformers model, or that of its family: GPT-2, BERT, T5, ViT.
        Keys of other plans are names as in :meth:`torch.nn.Module.named_modules`, with shell
        wildcards; each must match a module, and no module may match two. Values are ``"column"`` or
        ``"row"`` for Linear, ``"embedding"`` for Embedding, ``"sequence"`` for
        :func:`sequence_parallel`, or a function from the module to its replacement, such as
        ``functools.partial(ColumnParallelLinear.from_linear, sizes=[5, 3])``.
    sequence_sizes : sequence of int, optional
        Rows of the sequence per rank, for the ``"column"``, ``"row"`` and ``"embedding"`` layers
        (sequence parallelism).
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    sequence_dim : int
        Dimension of the sequence: 0, or 1 for batch-first models.
    replicate_kv : bool
        Without a plan: as in :class:`ParallelAttention`.
    gather_output : bool
        Without a plan: True returns the logits of all ids. False leaves the logits of a causal
        model sharded: ``labels=`` uses :func:`vocab_parallel_cross_entropy`, and ``generate`` is
        refused.

    Returns
    -------
    torch.nn.Module
        `module` or, if a pattern is ``""``, its replacement.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if the plan does not fit the model, or models or plans differ.

    See Also
    --------
    ColumnParallelLinear, ParallelAttention, sequence_parallel

    Notes
    -----
    Parameters that modules share stay shared, so they must be sharded identically.

    :doc:`/how_to/shard_a_transformers_model` describes dropout, ``generate``, ``save_pretrained``,
    adapters and norms of models that are sharded without a plan.

    Communication: short messages with digests of plans and weights. No weight is sent.

    In one process: `module` as it is.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import parallelize
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     linears = torch.nn.Linear(4, 7), torch.nn.Linear(7, 4)
    ...     model, x = torch.nn.Sequential(*linears), torch.ones(2, 4)
    ...     expected = model(x)
    ...     parallelize(model, {"0": "column", "1": "row"})
    ...     return model[0].weight.shape[0], torch.allclose(model(x), expected)
    >>> varcomm.launch(fn, 2)
    [(4, True), (3, True)]
    """
    ranks = resolve(group)
    chosen: dict[str, tuple[nn.Module, str | Make]] = {}

    model_plans: list[ModelPlan] = []  # at most one

    def check() -> dict[str, Any]:
        checked_flag(replicate_kv, "replicate_kv", "")
        checked_flag(gather_output, "gather_output", "")
        if plan is None and isinstance(module, nn.Module):
            if sequence_sizes is not None or sequence_dim != 0:
                raise ArgumentError(
                    "sequence_sizes and sequence_dim need a plan: which modules run on parts of a "
                    "sequence is not in a model's tp_plan. Pass plan."
                )
            if not gather_output and not has_causal_loss(module):
                raise ArgumentError(
                    f"gather_output=False: {type(module).__name__} does not use the loss of "
                    "causal models, so its labels= would be compared with the logits of this "
                    "rank's ids only. Leave out gather_output."
                )
            model_plans.append(ModelPlan(module, ranks, replicate_kv, gather_output))
            chosen.update(_chosen(module, model_plans[0].layers))
        else:
            chosen.update(_chosen(module, plan))
        styles = {name: "a function" if callable(how) else how for name, (_, how) in chosen.items()}
        return {"modules": styles}

    agreed(_WHAT, check, ranks)
    made: dict[int, nn.Module] = {}
    follow: dict[str, Any] = {}
    in_place: list[nn.Module] = []
    for name, (layer, how) in chosen.items():
        if how == "sequence":
            _agree_on_parameters(layer, ranks)
            in_place.append(layer)
            continue
        if not callable(how):
            parts: dict[str, Any] = {"sequence_sizes": sequence_sizes, "sequence_dim": sequence_dim}
            how = partial(_STYLES[how], group=group, **parts)
        made[id(layer)] = _made(name, layer, how, ranks)

    followers = model_plans[0].followers if model_plans else set()

    def alike() -> dict[str, Any]:
        follow.update(_tied(module, made, followers))
        _check_heads(module, chosen, made)
        _check_siblings(module, made)
        _check_blocks(module, chosen, made)
        _check_positions(module, made)
        check_guard(module, made)
        return {"what modules become": [type(layer).__name__ for layer in made.values()]}

    agreed(_WHAT, alike, ranks)
    for layer in in_place:
        _change(layer, ranks)
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and id(layer) in made:
            module.set_submodule(name, made[id(layer)])
    for name, parameter in follow.items():
        parent, _, own = name.rpartition(".")
        module.get_submodule(parent).register_parameter(own, parameter)
    for model_plan in model_plans:
        for attention, numbers in model_plan.attributes.items():
            vars(attention).update(numbers)
    if not model_plans:
        _check_features(module, made)
    _leave_out_fused_kernels(module, made)
    now = {id(parameter) for parameter in module.parameters()}
    before = (parameter for layer, _ in chosen.values() for parameter in layer.parameters())
    refuse_replaced([parameter for parameter in before if id(parameter) not in now])
    guard(module)
    if model_plans and ranks.size > 1:
        refuse_dropout(module)
    return made.get(id(module), module)


def _check_heads(
    module: nn.Module,
    chosen: Mapping[str, tuple[nn.Module, str | Make]],
    made: Mapping[int, nn.Module],
) -> None:
    """Raise ArgumentError if a plan cuts through heads, or leaves a norm inside them alone."""
    inside = set()
    for name, (layer, _) in chosen.items():
        new: Any = made.get(id(layer))
        parent, _, leaf = name.rpartition(".")
        width = head_dim(module.get_submodule(parent))
        linear = isinstance(new, ColumnParallelLinear | RowParallelLinear)
        whole = getattr(new, "gather_output", False) or not getattr(new, "input_is_parallel", True)
        if width is None or not linear or whole or leaf not in PROJECTIONS:
            continue
        inside.add(parent)
        if new.spec.total % width == 0 and any(n % width for b in new.spec.blocks for n in b):
            sizes = [list(block) for block in new.spec.blocks]
            raise ArgumentError(
                f"the plan cuts through heads of {width} features: {name!r} gets {sizes}. Pass "
                f"functools.partial({type(new).__name__}.from_linear, multiple_of={width}), or no "
                "plan."
            )
    styles: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    for pattern in (pattern for pattern, style in styles.items() if style == SUM_GRADIENTS):
        for name, layer in module.named_modules():
            parent = name.rpartition(".")[0]
            given = name in chosen or "_sums_gradients" in vars(layer)
            if fnmatchcase(name, pattern) and parent in inside and not given:
                raise ArgumentError(
                    f"{name!r} works on this rank's heads, so the gradients of its parameters are "
                    f"parts. Add {pattern!r}: 'sequence' to the plan, or pass no plan."
                )


def _check_siblings(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Raise ArgumentError if a plan shards queries of a transformers model without its keys."""
    for model in pretrained_models(module):
        for attention in model.modules():
            found: dict[bool, str] = {}
            for name, layer in attention.named_children():
                new: Any = made.get(id(layer), layer)
                if name in (*QUERIES, *KEYS) and isinstance(new, nn.Linear | ColumnParallelLinear):
                    found[isinstance(new, ColumnParallelLinear) and not new.gather_output] = name
            if len(found) == 2:
                raise ArgumentError(
                    f"the plan shards {found[True]!r} and not {found[False]!r} of "
                    f"{type(attention).__name__}, so heads of queries and keys would not match. "
                    f"Add {found[False]!r} to the plan, or pass no plan."
                )


def _check_blocks(
    module: nn.Module,
    chosen: Mapping[str, tuple[nn.Module, str | Make]],
    made: Mapping[int, nn.Module],
) -> None:
    """Raise ArgumentError if "column" cuts two or three fused blocks, as of a GLU, as one."""
    for name, (layer, how) in chosen.items():
        new: Any = made.get(id(layer))
        if how != "column" or not isinstance(new, ColumnParallelLinear):
            continue
        parent = module.get_submodule(name.rpartition(".")[0])
        beside: list[Any] = [made.get(id(child), child) for child in parent.children()]
        widths = {x.in_features for x in beside if isinstance(x, RowParallelLinear)}
        fed = {x.out_features for x in beside if isinstance(x, ColumnParallelLinear)}
        for width in widths - fed:
            if width and new.out_features in (2 * width, 3 * width) and new.group.size > 1:
                count = new.out_features // width
                raise ArgumentError(
                    f"{name!r} has {count} times the {width} inputs of the row-parallel layer "
                    "beside it, as fused blocks of a GLU or of queries, keys and values. Pass "
                    "functools.partial(ColumnParallelLinear.from_linear, sizes=[sizes] * "
                    f"{count}) with the sizes of the row-parallel layer, or multiple_of if the "
                    "blocks are interleaved."
                )


def _check_positions(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Raise ArgumentError if a transformers model would count positions in parts of a sequence."""
    in_parts = {i for i, new in made.items() if getattr(new, "sequence_sizes", None) is not None}
    for model in pretrained_models(module) if in_parts else ():
        if id(end(model, "input")) in in_parts:
            raise ArgumentError(
                f"{type(model).__name__} counts positions from the rows of its embedding, so with "
                "sequence_sizes every rank would start at 0. Leave out sequence_sizes, which are "
                "for modules whose forward is written for parts."
            )


def _check_features(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Let unsharded linear layers refuse this rank's outputs of column-parallel layers."""
    widths: dict[int, set[int]] = {}
    for column in module.modules():
        if isinstance(column, ColumnParallelLinear) and not column.gather_output:
            widths.setdefault(column.out_features, set()).add(column.spec.local)
    planned = {id(new) for new in made.values()}  # some may be the old layer, changed in place
    for name, layer in module.named_modules():
        if earlier := vars(layer).pop("_feature_check", None):
            earlier.remove()
        if type(layer) is nn.Linear and id(layer) not in planned and layer.in_features in widths:
            check = FeatureCheck(name, frozenset(widths[layer.in_features]))
            vars(layer)["_feature_check"] = layer.register_forward_pre_hook(check)


def _leave_out_fused_kernels(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Let encoder layers of torch call sharded layers in eval(), and not read their weights."""
    sharded = {id(new) for new in made.values()}
    for layer in module.modules():
        if not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            continue
        if sharded.isdisjoint(map(id, layer.modules())):
            continue
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        else:
            layer.use_nested_tensor = False  # which only the fused kernels accept


def _chosen(module: Any, plan: Any) -> dict[str, tuple[nn.Module, str | Make]]:
    """Return the modules that a plan matches, each once, by the first of its names."""
    for word, value, kind in (("module", module, nn.Module), ("plan", plan, Mapping)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{word} must be a {kind.__name__}; got {type(value).__name__}.")
    for pattern, how in plan.items():
        if not callable(how) and how not in _STYLES:
            raise ArgumentError(
                f"plan[{pattern!r}] must be one of {', '.join(_STYLES)}, or a function of the "
                f"module; got {how!r}."
            )
    found: dict[int, tuple[str, nn.Module, dict[str, str | Make]]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if matching := {p: how for p, how in plan.items() if fnmatchcase(name, p)}:
            found.setdefault(id(layer), (name, layer, {}))[2].update(matching)
    matched = {pattern for *_, matching in found.values() for pattern in matching}
    if unmatched := [pattern for pattern in plan if pattern not in matched]:
        names = [name for name, _ in module.named_modules()][1:6]
        raise ArgumentError(f"plan[{unmatched[0]!r}] matches no module; names are like {names}.")
    for name, layer, matching in found.values():
        if len(matching) > 1:
            raise ArgumentError(f"{' and '.join(matching)} both match the module {name!r}.")
        for inner in list(layer.modules())[1:]:
            if id(inner) in found:
                raise ArgumentError(
                    f"the plan matches {found[id(inner)][0]!r} and {name!r}, which contains it."
                )
    return {
        name: (layer, next(iter(matching.values()))) for name, layer, matching in found.values()
    }


def _made(name: str, layer: nn.Module, make: Make, group: Group) -> nn.Module:
    """Return a module's replacement; if making it fails on this rank, all ranks raise."""
    try:
        new = make(layer)
        if isinstance(new, nn.Module):
            return new
        got = type(new).__name__
        raise ArgumentError(f"the replacement of {name!r} must be a torch.nn.Module; got {got}.")
    except Exception as error:
        failed = error

        def fail() -> None:
            raise failed

        if not on_all_ranks(error):  # the other ranks are in an agreement, or about to be
            agree(_WHAT, fail, group)
        raise


def _tied(
    module: nn.Module, made: Mapping[int, nn.Module], followers: Collection[str]
) -> dict[str, nn.Parameter]:
    """Tie the parameters of new modules where those of the old ones were.

    Returns the new parameters of `followers`, names of parameters in modules that stay.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    follow: dict[str, nn.Parameter] = {}
    for prefix, layer in module.named_modules():
        for name, param in layer.named_parameters(recurse=False):
            places.setdefault(param, []).append((layer, name, f"{prefix}.{name}"))
    for shared in places.values():
        new = [(made[id(layer)], name) for layer, name, _ in shared if id(layer) in made]
        if len(shared) == 1 or not new:
            continue
        params: list[Any] = [getattr(layer, name, None) for layer, name in new]
        kinds = {None if p is None else (p.shape, shard_spec(p)) for p in params}
        stay = [full for layer, _, full in shared if id(layer) not in made]
        if [full for full in stay if full not in followers] or len(kinds) > 1 or None in kinds:
            names = " and ".join(full for *_, full in shared)
            raise ArgumentError(
                f"{names} are one parameter, which the plan does not shard in the same way. Shard "
                "all these modules identically, or none."
            )
        for layer, name in new:
            layer.register_parameter(name, params[0])
        follow |= dict.fromkeys(stay, params[0])
    return follow


def sequence_parallel(module: M, group: GroupLike = None) -> M:
    """Sum the gradients of a module's parameters over ranks with different parts of a sequence.

    The module is changed in place: its ``forward`` reads its replicated parameters through
    :func:`copy_to_tensor_model_parallel_region`. The state dict and the optimizers of the module
    stay valid.

    Parameters
    ----------
    module : torch.nn.Module
        Its ``forward`` reads its own parameters by name, as LayerNorm and RMSNorm do. Parameters of
        submodules are not included.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one of them.

    See Also
    --------
    parallelize, gather_from_sequence_parallel_region

    Notes
    -----
    Communication: in backward an all-reduce per parameter. Do not sum these gradients again.

    In one process: `module` as it is.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import sequence_parallel
    >>> def fn(rank):
    ...     norm = sequence_parallel(torch.nn.RMSNorm(2, eps=0.0))
    ...     norm(torch.ones(rank + 1, 2)).sum().backward()
    ...     return norm.weight.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [[3.0, 3.0], [3.0, 3.0]]
    """
    ranks = resolve(group)
    _agree_on_parameters(module, ranks)
    _change(module, ranks)
    return module


def _agree_on_parameters(module: Any, group: Group) -> None:
    """Check that a module's parameters are identical on all ranks; collective."""

    def check() -> dict[str, object]:
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
        if "_sums_gradients" in vars(module):
            raise ArgumentError(
                f"the gradients of this {type(module).__name__} are summed already. Do it once."
            )
        if "forward" in vars(module):
            raise ArgumentError(
                f"forward was set on this {type(module).__name__}, and would be replaced. Delete "
                "it, and set it again afterwards."
            )
        return digests(module, recurse=False)

    agreed("sequence_parallel", check, group)


def _change(module: nn.Module, group: Group) -> None:
    """Let a module's forward read its parameters through a mapping that sums their gradients."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = type(self).forward
        if not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        mapped = {
            name: copy_to_tensor_model_parallel_region(parameter, group=group.process_group)
            for name, parameter in self.named_parameters(recurse=False, remove_duplicate=False)
        }
        try:
            vars(self).update(mapped)  # attributes hide parameters of the same names
            return plain(self, *args, **kwargs)
        finally:  # readers outside forward get the parameters themselves
            for name in mapped:
                del vars(self)[name]

    module.forward = MethodType(forward, module)  # a method, so that copies have their own
    vars(module)["_sums_gradients"] = True
