"""Methods of transformers models that would be wrong on a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops.gather_v import gather_v
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from varcomm.tensor_parallel.linear import ColumnParallelLinear
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group


def guard(module: nn.Module, group: Group) -> None:
    """Replace methods of a sharded model that read its weights as if they were whole.

    They are attributes of the model and bound to it, so a deep copy has its own.
    """
    models: Iterator[Any] = module.modules()
    for model in models:
        if not hasattr(model, "save_pretrained") or "save_pretrained" in vars(model):
            continue
        methods: dict[str, Any] = {"save_pretrained": _save_pretrained}
        methods |= {name: _refusals[name] for name in _refusals if hasattr(model, name)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, ColumnParallelLinear) and not head.gather_output:
            methods["generate"] = _generate
            if getattr(model, "loss_type", None) in (None, "ForCausalLM"):
                model.loss_function = _CausalLoss(head)
        for name, method in methods.items():
            vars(model)[name] = MethodType(method, model)


def _save_pretrained(
    self: Any, save_directory: Any, *, state_dict: Any = None, **options: Any
) -> None:
    """Write full tensors on the first rank of the sharded parameters' group; collective."""
    sharded = {n: p for n, p in self.state_dict(keep_vars=True).items() if shard_spec(p)}
    specs = {name: shard_spec(p) for name, p in sharded.items()}
    group = next(spec.group for spec in specs.values() if spec is not None)
    options.pop("is_main_process", None)

    def check() -> None:
        for name, spec in specs.items():
            given = None if state_dict is None else state_dict.get(name)
            if spec is not None and given is not None and given.shape[spec.dim] != spec.total:
                raise ArgumentError(
                    f"state_dict[{name!r}] has shape {tuple(given.shape)}, this rank's part of "
                    f"{spec.total} rows along dim {spec.dim}. Leave out state_dict."
                )

    agree("save_pretrained", check, group)
    whole = dict(self.state_dict() if state_dict is None else state_dict)
    if state_dict is None:
        found: dict[int, Tensor] = {}  # parameters with several names, once
        for name, parameter in sharded.items():
            if id(parameter) not in found:
                found[id(parameter)] = _whole(parameter, group)
            whole[name] = found[id(parameter)]

    def write() -> None:
        if group.rank == 0:
            type(self).save_pretrained(self, save_directory, state_dict=whole, **options)

    agree("save_pretrained", write, group)


@torch.no_grad()
def _whole(parameter: Tensor, group: Group) -> Tensor:
    """Return a full parameter on the CPU of the first rank, and no rows on others."""
    spec = shard_spec(parameter)
    assert spec is not None
    pg = group.process_group
    gathered = gather_v(parameter.detach(), spec.sizes, spec.dim, group=pg)
    return spec.ordered(gathered, spec.dim).cpu() if group.rank == 0 else gathered


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to choose tokens among this rank's ids."""
    raise ArgumentError(
        "generate: the head returns the logits of this rank's ids only, so tokens would be wrong. "
        "Shard the model with gather_output=True."
    )


def _refusal(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(f"{name}: the model is sharded. Call {name} before parallelize.")

    return refuse


_refusals = {
    name: _refusal(name)
    for name in ("resize_token_embeddings", "add_adapter", "load_adapter", "tie_weights")
}


@dataclass
class _CausalLoss:
    """The loss of next tokens from sharded logits, with the arguments of transformers' own."""

    head: ColumnParallelLinear

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        spec = self.head.spec
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            spec.sizes,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            group=spec.group.process_group,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
