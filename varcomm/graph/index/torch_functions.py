"""Rules of index vectors: the meaning of each function of torch on a partitioned graph.

Each rule takes the function and its arguments. Functions without a rule compute with local numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.index.partitioned_index import (
    NAMES,
    Kind,
    PartitionedIndex,
    computed,
    first_index,
    fresh,
    functions_named,
    name_of,
    ordinary,
    other,
    plain,
    refuse,
    rule,
    unwrapped,
)
from varcomm.graph.on_device import require

_KNOWN = ("sum", "amax", "amin", "prod")

_ENDS: dict[str, tuple[Kind, Kind]] = {
    "edges": ("source", "target"),
    "reversed": ("target", "source"),
}
_PAIRS: dict[tuple[str, ...], Kind] = {ends: kind for kind, ends in _ENDS.items()}  # type: ignore[misc]

_SIGNS = {"neg", "__neg__", "mul", "__mul__", "__rmul__"}
_REDUCTIONS = {"scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_"}
_CATS = {"cat", "concat", "concatenate"}
_NO_ORDER = (
    "Sources and targets have local ids, in no order. Compute a mask of edges from the data before "
    "graph.partition, as an attribute with a bool per edge."
)
_EQUAL = {"eq": True, "__eq__": True, "ne": False, "not_equal": False, "__ne__": False}
NAMES.update({function: name for name in _SIGNS for function in functions_named(name)})


@rule("dim ndimension size stride is_contiguous is_floating_point is_complex")
def _known(func: Callable[..., Any], x: PartitionedIndex, *args: Any, **kwargs: Any) -> Any:
    """Return a number or a property of this rank's vector."""
    return func(x.plain, *args, **kwargs)


# those that integers have
@rule(
    "__iadd__ __iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__ "
    "__isub__ __ixor__ __idiv__ __itruediv__ abs_ absolute_ add_ addbmm_ addcmul_ addmm_ addmv_ "
    "addr_ apply_ as_strided_ baddbmm_ bernoulli_ bitwise_and_ bitwise_left_shift_ bitwise_not_ "
    "bitwise_or_ bitwise_right_shift_ bitwise_xor_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ "
    "conj_physical_ copy_ cumprod_ cumsum_ detach_ eq_ fill_ fill_diagonal_ fix_ floor_ "
    "floor_divide_ fmod_ gcd_ ge_ geometric_ greater_ greater_equal_ gt_ hardtanh_ heaviside_ "
    "lcm_ le_ less_ less_equal_ logical_and_ logical_not_ logical_or_ logical_xor_ lt_ map_ map2_ "
    "masked_fill_ masked_scatter_ mul_ multiply_ nan_to_num_ ne_ neg_ negative_ not_equal_ pow_ "
    "random_ relu_ remainder_ renorm_ resize_ resize_as_ round_ set_ sgn_ share_memory_ sign_ "
    "square_ squeeze_ sub_ subtract_ swapaxes_ swapdims_ t_ threshold_ transpose_ tril_ triu_ "
    "trunc_ unsqueeze_ zero_"
)
def _in_place(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = first_index(*args, *kwargs.values())
    more = "Operations in place do not change what numbers stand for."
    raise refuse(func, given.kind, f"{more} Sort and coalesce edges before graph.partition.")


@rule(
    "clone contiguous detach resolve_conj resolve_neg to cpu cuda view view_as reshape expand "
    "expand_as unsqueeze squeeze long pin_memory requires_grad_ alias"
)
def _same(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry on: the result has the same numbers, in another memory or shape."""
    if not isinstance(x, PartitionedIndex):
        return other(func, (x, *args), kwargs)
    if kwargs:
        kwargs = {name: plain(value) for name, value in kwargs.items()}
    given = []
    for one in args:
        given.append(one.plain if isinstance(one, PartitionedIndex) else one)
    out = func(x.plain, *given, **kwargs)
    moved = out.device != x.plain.device and x.kind != "group"  # local ids are of one device
    if out.dtype != x.plain.dtype or moved:
        return computed(func, out, x)
    if x.kind in _ENDS and out.shape[:1] != (2,):
        return computed(func, out, x)
    if type(out) is not torch.Tensor and not torch.compiler.is_compiling():
        out = out.as_subclass(torch.Tensor)  # of expand_as(rows with a halo)
    return PartitionedIndex.make(out, x.of, x.kind, x.whole, x.line)


class _NoEdges(torch.Tensor):
    """Values of no edges, (0,), which torch.cat drops from the autograd graph.

    A rank without edges would then miss a collective in a second backward.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Concatenate as columns; all other results are ordinary tensors."""
        tensors = args[0] if args else (kwargs or {}).get("tensors", ())
        name = name_of(func)
        if name in _CATS and all(one.dim() == 1 for one in tensors):
            columns = [one.as_subclass(torch.Tensor).unsqueeze(1) for one in tensors]
            return _of_no_edges(torch.cat(columns).squeeze(1))
        given = [ordinary(one, cls) for one in args]
        out = func(*given, **{name: ordinary(one, cls) for name, one in (kwargs or {}).items()})
        return _of_no_edges(out) if name in _SIGNS else out


def _of_no_edges(values: torch.Tensor) -> torch.Tensor:
    """Return values of edges; see :class:`_NoEdges`."""
    if torch.compiler.is_compiling() or values.dim() != 1 or len(values):
        return values
    return values.as_subclass(_NoEdges) if values.is_floating_point() else values


def _is_all(key: Any) -> bool:
    return isinstance(key, slice) and key.start is None and key.stop is None and key.step is None


@rule("__getitem__")
def _getitem(func: Callable[..., Any], x: Any, key: Any) -> Any:
    if isinstance(x, PartitionedIndex):
        if isinstance(key, int) and x.kind in _ENDS:
            if not torch.compiler.is_compiling():
                _check_reader()
            return PartitionedIndex.make(
                x.plain[key], x.of, _ENDS[x.kind][key], x.whole, known=x.known
            )
        if isinstance(key, PartitionedIndex) and key.kind in ("source", "target"):
            return PartitionedIndex.make(_getitem(func, x.plain, key), x.of, x.kind)
        return _part(func, x, key)
    if isinstance(key, PartitionedIndex):
        if key.kind in ("loops", "no loops"):
            rows = _selecting(key, x.shape[:1])
            return _of_no_edges(_copied(x[rows], rows))
        if key.plain.dim() == 1:
            return _index_select(func, x, 0, key)
        return _rows(func, key, x, 0)[key.plain]
    # among the others of a tuple
    places = [at for at, one in enumerate(key) if isinstance(one, PartitionedIndex)]
    first = places[0]
    after = sum(one is not None for one in key[first:])
    dim = x.dim() - after if key[0] is Ellipsis else first
    before = key[1:first] if key[0] is Ellipsis else key[:first]
    is_along_dim = all(map(_is_all, before))
    if key[first].kind in ("loops", "no loops"):
        rows = _selecting(key[first], x.shape[dim : dim + 1] if is_along_dim else ())
        return _copied(x[tuple([rows if at == first else one for at, one in enumerate(key)])], rows)
    if len(places) > 1 or not is_along_dim:
        raise refuse(func, key[first].kind)
    return _rows(func, key[first], x, dim)[unwrapped(key)]


def _check_reader() -> None:
    """Raise ArgumentError if PyG's EdgeIndex, or a transform that normalises, reads the edges."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    reader = frame.f_globals.get("__name__", "")
    if reader == "torch_geometric.edge_index":  # its products would read rows out of range
        raise ArgumentError(
            "EdgeIndex is not known on a part of a graph: it would hold the ids of this rank. "
            "Make it of the edges before graph.partition."
        )
    if not reader.startswith("torch_geometric.transforms."):
        return
    transform = frame.f_locals.get("self")
    if getattr(transform, "norm", False) and getattr(transform, "max", 0) is None:
        name = type(transform).__name__
        raise ArgumentError(
            f"{name} divides by the largest value of the edges that it is given, which are this "
            f"rank's. Transform the data before graph.partition; or use {name}(norm=False), and "
            "divide by graph.edges.max or graph.max of the values."
        )


# Modules between the code that reads an index and the rule for it.
_BETWEEN = ("torch.", "varcomm.graph.index.")


def _part(func: Callable[..., Any], x: PartitionedIndex, key: Any) -> Any:
    """Return some of the numbers."""
    if x.kind in _ENDS and isinstance(key, list) and key == [1, 0]:
        return _flip(func, x, 0)
    own = None
    if isinstance(key, tuple):
        last = len(key) - 1
        sizes = [x.plain.shape[-1:] if at == last else () for at in range(len(key))]
        own = [_selecting(one, size) for one, size in zip(key, sizes, strict=True)]
    at = _selecting(key, x.plain.shape[:1]) if own is None else tuple(own)
    kind = x.kind
    if kind in ("loops", "no loops"):
        return x.plain[at]
    if kind in _ENDS:
        first = key[0] if own is not None and len(key) else key
        if isinstance(first, int):
            kind = _ENDS[kind][first]
        elif (
            own is None
            or len(own) != 2
            or not (_is_all(first) or first is Ellipsis)
            or isinstance(own[1], int)
        ):
            kind = "computed"
    chosen = key[-1] if own is not None and len(key) else key
    takes_none = isinstance(chosen, list) and not chosen
    if isinstance(chosen, slice):
        takes_none = chosen.stop == 0
    if (
        isinstance(chosen, slice | list)
        and kind in (*_ENDS, "source", "target")
        and not (_is_all(chosen) or takes_none or x.of.group.size == 1)
    ):
        raise refuse(
            func,
            kind,
            "Edges at these positions are others on each rank. Select edges by a mask that is an "
            "attribute of the data with a bool per edge: graph.edge_index[:, graph.mask].",
        )
    if kind == "group" and type(chosen) is int and x.plain.dim() == 1 and x.of.group.size > 1:
        raise refuse(
            func,
            kind,
            "Nodes at this position are others on each rank. The number of groups is "
            "int(graph.batch.max()) + 1.",
        )
    out = x.plain[at]
    if isinstance(chosen, PartitionedIndex) and chosen.kind == "loops" and kind == "source":
        kind = "target"  # both ends of a self loop
    keys = key if isinstance(key, tuple) else (key,)  # the same on all ranks, unlike `own`
    if kind == x.kind and all(one is None or one is Ellipsis or _is_all(one) for one in keys):
        return PartitionedIndex.make(out, x.of, kind, x.whole, x.line, x.known)  # cell[:, None]
    whole = x.whole and isinstance(key, int)
    return PartitionedIndex.make(out, x.of, kind, whole, known=x.known)


def _selecting(key: Any, size: Sequence[int]) -> Any:
    """Return a key that selects the same rows from an ordinary tensor.

    `size` is the shape of the dimension that the key selects from, or empty for any other key.
    """
    if not isinstance(key, PartitionedIndex):
        return key
    if key.kind in ("loops", "no loops"):
        fits = torch.compiler.is_compiling() or tuple(size) == tuple(key.plain.shape)
        if key.whole and fits:
            return key.of.positions_of_loops(key.kind == "loops", key.plain)
        return key.plain
    raise refuse(torch.Tensor.__getitem__, key.kind)


def _copied(values: torch.Tensor, rows: Any) -> torch.Tensor:
    """Return selected rows in a memory of their own, as a mask returns them."""
    if not isinstance(rows, slice) or torch.compiler.is_compiling():
        return values
    return values.clone(memory_format=torch.contiguous_format)


def _rows(func: Callable[..., Any], index: PartitionedIndex, x: torch.Tensor, dim: int) -> Any:
    """Return the rows that an index selects from."""
    if index.kind == "computed":
        raise refuse(func, "computed")
    if index.kind == "source":
        if index.plain.dim() == 0 and index.of.group.size > 1:
            raise refuse(
                func,
                "source",
                "A loop over edges would exchange once per edge, and ranks have different numbers "
                "of edges. Select for all edges at once: x[edge_index[0]].",
            )
        for owned, rows in index.known:
            if x is owned:
                return rows
    return index.of.selected_from(index.kind, x, dim % max(1, x.dim()))


@rule("index_select")
def _index_select(func: Callable[..., Any], x: Any, dim: int, index: Any) -> Any:
    if isinstance(x, PartitionedIndex):
        if isinstance(index, PartitionedIndex):
            if index.kind not in ("source", "target"):
                raise refuse(func, index.kind)
            out = _rows(func, index, x.plain, dim).index_select(dim, index.plain)
            return PartitionedIndex.make(out, x.of, x.kind)
        out = x.plain.index_select(dim, index)
        kept = x.plain.dim() == 1 or (x.kind in _ENDS and dim % 2 == 1)
        return PartitionedIndex.make(out, x.of, x.kind if kept else "computed")
    return _of_no_edges(_rows(func, index, x, dim).index_select(dim, index.plain))


@rule("embedding")
def _embedding(
    func: Callable[..., Any],
    x: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Return rows of a table with one row per group, unless they depend on this rank's ids."""
    if first_index(x, weight).kind != "group" or max_norm is not None or scale_grad_by_freq:
        raise refuse(func, first_index(x, weight).kind)
    return func(plain(x), weight, padding_idx, sparse=sparse)  # type: ignore[no-any-return]


@rule("gather")
def _gather(func: Callable[..., Any], x: Any, dim: int, index: Any, **options: Any) -> torch.Tensor:
    """Return entries of values that have one row per group."""
    if isinstance(x, PartitionedIndex) or index.kind != "group":
        raise refuse(func, first_index(x, index).kind)
    return func(x, dim, index.plain, **options)  # type: ignore[no-any-return]


@rule("__setitem__")
def _setitem(func: Callable[..., Any], x: Any, key: Any, value: Any) -> None:
    if isinstance(x, PartitionedIndex) or isinstance(value, PartitionedIndex):
        raise refuse(func, first_index(x, value).kind)
    if isinstance(key, PartitionedIndex) and key.kind in ("loops", "no loops"):
        x[_selecting(key, x.shape[:1])] = value
    elif isinstance(key, PartitionedIndex) and key.kind == "target":
        key.of.start_at_targets(x, 0, key.plain)[key.plain] = value
    else:
        raise refuse(func, first_index(key).kind)


@rule(
    "scatter_add scatter_add_ index_add index_add_ "
    "scatter_reduce scatter_reduce_ index_reduce index_reduce_"
)
def _reduce(
    func: Callable[..., Any],
    x: Any,
    dim: int,
    index: Any,
    src: Any = None,
    reduce: str = "sum",
    *,
    source: Any = None,
    include_self: bool = True,
    alpha: Any = 1,
) -> torch.Tensor:
    """Reduce rows into `x` at the nodes or groups of `index`."""
    src = source if src is None else src
    if not isinstance(index, PartitionedIndex) or isinstance(x, PartitionedIndex):
        raise refuse(func, first_index(x, src).kind)
    is_target = index.kind == "target"
    counts = reduce == "mean" or (reduce == "sum" and not include_self)
    if counts and not is_target and not isinstance(src, PartitionedIndex):
        return _counted(func, x, dim, index, src, reduce, include_self)
    known = (*_KNOWN, "mean") if is_target else _KNOWN
    if isinstance(src, PartitionedIndex) or reduce not in known:
        raise refuse(func, index.kind)
    if is_target:
        options: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
        if name_of(func) in _REDUCTIONS:
            options = {"reduce": reduce, "include_self": include_self}
        start = index.of.start_at_targets(x, dim, src)
        return index.of.at_targets(func(start, dim, index.plain, src, **options), src)
    if index.kind not in ("source", "group") or index.line is None:
        raise refuse(func, index.kind)
    if not torch.compiler.is_compiling():
        if index.plain.dim() > 1 and index.plain.shape != src.shape:
            raise refuse(func, index.kind, "Expand the vector to the shape of the values.")
        _check_start(func, x, dim, index, reduce, include_self)
    rows = (src if alpha == 1 else src * alpha).movedim(dim, 0)
    total = index.of.reduced(index, reduce, rows, x.movedim(dim, 0)).movedim(0, dim)  # type: ignore[arg-type]
    total = total.to(x.dtype)
    in_place = name_of(func).endswith("_")
    if index.kind == "source" and index.of.is_up_to_last(x.shape[dim]):
        total = total.narrow(dim, 0, x.shape[dim])
    elif x.shape[dim] != total.shape[dim]:
        if x.shape[dim]:
            raise ArgumentError(
                f"{getattr(func, '__name__', func)}: dimension {dim} has {x.shape[dim]} rows, but "
                f"the vector is of {total.shape[dim]} nodes or groups."
            )
        return total  # of a rank without rows
    if reduce == "sum":
        return x.add_(total) if in_place else x + total  # type: ignore[no-any-return]
    if include_self:
        combine = {"amax": torch.maximum, "amin": torch.minimum, "prod": torch.mul}[reduce]
        total = combine(x.clone(), total)
    return x.copy_(total) if in_place else total


def _counted(
    func: Callable[..., Any],
    x: Any,
    dim: int,
    index: PartitionedIndex,
    src: Any,
    reduce: str,
    kept: bool,
) -> torch.Tensor:
    """Reduce to a mean, or to a sum without the start; rows without a value keep their start."""
    add = torch.index_add if "index" in name_of(func) else torch.scatter_add
    count = _reduce(add, torch.full_like(x, kept), dim, index, torch.ones_like(src))
    out: torch.Tensor = _reduce(add, x if kept else torch.zeros_like(x), dim, index, src)
    if reduce == "mean":
        out = out / count.clamp(min=1)
    if not kept and out.shape == x.shape:
        out = torch.where(count > 0, out, x)
    return x.copy_(out) if name_of(func).endswith("_") else out


def _check_start(
    func: Callable[..., Any], x: Any, dim: int, index: PartitionedIndex, how: str, kept: bool
) -> None:
    """Raise unless rows lie along `dim`, and groups without a value keep what they start from.

    Groups have the same start on all ranks. The owners of nodes keep their starts.
    """
    if index.plain.dim() > 1 and index.plain.shape[dim] > 1 and index.plain.stride(dim) == 0:
        raise refuse(func, index.kind, f"The vector does not lie along dimension {dim}.")
    start = 1 if how == "prod" else 0
    if index.kind == "group" and not (kept and how in ("sum", "prod")):
        require(
            (x.detach() == start).all(),
            lambda: refuse(func, index.kind, f"Reduce into a tensor of {start}s."),
            index.of,
            ("start", how, kept, x.dtype, x.shape),
        )


@rule("unique")
def _unique(
    func: Callable[..., Any],
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Return the ids of groups that have a node on any rank, places among them, and counts."""
    if x.kind != "group" or dim is not None:
        raise refuse(func, x.kind)
    counts = _bincount(func, x)
    ids = counts.nonzero().view(-1)
    out = [ids]
    if return_inverse:
        place = counts.clamp(max=1).cumsum(0) - 1
        of, line = x.of.of_size(len(ids)), None if x.line is None else place[x.line]
        out.append(PartitionedIndex.make(place[x.plain], of, "group", x.whole, line))
    if return_counts:
        out.append(counts[ids])
    return tuple(out) if len(out) > 1 else ids


# The number of groups after arithmetic with a number; exact, but for the remainder.
_SIZES: dict[str, Callable[[int, int], int]] = {
    **dict.fromkeys(("floor_divide", "__floordiv__", "div"), lambda size, k: (size + k - 1) // k),
    **dict.fromkeys(("remainder", "__mod__"), min),
    **dict.fromkeys(("add", "__add__", "__radd__"), lambda size, k: size + k),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), lambda size, k: (size - 1) * k + 1),
}


@rule(" ".join(_SIZES))
def _arithmetic(func: Callable[..., Any], x: Any, k: Any, **more: Any) -> Any:
    """Compute ids of other groups from ids of groups and a number that all ranks have."""
    is_of_groups = isinstance(x, PartitionedIndex) and x.kind == "group"
    name = name_of(func)
    floors = {"rounding_mode": "floor"} if name == "div" else {}
    if not is_of_groups or type(k) is not int or k < 1 or more != floors or x.of.size < 1:
        return other(func, (x, k), more)
    of, whole = x.of.of_size(_SIZES[name](x.of.size, k)), x.whole and name not in _INEXACT
    line = None if x.line is None else func(x.line, k, **more)
    return PartitionedIndex.make(func(x.plain, k, **more), of, "group", whole, line)


_INEXACT = {"remainder", "__mod__"}


@rule("bincount")
def _bincount(func: Callable[..., Any], x: Any, weights: Any = None, minlength: int = 0) -> Any:
    if not isinstance(x, PartitionedIndex) or x.kind not in ("source", "target", "group"):
        raise refuse(func, first_index(x, weights).kind)
    count = x.of.count(x.kind, x.plain, x.whole)
    if count < minlength and x.kind != "group":
        raise refuse(func, x.kind)
    values = torch.ones_like(x.plain) if weights is None else weights
    start = values.new_zeros(max(count, minlength))
    return _reduce(torch.Tensor.index_add, start, 0, x, values)


@rule("eq __eq__ ne not_equal __ne__ lt __lt__ le __le__ gt __gt__ ge __ge__")
def _compare(func: Callable[..., Any], a: Any, b: Any) -> Any:
    """Compare numbers; which edges are self loops is known."""
    name = name_of(func)
    both = isinstance(a, PartitionedIndex) and isinstance(b, PartitionedIndex)
    kinds = {a.kind, b.kind} if both else set()
    if kinds == {"source", "target"}:
        if a.of is not b.of or name not in _EQUAL:
            raise refuse(func, "edges", _NO_ORDER)
        a.of.check_has_loops()
        kind: Kind = "loops" if _EQUAL[name] else "no loops"
        whole = a.whole and b.whole
        return PartitionedIndex.make(func(a.plain, b.plain), a.of, kind, whole)
    return other(func, (a, b), {})


@rule("bitwise_not logical_not __invert__")
def _not(func: Callable[..., Any], x: PartitionedIndex) -> Any:
    out = func(x.plain)
    if x.kind not in ("loops", "no loops"):
        return computed(func, out, x)
    return PartitionedIndex.make(out, x.of, "no loops" if x.kind == "loops" else "loops", x.whole)


@rule("equal")
def _equal_all(func: Callable[..., Any], a: Any, b: Any) -> bool:
    ids = [one for one in (a, b) if isinstance(one, PartitionedIndex)]
    if "computed" in {one.kind for one in ids} or len({one.kind for one in ids}) > 1:
        raise refuse(func, "computed")
    return func(plain(a), plain(b))  # type: ignore[no-any-return]


_BOTH_WAYS = (
    "Edges in the other direction end at nodes of other ranks. Make the graph undirected before "
    "graph.partition: to_undirected(data.edge_index); or sum the messages of one direction at "
    "edge_index[1], and of the other at edge_index[0]."
)


@rule("cat concat concatenate")
def _cat(func: Callable[..., Any], tensors: Sequence[Any], dim: int = 0) -> Any:
    ids = [one for one in tensors if isinstance(one, PartitionedIndex)]
    first = ids[0]
    same = all(one.kind == first.kind and one.of is first.of for one in ids)
    if first.kind in _ENDS:
        across = first.plain.dim() == 2 and dim % 2 == 1
    else:
        across = len(ids) == len(tensors)
    if not same or not across or first.kind == "computed":
        both_ways = {one.kind for one in ids} in ({"edges", "reversed"}, {"source", "target"})
        raise refuse(func, first.kind, _BOTH_WAYS if both_ways else "")
    parts = [
        one.plain if isinstance(one, PartitionedIndex) else first.of.check_loops(one)
        for one in tensors
    ]
    return PartitionedIndex.make(torch.cat(parts, dim=dim), first.of, first.kind)


@rule("stack")
def _stack(func: Callable[..., Any], tensors: Sequence[Any], dim: int = 0) -> Any:
    out = torch.stack([plain(one) for one in tensors], dim=dim)
    kinds = tuple([one.kind if isinstance(one, PartitionedIndex) else "" for one in tensors])
    kind = _PAIRS.get(kinds)
    if dim == 0 and kind is not None and tensors[0].of is tensors[1].of:
        whole = all(one.whole for one in tensors)
        return PartitionedIndex.make(out, tensors[0].of, kind, whole)
    first = next(one for one in tensors if isinstance(one, PartitionedIndex))
    return computed(func, out, first)


@rule("unbind")
def _unbind(func: Callable[..., Any], x: PartitionedIndex, dim: int = 0) -> Any:
    if x.kind in _ENDS and dim == 0:
        return (_getitem(func, x, 0), _getitem(func, x, 1))
    return computed(func, x.plain.unbind(dim), x)


@rule("__iter__")
def _iterate(func: Callable[..., Any], x: PartitionedIndex) -> Any:
    return iter(_unbind(func, x))


@rule("flip")
def _flip(func: Callable[..., Any], x: PartitionedIndex, *dims: Any) -> Any:
    dims = tuple(dims[0]) if dims and isinstance(dims[0], list | tuple) else dims
    out = x.plain.flip(dims)
    if x.kind in _ENDS and dims == (0,):
        pair = _PAIRS[_ENDS[x.kind][::-1]]
        return PartitionedIndex.make(out, x.of, pair, x.whole)
    if x.kind in _ENDS or x.plain.dim() > 1:
        return computed(func, out, x)
    return PartitionedIndex.make(out, x.of, x.kind)


@rule("max amax")
def _greatest(func: Callable[..., Any], x: PartitionedIndex, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or x.kind in ("computed", "loops", "no loops"):
        return other(func, (x, *args), kwargs)
    return torch.tensor(x.of.count(x.kind, x.plain, x.whole) - 1)


@rule("min amin")
def _least(func: Callable[..., Any], x: PartitionedIndex, *args: Any, **kwargs: Any) -> Any:
    """Return 0 of no ids: PyG looks for negative ones before it raises an error of an exchange."""
    if args or kwargs or x.plain.numel():
        return other(func, (x, *args), kwargs)
    return PartitionedIndex.make(x.plain.new_zeros(()), x.of, "computed")


@rule("numel nelement")
def _numel(func: Callable[..., Any], x: PartitionedIndex) -> int:
    """Return at least 1 if other ranks may have elements: PyG skips empty vectors."""
    count = x.plain.numel()
    return count or int(x.kind in ("edges", "reversed", "source", "group"))


@rule("sort argsort")
def _sort(func: Callable[..., Any], x: PartitionedIndex, *args: Any, **kwargs: Any) -> Any:
    """Order edges by the ids of their ends, which puts those of a node together."""
    if x.kind not in ("source", "target"):
        return other(func, (x, *args), kwargs)
    out = func(x.plain, *args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out
    return PartitionedIndex.make(out[0], x.of, x.kind), out[1]


@rule(
    "index_put_ index_put embedding_bag take take_along_dim put put_ index_copy "
    "index_copy_ scatter scatter_ index_fill index_fill_ unique_consecutive item __int__ "
    "__index__ __array__ numpy __dlpack__ __reduce_ex__ segment_reduce"
)
def _never(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse, before torch looks at ids out of range."""
    raise refuse(func, first_index(*args, *kwargs.values()).kind)


rule(
    "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like "
    "empty_like rand_like randn_like isclose allclose __repr__ __format__"
)(fresh)
