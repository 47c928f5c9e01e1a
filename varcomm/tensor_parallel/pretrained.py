"""Methods of transformers models that would be wrong on a sharded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.digest import differing, digest
from varcomm.sharding import shard_spec
from varcomm.sharding.tied import named_tensors
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from varcomm.tensor_parallel.linear import ColumnParallelLinear
from varcomm.transport.agreement import agree, share
from varcomm.transport.failure import spans
from varcomm.transport.group import Group

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def guard(module: nn.Module) -> None:
    """Replace methods of a sharded model that read its weights as if they were full tensors.

    They are attributes of the model and bound to it, so a deep copy has its own. A second call
    adds only checks of a head that was sharded since the first.
    """
    for model in pretrained_models(module):
        if not any(shard_spec(parameter) for parameter in model.parameters()):
            continue
        guarded: set[str] = vars(model).setdefault("_guarded", set())
        if not guarded:
            for name in _own_methods(model):
                vars(model)[name] = MethodType(_METHODS[name], model)
            guarded.add("methods")
        head = end(model, "output")
        if not _is_sharded(head):
            continue
        if has_causal_loss(model):
            model.loss_function = _CausalLoss(head)
        elif "labels" not in guarded:
            name = next(name for name, layer in model.named_modules() if layer is head)
            model.register_forward_pre_hook(partial(_refuse_labels, name), with_kwargs=True)
            guarded.add("labels")


def check_guard(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Raise ArgumentError if :func:`guard` will not fit, once `made` stand for modules by id."""
    for model in pretrained_models(module):
        parts, kind = list(model.modules()), type(model).__name__
        head: Any = end(model, "output")
        if _is_sharded(made.get(id(head), head)) and all(layer is not head for layer in parts):
            raise ArgumentError(
                f"{kind}.get_output_embeddings() returns a {type(head).__name__} that is "
                f"not a submodule of this {kind}. Register the head as a submodule, or shard it "
                "with gather_output=True."
            )
        sharded = any(id(layer) in made for layer in parts)
        if not sharded or "_guarded" in vars(model):
            continue
        if own := [name for name in _own_methods(model) if name in vars(model)]:
            raise ArgumentError(
                f"{own[0]} was set on this {kind}, and sharding would replace it. Delete it, and "
                "set it again after parallelize."
            )


def pretrained_models(module: nn.Module) -> Iterator[Any]:
    """Return the models of transformers in a module, with itself."""
    return (model for model in module.modules() if hasattr(model, "save_pretrained"))


def end(model: Any, side: str) -> Any:
    """Return the layer of ids at the "input" or "output" of a model; None if it has none."""
    try:
        return getattr(model, f"get_{side}_embeddings", lambda: None)()
    except NotImplementedError:  # a model with several towers
        return None


# Causal models without a tp_plan whose forward calls `loss_function`.
_CAUSAL = (
    *("GPT2LMHeadModel", "BertLMHeadModel", "ElectraForCausalLM"),
    *("RobertaForCausalLM", "XLMRobertaForCausalLM"),
)


def has_causal_loss(model: Any) -> bool:
    """Return whether a model is known to compute the loss of next tokens with ``loss_function``.

    Causal models whose class has a tp_plan do. Others may call a cross-entropy of their own, as may
    the forward of a subclass.
    """
    base: Any = next(each for each in type(model).__mro__ if "forward" in vars(each))
    planned = "_tp_plan" in vars(base) and "labels" in signature(base.forward).parameters
    known = base.__name__ in _CAUSAL or (planned and base.__name__.endswith("ForCausalLM"))
    replaced = not isinstance(vars(model).get("_loss_function"), _CausalLoss | None)
    usual = getattr(model, "loss_type", None) in (None, "ForCausalLM") and not replaced
    return known and usual and base.__module__.startswith("transformers.")


def _own_methods(model: Any) -> list[str]:
    return [name for name in _METHODS if hasattr(model, name)]


def _is_sharded(head: Any) -> bool:
    """Return whether a head returns the logits of this rank's ids only."""
    return isinstance(head, ColumnParallelLinear) and not head.gather_output


def refuse_dropout(module: nn.Module) -> None:
    """Refuse forwards with active dropout, which would draw other numbers on each rank.

    Each module that reads a rate refuses, its own or that of a child, so that calls of inner
    modules are refused too. Rates are read in each forward: they can be changed after sharding.
    """
    model = type(module).__name__, getattr(module, "config", module)
    for name, layer in module.named_modules():
        rates = [key for key, rate in vars(layer).items() if isinstance(rate, float)]
        places = [("", key) for key in rates if _is_dropout(key)]
        inner = ("", layer), *layer.named_children()
        places += [(child, "p") for child, each in inner if isinstance(each, _DROPOUTS)]
        if places:
            layer.register_forward_pre_hook(partial(_check_dropout, *model, name, places))


def _is_dropout(name: str) -> bool:
    return any(word in name for word in ("dropout", "pdrop", "layerdrop"))


def _check_dropout(
    model: str, config: Any, name: str, places: Sequence[tuple[str, str]], layer: Any, args: Any
) -> None:
    """Raise ArgumentError if dropout is active in one of the `places`: children and attributes."""
    for child, key in places:
        owner: Any = getattr(layer, child, None) if child else layer
        if (getattr(owner, key, 0.0) or 0.0) <= 0 or not owner.training:  # replaced, or no rate
            continue
        rates = vars(config).items()
        fields = [k for k, v in rates if _is_dropout(k) and isinstance(v, float) and v > 0]
        place = ".".join(word for word in (name, child, key) if word)
        raise ArgumentError(
            f"{model} is sharded and trains with dropout ({place}), for which each rank draws "
            "other numbers, so that replicated activations would differ. Set "
            f"{', '.join(fields) or 'dropout'} to 0 in the config before you make the model."
        )


def _refuse_labels(name: str, model: Any, args: Any, kwargs: Any) -> None:
    """Refuse labels of a model that computes its loss from the logits of all ids."""
    given = signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
    if given.get("labels", kwargs.get("labels")) is not None:  # also of a forward with **kwargs
        raise ArgumentError(
            f"{type(model).__name__}: labels would be compared with the logits of this rank's ids, "
            f"because the plan shards the head {name!r}. Plan it as functools.partial("
            "ColumnParallelLinear.from_linear, gather_output=True), or leave out labels and pass "
            "the logits to vocab_parallel_cross_entropy."
        )


def _save_pretrained(
    self: Any, save_directory: Any, *, state_dict: Any = None, **options: Any
) -> None:
    """Write full tensors on the first rank of the sharded parameters' group; collective.

    With ``is_main_process=False`` this rank takes part and writes nothing.
    """
    sharded = [(p, s, names) for p, names in named_tensors(self) if (s := shard_spec(p))]
    group, main = sharded[0][1].group, options.pop("is_main_process", True)
    writes = main and all(spec.group.rank == 0 for _, spec, _ in sharded)

    def check() -> None:
        for name, spec in ((name, spec) for _, spec, names in sharded for name in names):
            given = None if state_dict is None else state_dict.get(name)
            if given is not None and given.shape[spec.dim] != spec.total:
                raise ArgumentError(
                    f"state_dict[{name!r}] has shape {tuple(given.shape)}, this rank's part of "
                    f"{spec.total} rows along dim {spec.dim}. Leave out state_dict."
                )

    agree("save_pretrained", check, group)
    whole = dict(self.state_dict() if state_dict is None else state_dict)
    if state_dict is None:
        for parameter, spec, names in sharded:
            gathered = spec.gather(parameter.detach(), dst=0)
            whole |= dict.fromkeys(names, gathered.cpu() if spec.group.rank == 0 else gathered)

    def write() -> None:
        if writes:
            type(self).save_pretrained(self, save_directory, state_dict=whole, **options)

    agree("save_pretrained", write, group)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate tokens if inputs are identical on all ranks and, to sample, random numbers too.

    A head with the logits of this rank's ids is refused.
    """
    if _is_sharded(end(self, "output")):
        raise ArgumentError(
            "generate: the head returns the logits of this rank's ids only, so tokens would be "
            "wrong. Shard the model with gather_output=True."
        )
    specs = [spec for parameter in self.parameters() if (spec := shard_spec(parameter))]
    device = next(self.parameters()).device

    def described() -> dict[str, Any]:
        inputs = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
        plain = Tensor | str | int | float
        found: dict[str, Any] = {
            name: str(digest(value)) for name, value in inputs.items() if isinstance(value, plain)
        }
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or getattr(self, "generation_config", None)
        samples = kwargs.get("do_sample")
        if getattr(config, "do_sample", None) if samples is None else samples:
            cuda = device.type == "cuda"
            state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
            found[_STATE] = str(digest(state))
        return found

    group: Group = specs[0].group
    if group.size > 1:
        others, names = differing(share("generate", described, group))
        if others:
            fix = (
                "Call torch.manual_seed(seed) with the same seed on all ranks before generate."
                if names == [_STATE]
                else "Pass the same inputs and options on all ranks."
            )
            raise DisagreementError(
                f"generate: ranks would choose different tokens, because {', '.join(names)} of "
                f"ranks {spans(others)} differ from rank 0. {fix}"
            )
    return type(self).generate(self, *args, **kwargs)


_STATE = "the state of torch's random numbers"


def _refusal(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(f"{name}: the model is sharded. Call {name} before parallelize.")

    return refuse


_REFUSED = (
    *("resize_token_embeddings", "add_adapter", "load_adapter", "tie_weights"),
    *("init_weights", "initialize_weights", "_init_weights"),
)
_METHODS: dict[str, Any] = {"save_pretrained": _save_pretrained, "generate": _generate} | {
    name: _refusal(name) for name in _REFUSED
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
