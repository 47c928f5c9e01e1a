"""Sharded weights of layers: how they are described, agreed on, made, marked and converted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from varcomm._torch_private import Module
from varcomm.errors import ArgumentError
from varcomm.ops.digest import digest, require_equal
from varcomm.sharding import ShardSpec, mark, shard_spec
from varcomm.sizes import ShardSizes, at_least, checked_sizes
from varcomm.tensor_parallel.init import Fill, drawing, initialised, numbers_of_first
from varcomm.transport.agreement import agree, agree_and_share
from varcomm.transport.call_log import Layer
from varcomm.transport.group import Group, GroupLike, resolve

# Values of an option, the default first.
FLAG = (True, False)

# Options of all layers, and their defaults.
_OPTIONS = {
    **{"init": None, "device": None, "dtype": None},
    **{"sequence_sizes": None, "sequence_dim": 0, "multiple_of": 1},
}

# The usual source of hooks in transformers models.
AFTER = "Call gradient_checkpointing_enable() after parallelize."

# Rows per rank; for several fused blocks, those of each block.
Sizes = Sequence[int] | Sequence[Sequence[int]]

# The values of each option, the default first.
Options = Mapping[str, Sequence[bool | str | None]]


def agreed(
    what: str,
    arguments: Callable[[], Mapping[str, Any]],
    group: Group,
    of_first: Callable[[], Any] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return checked arguments that are identical on all ranks; collective.

    `arguments` checks them and returns them by name; their ``repr`` is compared, in one round of
    messages. With them comes ``of_first()`` of the group's first rank, a plain value. All ranks
    raise if `arguments` raised on one of them, or if they are not identical.
    """

    def described(checked: Mapping[str, Any]) -> tuple[dict[str, str], Any]:
        found = {name: repr(value) for name, value in checked.items()}
        return found, None if of_first is None else of_first()

    checked, shared = agree_and_share(what, arguments, described, group)
    require_equal(what, [given for given, _ in shared])
    return dict(checked), shared[0][1]


def checked_number(
    value: Any, name: str, where: str, kind: str, fits: Callable[[Any], bool]
) -> None:
    """Raise ArgumentError unless `value` is a number that fits; `kind` describes it."""
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        raise ArgumentError(f"{where}{name} must be {kind}; got {value!r}.")


def checked_choice(value: object, name: str, where: str, choices: Sequence[object]) -> None:
    """Raise ArgumentError unless `value` is one of the choices; 1 is not True."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        allowed = " or ".join(map(repr, choices))
        raise ArgumentError(f"{where}{name} must be {allowed}; got {value!r}.")


def lost_state(layer: nn.Module) -> list[str]:
    """Return the attributes with hooks, buffers and children, which a replacement would lose."""
    plain = vars(nn.Linear(1, 1, device="meta"))
    entries = {k: (vars(layer).get(k) or {}).values() for k, usual in plain.items() if usual == {}}
    return [k for k, each in entries.items() if any(not isinstance(x, FeatureCheck) for x in each)]


def digests(layer: nn.Module, recurse: bool = True) -> dict[str, Any]:
    """Return digests of a module's parameters, by name, which ranks can compare."""
    named = layer.named_parameters(recurse=recurse, remove_duplicate=recurse)
    return {name: (digest(parameter), parameter.requires_grad) for name, parameter in named}


def random_seed() -> int:
    """Return a seed that the default generator draws."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def in_log(layer: nn.Module, group: Group) -> Layer:
    """Return the name of a layer by its number in the group; ranks make layers in one order."""
    number = group.auxiliary["layers"] = group.auxiliary.get("layers", 0) + 1
    return Layer(f"{type(layer).__name__}, the sharded layer {number} of the group")


@dataclass(frozen=True)
class FeatureCheck:
    """Pre-hook of a plain linear layer in a sharded model: refuse this rank's part of features."""

    name: str  # of the layer
    widths: frozenset[int]  # of this rank's outputs of layers that have as many features

    def __call__(self, layer: nn.Linear, args: tuple[Any, ...]) -> None:
        """Raise ArgumentError if a layer gets this rank's outputs of a column-parallel layer."""
        x = args[0] if args else None
        width = x.shape[-1] if isinstance(x, Tensor) and x.dim() else None
        if width != layer.in_features and width in self.widths:
            raise ArgumentError(
                f"{self.name!r} is not sharded and has {layer.in_features} inputs; got {width}, "
                "this rank's outputs of a column-parallel layer. Add "
                f"{self.name!r}: 'row' to the plan, or plan the column-parallel layer as "
                "functools.partial(ColumnParallelLinear.from_linear, gather_output=True)."
            )


class MarkedModule(Module):
    """Module whose parameters carry a :class:`ShardSpec` and keep it when torch replaces them."""

    group: Group
    _specs: Mapping[str, ShardSpec]  # of the sharded parameters, by name
    _in_log: Layer

    def __init__(self) -> None:
        super().__init__()
        self._specs = {}
        # ``assign=True`` replaces parameters
        self.register_load_state_dict_post_hook(_mark_loaded)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.after_conversion()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and add it to the calls that ranks compare if it communicates."""
        if self.group.size > 1 and parametrize.is_parametrized(self):
            raise ArgumentError(
                f"{self._in_log.name} has a parametrization, which sees this rank's part alone. "
                "Remove it before the layer is sharded, with leave_parametrized=True."
            )
        if torch.compiler.is_compiling():
            self._in_log.is_compiled = self.group.compiles = True
            return super().__call__(*args, **kwargs)
        log = self.group.log
        count = 0 if log is None else log.count
        y = super().__call__(*args, **kwargs)
        # one without messages in forward has them in backward
        if log is not None and (log.count != count or getattr(y, "requires_grad", True)):
            log.add_layer(self._in_log)
        return y

    def after_conversion(self) -> None:
        """Mark parameters, which torch may have replaced."""
        for name, spec in self._specs.items():
            if (parameter := getattr(self, name)) is not None:
                mark(parameter, spec)

    def _keep_parts(self, layer: nn.Module) -> None:
        """Keep this rank's parts of another module's own parameters, in memory of their own."""
        for name, whole in layer.named_parameters(recurse=False):
            part = nn.Parameter(self._part_of(name, whole.detach()), whole.requires_grad)
            self.register_parameter(name, part)
        self.after_conversion()
        self.train(layer.training)

    def _part_of(self, name: str, whole: Tensor) -> Tensor:
        spec = self._specs.get(name)
        return whole.clone() if spec is None else spec.shard(whole)


def _mark_loaded(module: Any, incompatible_keys: object) -> None:
    module.after_conversion()


@dataclass(frozen=True)
class Layout:
    """Arguments of a sharded layer, checked and identical on all ranks."""

    extents: Mapping[str, int]  # of the full weight, by name
    spec: ShardSpec  # of the weight
    options: Mapping[str, Any]  # and `sequence_sizes`, `sequence_dim`
    init: Fill | None  # draws the weight, by default as torch does
    device: torch.device | str | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        layer: type[ShardedModule],
        extents: Mapping[str, int],
        sizes: Sizes | None,
        group: GroupLike,
        given: Mapping[str, Any],
    ) -> Self:
        """Return the layout of this rank's arguments, or raise ArgumentError."""
        ranks, dim, choices = resolve(group), layer._dim, layer._options
        lengths = {name: at_least(0, length, name) for name, length in extents.items()}
        name, length = [*lengths.items()][dim]
        options = {**_OPTIONS, **{option: values[0] for option, values in choices.items()}, **given}
        unit = at_least(1, options.pop("multiple_of"), "multiple_of")
        if length % unit:
            raise ArgumentError(f"{name} must be a multiple of multiple_of, {unit}; got {length}.")
        rows = ShardSizes.balanced(length, ranks.size, unit) if sizes is None else sizes
        spec = ShardSpec.of(rows, dim, group)
        if spec.total != length:
            raise ArgumentError(f"sizes {rows!r} sum to {spec.total}, but {name} is {length}.")
        if cut := [n for block in spec.blocks for n in block if n % unit]:
            raise ArgumentError(
                f"sizes must be multiples of multiple_of, {unit}; got {rows!r}: {cut[0]} rows "
                "would cut through a head. Pass whole heads per rank."
            )
        if unknown := given.keys() - choices.keys() - _OPTIONS.keys():
            raise ArgumentError(f"{min(unknown)!r} is not an option of {layer.__name__}.")
        for option, values in choices.items():
            checked_choice(options[option], option, "", values)
        options["sequence_dim"] = at_least(0, options["sequence_dim"], "sequence_dim")
        if options["sequence_sizes"] is not None:
            parts = checked_sizes(options["sequence_sizes"], "sequence_sizes", ranks.size)
            options["sequence_sizes"] = ShardSizes(parts)
        init, device, dtype = (options.pop(option) for option in ("init", "device", "dtype"))
        fill = None if init is None else drawing(init)
        like = torch.empty(0, dtype=dtype, device=device)
        if not (like.is_floating_point() or like.is_complex()):
            raise ArgumentError(f"dtype must be floating point or complex; got {dtype}.")
        return cls(lengths, spec, options, fill, device, like.dtype)


class ShardedModule(MarkedModule):
    """Parallel layer that is made like the torch layer that it replaces."""

    spec: ShardSpec
    sequence_sizes: ShardSizes | None
    sequence_dim: int
    _layout: Layout
    # options and their values, the default first
    _options: ClassVar[Options] = {}
    _dim: ClassVar[int] = 0  # sharded dimension of the weight
    _sharded: ClassVar[tuple[str, ...]] = ("weight",)  # names of the sharded parameters
    _plain: ClassVar[Any]  # the torch layer in one process
    _copied: ClassVar[tuple[str, ...]]  # its attributes that are arguments here
    # optional parameters, which a layer gets later
    _fixed: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        extents: Mapping[str, int],
        sizes: Sizes | None,
        group: GroupLike,
        options: Mapping[str, Any],
        more: Callable[[Layout], Mapping[str, Any]],
        names: Collection[str] = ("weight",),
    ) -> None:
        """Agree on the layout, whose extents and options become attributes; draw parameters.

        ``more(layout)`` checks and returns further arguments that must be identical.
        """

        def check() -> dict[str, Any]:
            layout = self._layout = Layout.of(type(self), extents, sizes, group, options)
            words = {"sizes": layout.spec.blocks, "dtype": layout.dtype}
            words["an init"] = layout.init is not None
            return {**layout.extents, **layout.options, **words, **more(layout)}

        super().__init__()
        seed = agreed(type(self).__name__, check, resolve(group), random_seed)[1]
        self.spec, self.group = self._layout.spec, self._layout.spec.group
        self._in_log = in_log(self, self.group)
        self._specs = dict.fromkeys(self._sharded, self.spec)
        for name, value in {**self._layout.extents, **self._layout.options}.items():
            setattr(self, name, value)
        # a device may be missing or full on one rank, and `init` is the caller's
        drawn = agree(type(self).__name__, lambda: self._drawn(seed, names), self.group)
        for name in ("weight", *self._fixed):
            self.register_parameter(name, nn.Parameter(drawn[name]) if name in drawn else None)
        self.after_conversion()

    def reset_parameters(self) -> None:
        """Draw parameters as the torch layer in one process draws them; collective.

        All ranks draw what the default generator of the group's first rank draws. Meanwhile, each
        rank holds the full parameters of this layer. A layer made with `init` draws as its
        constructor does.
        """
        ranks, known = self.group, dict(self.named_parameters(recurse=False))
        own = {name: known[name] for name in ("weight", *self._fixed) if name in known}
        how: Any = {"device": self.weight.device, "dtype": self.weight.dtype}

        def as_in_one_process() -> dict[str, Tensor]:
            arguments = {key: getattr(self, key) for key in self._copied}
            arguments |= {name: name in own for name in self._fixed}
            whole = self._plain(**arguments, **how).named_parameters()
            return {name: self._part_of(name, values.detach()) for name, values in whole}

        if self._layout.init is None:
            with numbers_of_first(ranks, how["device"]):
                drawn = agree("reset_parameters", as_in_one_process, ranks)
        else:
            seed = agreed("reset_parameters", dict, ranks, random_seed)[1]
            self._layout = replace(self._layout, **how)
            drawn = agree("reset_parameters", lambda: self._drawn(seed, own), ranks)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(drawn[name])

    def _drawn(self, seed: int, names: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's parts of initial parameters of these names."""
        layout, drawn = self._layout, dict[str, Tensor]()
        shape = tuple(layout.extents.values())  # of the weight; a bias has one dimension
        for number, name in enumerate(names):
            fill = layout.init if layout.init is not None and name == "weight" else self._fill
            # the bias from another seed, so that it does not repeat the weight
            how = fill, seed + number, layout.dtype, layout.device
            drawn[name] = initialised(shape[: 2 - number], self._specs.get(name), *how)
        return drawn

    @abstractmethod
    def _fill(self, tile: Tensor, generator: torch.Generator) -> object:
        """Draw initial elements as the torch layer does."""

    @classmethod
    def _replacing(
        cls,
        word: str,
        layer: Any,
        options: Mapping[str, Any],
        group: GroupLike,
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> Self:
        """Return the parallel layer with this rank's parts of a torch layer's parameters.

        All ranks raise ArgumentError if `layer` is of another kind, or has hooks, a parametrization
        or its own ``forward``, which the replacement would lose, or if an option is unknown.
        """
        name, kind = f"{cls.__name__}.from_{word}", cls._plain
        arguments: dict[str, Any] = {}

        def check() -> dict[str, Any]:
            if not isinstance(layer, kind):
                got = type(layer).__name__
                raise ArgumentError(f"{word} must be a torch.nn.{kind.__name__}; got {got}.")
            lost = lost_state(layer)
            own_forward = getattr(layer.forward, "__func__", None) is not kind.forward
            if lost or own_forward or parametrize.is_parametrized(layer):
                raise ArgumentError(
                    f"{word}, of class {type(layer).__name__}, has hooks, other state ({lost}), a "
                    "parametrization or a forward of its own, which would be lost. Remove it. The "
                    f"parallel layer accepts hooks, and no parametrization. {AFTER}"
                )
            same = {key: getattr(layer, key) for key in cls._copied} | dict(cls._fixed)
            drawn = {"init": None, "device": "meta", "dtype": layer.weight.dtype}
            arguments.update(**same, **drawn, group=group, **options)  # refuses any of these twice
            return {**digests(layer), **more()}

        # nothing is drawn here, so the caller's generator keeps its state
        with torch.random.fork_rng(devices=[]):
            agreed(name, check, resolve(group))
            made = cls(**arguments)
        made._keep_parts(layer)
        return made

    def _unsharded(self) -> Any:
        """Return the torch layer with full parameters, on every rank; collective."""
        arguments = {key: getattr(self, key) for key in self._copied}
        layer = self._plain(**arguments, **self._fixed, device="meta")
        for name, own in self.named_parameters(recurse=False):
            values = own.detach()
            whole = self.spec.gather(values) if name in self._specs else values.clone()
            setattr(layer, name, nn.Parameter(whole, own.requires_grad))
        return layer.train(self.training)

    def extra_repr(self) -> str:
        """Return the arguments of the full layer, sizes and options."""
        words = {name: getattr(self, name) for name in (*self._copied, *self._options)}
        words["sizes"] = [list(block) for block in self.spec.blocks]
        return ", ".join(f"{name}={value}" for name, value in words.items())


def param_is_not_tensor_parallel_duplicate(param: Tensor, group: GroupLike = None) -> bool:
    """Return whether this rank counts a parameter, so that all ranks together count it once.

    Parameters
    ----------
    param : torch.Tensor
        A parameter of any shape; sharded if :func:`shard_spec` returns a spec.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    bool
        True for a sharded parameter, and for a replicated one on the group's first rank.

    See Also
    --------
    grad_norm, ShardSpec

    Notes
    -----
    Communication: none.

    In one process: True for all parameters.

    Examples
    --------
    >>> import torch, varcomm, varcomm.tensor_parallel as tp
    >>> bias = torch.nn.Parameter(torch.zeros(4))
    >>> varcomm.launch(lambda rank: tp.param_is_not_tensor_parallel_duplicate(bias), 2)
    [True, False]
    """
    return shard_spec(param) is not None or resolve(group).rank == 0
