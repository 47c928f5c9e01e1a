"""Sharded weights of layers: how they are described, agreed on, made, marked and converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import digest
from varcomm.sharding import ShardSpec, mark, shard_spec
from varcomm.sizes import ShardSizes, at_least, checked_sizes
from varcomm.tensor_parallel.init import Fill, initialised
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["param_is_not_tensor_parallel_duplicate"]

# Values of an option, by its name.
Choices = Mapping[str, Sequence[str]]

# Rows per rank; for several fused blocks, those of each block.
Sizes = Sequence[int] | Sequence[Sequence[int]]


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

    checked, told = agree_and_share(what, arguments, described, group)
    first, shared = told[0]
    for name in dict.fromkeys(name for given, _ in told for name in given):
        values = [given.get(name) for given, _ in told]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise DisagreementError(
                f"{what}: ranks disagree on {name}: rank 0 has {first.get(name)}; rank {others[0]} "
                f"has {values[others[0]]}."
            )
    return dict(checked), shared


def checked_number(
    value: Any, name: str, where: str, kind: str, fits: Callable[[Any], bool]
) -> None:
    """Raise ArgumentError unless `value` is a number that fits; `kind` describes it."""
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        raise ArgumentError(f"{where}{name} must be {kind}; got {value!r}.")


def checked_choice(value: object, name: str, where: str, choices: Sequence[str]) -> None:
    """Raise ArgumentError unless `value` is one of the choices."""
    if value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ArgumentError(f"{where}{name} must be one of {allowed}; got {value!r}.")


def random_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@dataclass(frozen=True)
class Layout:
    """Arguments that all sharded layers share; subclasses add the flags of their layers."""

    sizes: Sizes | None = None
    group: GroupLike = None
    sequence_sizes: Sequence[int] | None = None
    init: Fill | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    # the values of the fields of subclasses that are no flags
    choices: ClassVar[Choices] = {}

    @classmethod
    def own_names(cls) -> list[str]:
        """Return the names of the fields that a subclass adds."""
        common = {field.name for field in fields(Layout)}
        return [field.name for field in fields(cls) if field.name not in common]

    def checked(self, shape: Mapping[str, int], dim: int) -> tuple[ShardSpec, dict[str, Any]]:
        """Return how a weight is sharded, and all arguments; `shape` is by names of dimensions."""
        ranks = resolve(self.group)
        found = {name: at_least(0, length, name) for name, length in shape.items()}
        name = list(shape)[dim]
        rows = ShardSizes.balanced(found[name], ranks.size) if self.sizes is None else self.sizes
        spec = ShardSpec.of(rows, dim, self.group)
        if spec.total != found[name]:
            raise ArgumentError(f"sizes {rows!r} sum to {spec.total}, but {name} is {found[name]}.")
        sequence = self.sequence_sizes
        if sequence is not None:
            sequence = ShardSizes(checked_sizes(sequence, "sequence_sizes", ranks.size))
        if self.init is not None and not callable(self.init):
            raise ArgumentError(
                f"init must be a function init(tensor, generator); got {self.init!r}."
            )
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        if not (like.is_floating_point() or like.is_complex()):
            raise ArgumentError(f"dtype must be floating point or complex; got {self.dtype}.")
        own = {name: getattr(self, name) for name in self.own_names()}
        for name, value in own.items():
            if name in self.choices:
                checked_choice(value, name, "", self.choices[name])
            else:
                checked_flag(value, name, "")
        kept = {**found, "sequence_sizes": sequence, **own}
        others = {"sizes": spec.blocks, "dtype": like.dtype, "an init": self.init is not None}
        return spec, kept | others

    def draw(
        self, shape: Sequence[int], spec: ShardSpec | None, fill: Fill, seed: int
    ) -> nn.Parameter:
        """Return a parameter of the full `shape`; with a `spec` this rank's shard, marked."""
        values = initialised(shape, spec, fill, seed, self.dtype, self.device)
        parameter = nn.Parameter(values)
        return parameter if spec is None else mark(parameter, spec)


class ShardedModule(nn.Module):
    """Module whose parameters carry a :class:`ShardSpec` and keep it when torch replaces them."""

    spec: ShardSpec
    sequence_sizes: ShardSizes | None
    _kind: ClassVar[type[Layout]]
    _dim: ClassVar[int] = 0  # sharded dimension of the weight
    _sharded: ClassVar[tuple[str, ...]] = ("weight",)  # names of the sharded parameters
    _plain: ClassVar[Any]  # the torch layer in one process
    _copied: ClassVar[tuple[str, ...]]  # its attributes that are arguments here
    _fixed: ClassVar[Mapping[str, Any]] = {}  # arguments of a layer that gets its parameters later

    @property
    def group(self) -> Group:
        """The ranks that share the weight."""
        return self.spec.group

    def _agree(
        self, layout: Layout, shape: Mapping[str, int], more: Callable[[], Mapping[str, Any]] = dict
    ) -> int:
        """Check all arguments and keep them as attributes; return a seed. Collective."""

        def check() -> dict[str, Any]:
            self.spec, found = layout.checked(shape, self._dim)
            return {**found, **more()}

        checked, seed = agreed(type(self).__name__, check, resolve(layout.group), random_seed)
        for name in checked.keys() - {"sizes", "dtype", "an init", "bias"}:
            setattr(self, name, checked[name])
        return int(seed)

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

        def check() -> dict[str, Any]:
            if not isinstance(layer, kind):
                got = type(layer).__name__
                raise ArgumentError(f"{word} must be a torch.nn.{kind.__name__}; got {got}.")
            # dictionaries that are empty in a plain layer, as those of hooks are
            plain = vars(kind(1, 1, device="meta"))
            lost = [key for key, usual in plain.items() if usual == {} and vars(layer).get(key)]
            if lost or parametrize.is_parametrized(layer) or type(layer).forward != kind.forward:
                raise ArgumentError(
                    f"{word}, of class {type(layer).__name__}, has hooks, other state ({lost}), a "
                    "parametrization or a forward of its own, which would be lost. Remove it, and "
                    "add it to the parallel layer."
                )
            fixed = {"bias", "group", "init", "device", "dtype"}
            known = {field.name for field in fields(cls._kind)} - fixed
            if unknown := [key for key in options if key not in known]:
                raise ArgumentError(f"{unknown[0]!r} is no option; there are {sorted(known)}.")
            digests = {key: (digest(x), x.requires_grad) for key, x in layer.named_parameters()}
            return {**digests, **more()}

        # nothing is drawn here, so the caller's generator keeps its state
        with torch.random.fork_rng(devices=[]):
            agreed(name, check, resolve(group))
            same = {key: getattr(layer, key) for key in cls._copied}
            of_layout = {"group": group, "device": "meta", "dtype": layer.weight.dtype}
            made = cls(**{**same, **cls._fixed, **of_layout, **options})
        for key, whole in layer.named_parameters(recurse=False):
            setattr(made, key, made._own(key, whole))
        return made.train(layer.training)

    def _own(self, name: str, whole: Tensor) -> nn.Parameter:
        """Return this rank's part of a full parameter, in memory of its own."""
        spec = self.spec if name in self._sharded else None
        own = whole.detach().clone() if spec is None else spec.shard(whole.detach())
        parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
        return parameter if spec is None else mark(parameter, spec)

    def _mark(self) -> Self:
        for name in self._sharded:
            parameter = getattr(self, name)
            if parameter is not None:
                mark(parameter, self.spec)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(fn, recurse)._mark()  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark()


def param_is_not_tensor_parallel_duplicate(param: Tensor, group: GroupLike = None) -> bool:
    """Return whether this rank counts a parameter, so that all ranks together count it once.

    Parameters
    ----------
    param : torch.Tensor
        A parameter; sharded if :func:`shard_spec` returns a spec.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None is the whole world.

    Returns
    -------
    bool
        True for a sharded parameter, and for a replicated one on the group's first rank.

    Notes
    -----
    Communication: none.

    In one process: True for all parameters.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import param_is_not_tensor_parallel_duplicate
    >>> bias = torch.nn.Parameter(torch.zeros(4))
    >>> varcomm.launch(lambda rank: param_is_not_tensor_parallel_duplicate(bias), 2)
    [True, False]
    """
    return shard_spec(param) is not None or resolve(group).rank == 0
