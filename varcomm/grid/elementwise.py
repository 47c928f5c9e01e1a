"""Rules of functions that compute each element from those at its place, and of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from varcomm.errors import ArgumentError
from varcomm.grid.field import (
    RULES,
    Field,
    alias,
    common,
    counting_once,
    map_plain,
    place_of,
    placed,
    plain,
    refused,
    rule,
    wrap,
    write,
)
from varcomm.grid.reductions import without
from varcomm.ops.all_reduce import all_reduce

Func = Callable[..., Any]


@rule(
    "add sub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn sqrt rsqrt",
    "rsub rdiv rpow floordiv rfloordiv rmod invert subtract square",
    "multiply divide negative absolute exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos",
    "atan atan2 sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma",
    "reciprocal floor ceil round trunc frac clamp clamp_min clamp_max clip lerp addcmul addcdiv",
    "maximum minimum fmax fmin eq ne lt le gt ge isnan isinf isfinite logical_and logical_or",
    "logical_not logical_xor and or xor bitwise_and bitwise_or bitwise_xor bitwise_not",
    "masked_fill nan_to_num heaviside hypot sinc xlogy relu relu6 gelu silu elu selu celu mish",
    "softplus softsign leaky_relu rrelu hardtanh hardsigmoid hardswish hardshrink softshrink",
    "tanhshrink threshold log_sigmoid dropout alpha_dropout clone detach float double",
    "half bfloat16 byte int long bool cpu cuda real imag conj angle complex polar",
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like bernoulli",
    "isclose signbit positive deg2rad rad2deg copysign resolve_conj resolve_neg",
    several=True,
)
def elementwise(func: Func, *args: Any, **kwargs: Any) -> Any:
    """Compute with each rank's own rows of all operands, which are aligned if they differ."""
    layout = common([*args, *kwargs.values()])
    local = [placed(one, layout) for one in args]
    made = func(*local, **{name: placed(one, layout) for name, one in kwargs.items()})
    out = wrap(made, layout)
    return alias(out, args[0]) if local and made is local[0] else out


@rule("where", several=True)
def _where(func: Func, *args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) < 3:
        raise refused("where with one argument, which lists places,")
    return elementwise(func, *args, **kwargs)


@rule("cross linalg_cross", several=True)
def _cross(func: Func, x: Any, other: Any, dim: int | None = None) -> Any:
    if dim is None:  # torch.cross takes the first dimension of length 3
        first = [at for at, n in enumerate(x.shape) if n == 3 and func.__name__ == "cross"]
        dim = first[0] if first else -1
    if place_of(dim, x.dim()) - x.dim() in common([x, other]).by_dim:
        raise refused(f"{func.__name__} along a split dimension")
    return elementwise(func, x, other, dim=dim)


def _attribute(func: Func, x: Any) -> Any:
    return wrap(func(plain(x)), x.grid_layout)


RULES.update({f"get {name}": _attribute for name in ("real", "imag", "data")})


@rule("to type type_as deepcopy", several=True)
def _converted(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert own rows; another tensor only says to which dtype and device."""
    if not isinstance(x, Field):
        return func(x, *map_plain(args), **kwargs)
    if func is torch.Tensor.__deepcopy__:
        copy = wrap(plain(x).detach().clone(), x.grid_layout).requires_grad_(x.requires_grad)
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(copy, x.requires_grad)
        return copy
    local = plain(x)
    made = func(local, *map_plain(args), **kwargs)
    out = wrap(made, x.grid_layout)
    return alias(out, x) if made is local else out


@rule("new_empty new_zeros new_ones new_full new_tensor can_cast result_type", several=True)
def _ordinary(func: Func, *args: Any, **kwargs: Any) -> Any:
    """Return an ordinary tensor of the shape that is asked for, whole on every rank."""
    return func(*map_plain(args), **kwargs)


@rule(
    "add_ sub_ mul_ div_ pow_ neg_ abs_ exp_ sqrt_ rsqrt_ clamp_ clamp_min_ clamp_max_ relu_",
    "sigmoid_ tanh_ leaky_relu_ elu_ hardtanh_ masked_fill_ zero_ fill_ copy_ addcmul_ addcdiv_",
    "lerp_ ior iand normal_ uniform_ bernoulli_ dropout_ celu_",
    "selu_ square_ floor_ round_ remainder_ floor_divide_ requires_grad_ nan_to_num_",
    "threshold_",
    several=True,
)
def _in_place(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change own rows in place; other operands are aligned with them."""
    others = {name: placed(one, x.grid_layout) for name, one in kwargs.items()}
    write(func, x, *[placed(one, x.grid_layout) for one in args], **others)
    return x


@rule("dropout1d dropout2d dropout3d feature_dropout")
def _feature_dropout(
    func: Func, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop whole channels, on all ranks those of the first."""
    if x.grid_layout.at(x.dim()).keys() & {0, 1}:
        raise refused(func.__name__)
    features = x.new_ones([*x.shape[:2], *[1] * (x.dim() - 2)])
    return x * func(wrap(features, x.grid_layout.having({}, 0)), p, training)


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss",
    "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cross_entropy nll_loss",
)


@rule(*_LOSSES, several=True)
def _loss(func: Func, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    """Return the loss of each element, or its sum or mean over all ranks, whole."""
    name, (x, *others) = func.__name__, args
    if reduction not in ("none", "mean", "sum") and (name, reduction) != ("kl_div", "batchmean"):
        raise ArgumentError(f"{name}: {reduction!r} is not a valid value for reduction.")
    if any(kwargs.get(word) is not None for word in ("size_average", "reduce")):
        raise refused(f"{name} with size_average or reduce", "Pass reduction=.")
    if name in ("cross_entropy", "nll_loss"):
        return _class_loss(func, x, *others, reduction=reduction, **kwargs)
    out = elementwise(func, x, *others, reduction="none", **kwargs)
    if name == "kl_div" and reduction == "batchmean":
        return out.sum() / x.shape[0]
    weight = kwargs.get("weight")
    if name in ("mse_loss", "l1_loss") and weight is not None and reduction == "mean":
        return out.sum() / weight.sum()
    return out if reduction == "none" else getattr(out, reduction)()


def _class_loss(
    func: Func, x: Any, target: Any, *others: Any, reduction: str, **kwargs: Any
) -> Any:
    """Lay the target out as samples and points; classes are along dimension 1, or the only one."""
    if not isinstance(x, Field):
        x = wrap(x, target.grid_layout.having({}, 0))
    classes = min(1, x.dim() - 1)
    if classes in x.grid_layout.at(x.dim()):
        raise refused(f"{func.__name__} of split classes")
    layout = without(x.grid_layout, x.dim(), [classes], False)
    shares = target.is_floating_point()  # of each class
    labels = placed(target, x.grid_layout if shares else layout)
    out = wrap(func(plain(x), labels, *others, reduction="none", **kwargs), layout)
    if reduction != "mean":
        return out if reduction == "none" else out.sum()
    if shares:
        return out.mean()
    weight, counted = kwargs.get("weight"), labels != kwargs.get("ignore_index", -100)
    weights = counted.to(out.dtype)
    if weight is not None:
        weights = weight[labels.masked_fill(~counted, 0)] * weights
    return out.sum() / wrap(weights, layout).sum()


def total(x: Tensor, field: Any) -> Tensor:
    """Sum a local value over all ranks of a field."""
    for group in field.grid_layout.groups:
        x = all_reduce(x, group=group.process_group)
    return x


@rule("backward", several=True)
def _backward(func: Func, x: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    """Begin with a gradient that counts once, not on each rank."""
    if func is torch.autograd.backward:
        raise refused(
            "torch.autograd.backward",
            "Call backward() of the loss, and checkpoint with use_reentrant=False.",
        )
    with counting_once([x]):
        func(plain(x), _seed(x, gradient), *args, **kwargs)


@rule("grad", several=True)
def _grad(func: Func, outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> Any:
    """Differentiate as one process does; the gradient of an ordinary tensor is this rank's part."""
    outs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    ins = [inputs] if isinstance(inputs, Tensor) else [*inputs]
    one = grad_outputs is None or isinstance(grad_outputs, Tensor)
    seeds = [grad_outputs] * len(outs) if one else grad_outputs
    seeds = [_seed(x, g) for x, g in zip(outs, seeds, strict=True)]
    if zeros := kwargs.pop("materialize_grads", False):
        kwargs["allow_unused"] = True
    # by edges: torch would switch rules off for fields, which a checkpoint calls again meanwhile
    with counting_once(outs):
        found = func([plain(x) for x in outs], [_edge(x) for x in ins], seeds, **kwargs)
    return tuple(
        torch.zeros_like(x) if g is None and zeros else _gradient(g, x)
        for g, x in zip(found, ins, strict=True)
    )


@torch.enable_grad()
def _edge(x: Any) -> Any:
    """Return where the gradient of a field arrives."""
    if not isinstance(x, Field) or not x.requires_grad:
        return plain(x)
    alias: Any = plain(x)
    return GradientEdge(*alias.grad_fn.next_functions[0])


def _seed(x: Any, gradient: Any) -> Any:
    if not isinstance(x, Field):
        return plain(gradient)
    if x.grid_layout.splits:
        if gradient is None:
            raise ArgumentError(
                "backward of a field that is split needs a gradient. Take grid.mean or grid.sum."
            )
        return placed(gradient, x.grid_layout)
    given = torch.ones_like(plain(x)) if gradient is None else plain(gradient)
    return given / x.grid_layout.ranks


def _gradient(found: Any, x: Any) -> Any:
    if found is None or not isinstance(x, Field):
        return plain(found)
    return wrap(plain(found) if x.grid_layout.splits else total(plain(found), x), x.grid_layout)
