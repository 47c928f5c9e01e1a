"""``parallelize``: the layers of a model that is there become parallel ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from varcomm.errors import ArgumentError
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.agreement import agree_on_layer
from varcomm.tensor_parallel.embedding import VocabParallelEmbedding
from varcomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.sequence import agreed_parameters, change
from varcomm.transport.agreement import agree, on_all_ranks
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["parallelize"]

Make = Callable[[Any], nn.Module]

_WHAT = "parallelize"
_STYLES = ("column", "row", "embedding", "sequence")


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str | Make],
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> nn.Module:
    """Replace layers of a model by parallel ones, in place, chosen by the patterns of their names.

    Collective: every rank calls it with the same model, and all raise if one has to; then nothing
    has been replaced.

    Parameters
    ----------
    module : torch.nn.Module
        The same on all ranks, weights included.
    plan : mapping of str to str or callable
        From names as :meth:`torch.nn.Module.named_modules` has them, in which ``*``, ``?`` and
        ``[...]`` stand for what they do in a shell, to what such modules become: ``"column"`` and
        ``"row"`` of Linear, ``"embedding"`` of Embedding, ``"sequence"`` for
        :func:`sequence_parallel`, or a function of the module that returns another. For other sizes
        than balanced ones that is, say,
        ``functools.partial(ColumnParallelLinear.from_linear, sizes=[5, 3])``. Each pattern must
        match some module, and no module two.
    sequence_sizes : sequence of int, optional
        Sequence parallelism: what ``"column"``, ``"row"`` and ``"embedding"`` layers are made with.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.nn.Module
        `module`, or, if a pattern is ``""``, what it became.

    Raises
    ------
    ArgumentError
        On every rank, if the plan does not fit the model, or would part a weight that two of its
        modules share.
    DisagreementError
        On every rank, if models or plans differ.

    Notes
    -----
    Modules in several places are replaced in all of them. Parameters that modules share, as tied
    embeddings and heads do, are shared afterwards; so they have to be sharded alike.

    Communication: short messages, by which ranks agree and compare digests of plans and weights;
    each rank keeps its part of weights that it has. No weight travels.

    In one process: `module` as it is.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import parallelize
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(
    ...         torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 4)
    ...     )
    ...     x = torch.ones(2, 4)
    ...     expected = model(x)
    ...     parallelize(model, {"0": "column", "2": "row"})
    ...     return model[0].weight.shape[0], torch.allclose(model(x), expected)
    >>> varcomm.launch(fn, 2)
    [(4, True), (3, True)]
    """
    ranks = resolve(group)
    chosen: dict[str, tuple[nn.Module, str | Make]] = {}

    def check() -> dict[str, Any]:
        chosen.update(_chosen(module, plan))
        return {"modules": {name: _named(how) for name, (_, how) in chosen.items()}}

    agree_on_layer(_WHAT, check, ranks)
    options: dict[str, Any] = {"group": group}
    in_parts = options | {"sequence_sizes": sequence_sizes}
    makers: dict[str, Make] = {
        "column": lambda layer: ColumnParallelLinear.from_linear(layer, **in_parts),
        "row": lambda layer: RowParallelLinear.from_linear(layer, **in_parts),
        "embedding": lambda layer: VocabParallelEmbedding.from_embedding(layer, **in_parts),
    }
    made: dict[int, nn.Module] = {}
    in_place: list[tuple[nn.Module, list[str]]] = []
    for name, (layer, how) in chosen.items():
        if how == "sequence":
            in_place.append((layer, agreed_parameters(layer, ranks)))
        else:
            made[id(layer)] = _made(name, layer, how if callable(how) else makers[how], ranks)

    def alike() -> dict[str, Any]:
        _tied(module, made)
        return {"what modules become": [type(layer).__name__ for layer in made.values()]}

    agree_on_layer(_WHAT, alike, ranks)
    for layer, names in in_place:
        change(layer, names, ranks)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return made.get(id(module), module)


def _chosen(module: Any, plan: Any) -> dict[str, tuple[nn.Module, str | Make]]:
    """Return the modules that a plan is for, each once, by the first of its names."""
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
    if not isinstance(plan, Mapping):
        raise ArgumentError(
            f"plan must be a mapping from patterns of names; got {type(plan).__name__}."
        )
    found: dict[int, tuple[str, str, nn.Module, str | Make]] = {}
    for pattern, how in plan.items():
        if not callable(how) and how not in _STYLES:
            raise ArgumentError(
                f"plan[{pattern!r}] must be one of {', '.join(_STYLES)}, or a function of the "
                f"module; got {how!r}."
            )
        matches = [
            (name, layer)
            for name, layer in module.named_modules(remove_duplicate=False)
            if fnmatchcase(name, pattern)
        ]
        if not matches:
            names = [name for name, _ in module.named_modules()][1:6]
            raise ArgumentError(f"plan[{pattern!r}] matches no module; names are like {names}.")
        for name, layer in matches:
            other = found.setdefault(id(layer), (name, pattern, layer, how))
            if other[1] != pattern:
                raise ArgumentError(
                    f"plan[{pattern!r}] and plan[{other[1]!r}] both match the module {name!r}."
                )
    chosen = {name: (layer, how) for name, _, layer, how in found.values()}
    for name, (layer, _) in chosen.items():
        for inner in list(layer.modules())[1:]:
            if id(inner) in found:
                raise ArgumentError(
                    f"the plan matches {found[id(inner)][0]!r} and {name!r}, which contains it."
                )
    return chosen


def _made(name: str, layer: nn.Module, make: Make, group: Group) -> nn.Module:
    """Return what a module becomes, and let other ranks know where that fails on this one."""
    try:
        new = make(layer)
        if not isinstance(new, nn.Module):
            raise ArgumentError(
                f"what {name!r} becomes must be a torch.nn.Module; got {type(new).__name__}."
            )
    except Exception as error:
        if not on_all_ranks(error):
            _tell(error, group)
        raise
    return new


def _tell(error: Exception, group: Group) -> None:
    """Raise an error of this rank's on all, which are in, or about to come to, an agreement."""

    def fail() -> None:
        raise error

    agree(_WHAT, fail, group)


def _named(how: str | Make) -> str:
    return how if isinstance(how, str) else "a function"


def _tied(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Tie the parameters of new modules where those of the old ones were."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[int, str] = {}
    for prefix, layer in module.named_modules():
        for name, param in layer._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((layer, name))
                names.setdefault(id(param), f"{prefix}.{name}")
    for key, shared in places.items():
        new = [(made[id(layer)], name) for layer, name in shared if id(layer) in made]
        if len(shared) == 1 or not new:
            continue
        params = [layer._parameters.get(name) for layer, name in new]
        first = params[0]
        for param in params:
            if (
                len(new) < len(shared)
                or first is None
                or param is None
                or param.shape != first.shape
                or shard_spec(param) != shard_spec(first)
            ):
                raise ArgumentError(
                    f"{names[key]} is shared with another module, which the plan does not shard "
                    "in the same way. Shard both alike, or neither."
                )
        for layer, name in new[1:]:
            layer._parameters[name] = first
