"""What both kinds of parallel linear modules are: parameters, and the way from and to a Linear."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from math import sqrt
from typing import Any, ClassVar, Self

import torch
from torch import nn

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import digest
from varcomm.sharding import ShardSpec, mark
from varcomm.sizes import ShardSizes, at_least, checked_sizes
from varcomm.tensor_parallel.agreement import agree_on_layer
from varcomm.tensor_parallel.initial import Fill, check_fill, initialised
from varcomm.tensor_parallel.replaced import check_plain
from varcomm.tensor_parallel.sharding import ShardedModule
from varcomm.transport.agreement import agree
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["ParallelLinear", "Sizes"]

# Rows of each rank; of several fused blocks, those of each block.
Sizes = Sequence[int] | Sequence[Sequence[int]]

_CHOICES = {"save": ("input", "gathered")}

# What the constructor takes, and from_linear finds at the Linear.
_OF_LINEAR = {"in_features", "out_features", "bias", "device", "dtype", "init", "allocate_weight"}


class ParallelLinear(ShardedModule):
    """What both have in common: checked arguments, parameters, the way from and to a Linear."""

    _dim: ClassVar[int]  # of the weight, that is sharded
    _usual: ClassVar[dict[str, Any]]  # options that need no mention

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sizes: Sizes | None,
        sequence_sizes: Sequence[int] | None,
        init: Fill | None,
        group: GroupLike,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        flags: dict[str, bool],
        others: dict[str, Any],
    ) -> None:
        super().__init__()
        ranks, name = resolve(group), type(self).__name__

        def check() -> dict[str, Any]:
            for flag, value in flags.items():
                checked_flag(value, flag, "")
            features = (out_features, in_features)
            for what, n in zip(("out_features", "in_features"), features, strict=True):
                at_least(0, n, what)
            whole = features[self._dim]
            rows = ShardSizes.balanced(whole, ranks.size) if sizes is None else sizes
            self.spec = ShardSpec.of(rows, self._dim, group)
            if self.spec.total != whole:
                what = ("out_features", "in_features")[self._dim]
                raise ArgumentError(
                    f"sizes {rows!r} sum to {self.spec.total}, but {what} is {whole}."
                )
            self.sequence_sizes = (
                None
                if sequence_sizes is None
                else tuple(checked_sizes(sequence_sizes, "sequence_sizes", ranks.size))
            )
            check_fill(init)
            for option, value in others.items():
                if value not in _CHOICES[option]:
                    choices = " or ".join(f'"{choice}"' for choice in _CHOICES[option])
                    raise ArgumentError(f"{option} must be {choices}; got {value!r}.")
            like = torch.empty(0, dtype=dtype, device=device)
            if not (like.is_floating_point() or like.is_complex()):
                raise ArgumentError(f"dtype must be one of floats; got {dtype}.")
            self.in_features, self.out_features = int(in_features), int(out_features)
            return {
                "in_features": self.in_features,
                "out_features": self.out_features,
                "sizes": self.spec.blocks,
                "sequence_sizes": self.sequence_sizes,
                "dtype": like.dtype,
                "an init": init is not None,
                **flags,
                **others,
            }

        _, seed = agree_on_layer(name, check, ranks)
        bound = 1 / sqrt(self.in_features) if self.in_features else 0.0

        def uniform(tile: torch.Tensor, generator: torch.Generator) -> None:
            tile.uniform_(-bound, bound, generator=generator)

        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

        def make() -> None:
            whole = (self.out_features, self.in_features)
            if flags["allocate_weight"]:
                weight = initialised(whole, self.spec, init or uniform, seed, dtype, device)
                self.weight = mark(nn.Parameter(weight), self.spec)
            if bias:
                spec = self._spec_of_bias()
                # from another seed, else elements would be those of the weight
                own = nn.Parameter(initialised(whole[:1], spec, uniform, seed + 1, dtype, device))
                self.bias = own if spec is None else mark(own, spec)

        # a device may be missing on one rank, or full, and `init` is the user's
        agree(name, make, ranks)

    @property
    def group(self) -> Group:
        """The ranks that share the weight."""
        return self.spec.group

    def _spec_of_bias(self) -> ShardSpec | None:
        return self.spec if self._dim == 0 else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: GroupLike = None, **options: Any) -> Self:
        """Make the parallel layer of a Linear that every rank has; collective.

        Parameters
        ----------
        linear : torch.nn.Linear
            The same on all ranks. It is not changed, and shares no memory with the result.
        group : ProcessGroup or DeviceMesh, optional
            The ranks that take part; None is the whole world.
        **options
            What the constructor takes beside features, bias, device and dtype.

        Raises
        ------
        ArgumentError
            On every rank, if `linear` is none on one of them, or options are wrong.
        DisagreementError
            On every rank, if weights differ.
        """
        ranks, what = resolve(group), f"{cls.__name__}.from_linear"
        kind: Any = cls  # which takes less than its base

        def check() -> dict[str, Any]:
            check_plain(linear, nn.Linear, "linear")
            known = signature(kind).parameters.keys() - _OF_LINEAR
            if unknown := [name for name in options if name not in known]:
                raise ArgumentError(f"{unknown[0]!r} is no option; there are {sorted(known)}.")
            parameters = linear.named_parameters()
            return {name: (digest(value), value.requires_grad) for name, value in parameters}

        agree_on_layer(what, check, ranks)
        with_bias, options = linear.bias is not None, {"group": group} | options
        made: Self = kind(
            linear.in_features,
            linear.out_features,
            False,
            allocate_weight=False,
            dtype=linear.weight.dtype,
            **options,
        )
        made.weight = made._kept(linear.weight, made.spec)
        made.bias = made._kept(linear.bias, made._spec_of_bias()) if with_bias else None
        return made.train(linear.training)

    def _kept(self, whole: torch.Tensor, spec: ShardSpec | None) -> nn.Parameter:
        own = whole.detach().clone() if spec is None else spec.shard(whole.detach())
        parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
        return parameter if spec is None else mark(parameter, spec)

    def to_linear(self) -> nn.Linear:
        """Gather the weight and return a Linear of the same function, on every rank; collective.

        Raises
        ------
        ArgumentError
            On every rank, if the layer has no weight of its own.
        """

        def check() -> torch.Tensor:
            if self.weight is None:
                raise ArgumentError("the layer has no weight of its own: allocate_weight=False.")
            return self.weight

        weight = agree(f"{type(self).__name__}.to_linear", check, self.group)
        linear: nn.Linear = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            linear.weight.copy_(self.spec.gather(weight.detach()))
            linear.weight.requires_grad_(weight.requires_grad)
            if self.bias is not None:
                spec, bias = self._spec_of_bias(), self.bias.detach()
                linear.bias.copy_(bias if spec is None else spec.gather(bias))
                linear.bias.requires_grad_(self.bias.requires_grad)
        return linear.train(self.training)

    def _weight(self, given: torch.Tensor | None, where: str) -> torch.Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise ArgumentError(
                f"{where}made with allocate_weight=False, the layer needs a weight in each call."
            )
        return weight

    def extra_repr(self) -> str:
        """Tell features, sizes and what is not as usual."""
        sizes = [list(block) for block in self.spec.blocks]
        words = [
            f"in_features={self.in_features}, out_features={self.out_features}",
            f"bias={self.bias is not None}, sizes={sizes if len(sizes) > 1 else sizes[0]}",
        ]
        if self.sequence_sizes is not None:
            words.append(f"sequence_sizes={list(self.sequence_sizes)}")
        options = ((name, getattr(self, name), usual) for name, usual in self._usual.items())
        words += [f"{name}={value!r}" for name, value, usual in options if value != usual]
        return ", ".join(words)
