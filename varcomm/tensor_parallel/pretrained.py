"""Methods of transformers models that would be wrong on a sharded model."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from varcomm.tensor_parallel.linear import ColumnParallelLinear
from varcomm.transport.group import Group


def guard(module: nn.Module, group: Group) -> None:
    """Replace methods of a sharded model that read its weights as if they were whole.

    They are attributes of the model and bound to it, so a deep copy has its own.
    """
    for model in module.modules():
        if not hasattr(model, "save_pretrained") or "save_pretrained" in vars(model):
            continue
        methods: dict[str, Any] = {"save_pretrained": _save_pretrained}
        methods |= {name: _refusals[name] for name in _refusals if hasattr(model, name)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, ColumnParallelLinear) and not head.gather_output:
            methods["generate"] = _generate
            if str(getattr(model, "loss_type", "")).startswith("ForCausalLM"):
                model.loss_function = _CausalLoss(head)
        for name, method in methods.items():
            vars(model)[name] = MethodType(method, model)


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather the parameters and write full tensors on the group's first rank; collective."""
    raise ArgumentError("save_pretrained would write this rank's parts as if they were whole.")


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
