"""Rules of functions that move, select and join dimensions and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.grid.fetch import rows, span
from varcomm.grid.field import (
    RULES,
    Field,
    common,
    fields,
    map_plain,
    name_of,
    part,
    placed,
    plain,
    refused,
    rule,
    whole,
    wrap,
)
from varcomm.grid.layout import Layout, Split

Func = Callable[..., Any]


@rule("size")
def _size(func: Func, x: Any, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


@rule("numel")
def _numel(func: Func, x: Any) -> int:
    return prod(x.shape)


@rule("len")
def _length(func: Func, x: Field) -> int:
    return x.shape[0]


@rule("format repr")
def _text(func: Func, x: Any, *args: Any, **kwargs: Any) -> str:
    return repr(x)


def _ints(args: Sequence[Any]) -> list[int]:
    """Return sizes or dimensions that are given one by one or as one sequence."""
    return [*(args[0] if len(args) == 1 and isinstance(args[0], list | tuple | range) else args)]


# --- Whole dimensions


@rule("permute")
def _permute(func: Func, x: Any, *dims: Any) -> Any:
    order = [dim % x.dim() for dim in _ints(dims)]
    splits = {order.index(dim): split for dim, split in x.grid_layout.at(x.dim()).items()}
    return wrap(plain(x).permute(order), x.grid_layout.having(splits, x.dim()))


@rule("transpose swapaxes swapdims")
def _transpose(func: Func, x: Any, one: int, other: int) -> Any:
    order = [*range(x.dim())]
    order[one], order[other] = order[other], order[one]
    return _permute(func, x, order)


@rule("t adjoint")
def _turned(func: Func, x: Any) -> Any:
    name = name_of(func)
    turned = _transpose(func, x, -2, -1) if name in ("adjoint", "get mT", "get mH") else None
    turned = _permute(func, x, range(x.dim())[::-1]) if turned is None else turned
    return turned.conj() if name in ("adjoint", "get H", "get mH") else turned


RULES.update({f"get {name}": _turned for name in ("T", "mT", "H", "mH")})


@rule("movedim moveaxis")
def _movedim(func: Func, x: Any, source: Any, to: Any) -> Any:
    places = torch.empty(*range(1, x.dim() + 1), device="meta").movedim(source, to).shape
    return _permute(func, x, [n - 1 for n in places])


@rule("unsqueeze")
def _unsqueeze(func: Func, x: Any, dim: int) -> Any:
    at = dim % (x.dim() + 1)
    splits = {d + (d >= at): split for d, split in x.grid_layout.at(x.dim()).items()}
    return wrap(plain(x).unsqueeze(at), x.grid_layout.having(splits, x.dim() + 1))


@rule("squeeze")
def _squeeze(func: Func, x: Any, dim: Any = None) -> Any:
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = sorted({d % x.dim() for d in dims if x.shape[d] == 1}, reverse=True)
    for at in gone:
        x = (
            _row(x, at, 0)
            if at in x.grid_layout.at(x.dim())
            else _dropped(x, at, plain(x).squeeze(at))
        )
    return x


def _dropped(x: Any, at: int, local: Tensor) -> Any:
    splits = {d - (d > at): split for d, split in x.grid_layout.at(x.dim()).items() if d != at}
    return wrap(local, x.grid_layout.having(splits, x.dim() - 1))


@rule("expand broadcast_to")
def _expand(func: Func, x: Any, *sizes: Any) -> Any:
    shape = _ints(sizes)
    for dim, split in x.grid_layout.by_dim.items():
        if shape[dim] not in (-1, split.total):
            raise refused("expand of a split dimension")
        shape[dim] = plain(x).shape[dim]
    return wrap(plain(x).expand(shape), x.grid_layout)


@rule("expand_as view_as reshape_as", several=True)
def _like_another(func: Func, x: Any, other: Any) -> Any:
    return getattr(x, func.__name__.removesuffix("_as"))(other.shape)


@rule("repeat tile")
def _repeat(func: Func, x: Any, *times: Any) -> Any:
    counts = _ints(times)
    counts = [1] * (x.dim() - len(counts)) + counts
    if any(counts[dim] != 1 for dim in x.grid_layout.by_dim):
        raise refused("repeat of a split dimension")
    return wrap(plain(x).repeat(counts), x.grid_layout)


@rule("repeat_interleave")
def _repeat_interleave(func: Func, x: Any, repeats: Any, dim: int | None = None) -> Any:
    if dim is None or not isinstance(repeats, int):
        raise refused("repeat_interleave of all elements, or by a tensor,")
    layout = _scaled(x, dim, repeats, 1)
    return wrap(plain(x).repeat_interleave(repeats, dim), layout)


def _scaled(x: Field, dim: int, by: int, over: int) -> Layout:
    """Return the layout in which a dimension has `by` rows for `over` rows, on each rank."""
    splits = x.grid_layout.at(x.dim())
    at = dim % x.dim()
    if at in splits:
        splits[at] = splits[at].resized(n * by // over for n in splits[at].sizes)
    return x.grid_layout.having(splits, x.dim())


@rule("reshape view unflatten flatten")
def _reshape(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    layout, local, x = _reshaped(x, *_new_shape(func, x, args, kwargs))
    out = wrap(plain(x).reshape(local), layout)
    out.is_copy = x.is_copy
    return out


def _new_shape(
    func: Func, x: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[int], int, int]:
    """Return the new shape, and the numbers of dimensions before and behind those that change."""
    old, name = [*x.shape], func.__name__
    if name == "flatten":
        first = kwargs.get("start_dim", args[0] if args else 0) % x.dim()
        last = kwargs.get("end_dim", args[1] if len(args) > 1 else -1) % x.dim()
        new = [*old[:first], prod(old[first : last + 1]), *old[last + 1 :]]
        return new, first, x.dim() - 1 - last
    if name == "unflatten":
        at, parts = (*args, *(kwargs[word] for word in ("dim", "sizes") if word in kwargs))
        at %= x.dim()
        known = prod(n for n in parts if n != -1)
        parts = [old[at] // known if n == -1 else n for n in parts]
        return [*old[:at], *parts, *old[at + 1 :]], at, x.dim() - 1 - at
    if args and isinstance(args[0], torch.dtype):
        raise refused("view as another dtype")
    new = _ints(args or (kwargs.get("shape", kwargs.get("size")),))
    known = prod(n for n in new if n != -1)
    left_out = new.index(-1) if new.count(-1) == 1 else None
    if left_out is not None and known and prod(old) % known == 0:
        new[left_out] = prod(old) // known
    if -1 not in new and prod(new) == prod(old):
        return new, *_equal(old, new, left_out)
    raise ArgumentError(f"a field of shape {tuple(old)} cannot have the shape {tuple(new)}.")


def _equal(old: Sequence[int], new: Sequence[int], left_out: int | None) -> tuple[int, int]:
    """Return the numbers of equal dimensions at the beginning and at the end.

    If the number of dimensions falls, a dimension of one row joins the one that the caller wrote as
    -1, or else the last.

    >>> _equal([2, 1, 3], [2, 3], 0), _equal([2, 1, 3], [2, 3], 1), _equal([2, 1, 3], [2, 3], None)
    ((0, 1), (1, 0), (1, 0))
    """
    most = min(len(old), len(new))
    tail = next((n for n in range(most) if old[-1 - n] != new[-1 - n]), most)
    most -= tail
    lead = next((n for n in range(most) if old[n] != new[n]), most)
    if lead + tail == len(new) < len(old):
        if left_out is not None:
            return min(lead, left_out), min(tail, len(new) - 1 - left_out)
        return (lead, tail - 1) if tail else (max(lead - 1, 0), 0)
    return lead, tail


def _reshaped(
    x: Any, shape: Sequence[int], lead: int, tail: int
) -> tuple[Layout, list[int], Field]:
    """Return the layout and the local shape of a field in another shape, and the field.

    Dimensions fall into runs with the same number of elements before and after. In a run, the
    split dimension may follow others (`repeats` of all its rows) and be followed by others (each
    rank then has as many elements for a row). Rows that would be divided over ranks move first.
    """
    old, splits, placed_at = [*x.shape], x.grid_layout.at(x.dim()), {}
    local = [*shape]
    for olds, news in _runs(old, shape, lead, tail):
        inside = [dim for dim in olds if dim in splits]
        if not inside:
            continue
        if len(inside) > 1:
            raise refused(
                "a reshape that joins two split dimensions",
                "Split the grid along one of them, or reshape after field.gather().",
            )
        (dim,) = inside
        split = splits[dim]
        outer = prod(old[olds.start : dim]) * split.repeats
        inner = prod(old[dim + 1 : olds.stop])
        at, before = _place(news, shape, outer, split.rows * inner)
        behind = prod(shape[at + 1 : news.stop])
        fits = before * behind > 0 and outer * split.rows * inner == prod(shape[n] for n in news)
        if not fits:  # products of no elements say nothing
            raise refused(f"a reshape of {tuple(old)} to {tuple(shape)} without elements")
        repeats = outer // before
        if split.rows * inner % behind:
            raise refused(f"a reshape of {tuple(old)} to {tuple(shape)}, which parts split rows,")
        if any(n * inner % behind for n in split.sizes):
            if split.repeats > 1:
                raise refused("a reshape of rows of several images, which parts split rows,")
            moved = split.resized(_multiples(split, behind // gcd(inner, behind)))
            x = _moved(x, split, moved)
            split = moved
        sizes = tuple(n * inner // behind for n in split.sizes)
        placed_at[at] = replace(
            split, sizes=sizes, repeats=repeats, lead=split.lead * (inner == behind)
        )
        local[at] = placed_at[at].own * repeats
    return x.grid_layout.having(placed_at, len(shape)), local, x


def _runs(
    old: Sequence[int], new: Sequence[int], lead: int, tail: int
) -> list[tuple[range, range]]:
    """Return the shortest runs of dimensions that have the same number of elements."""
    ends = len(old) - tail, len(new) - tail
    runs = [(range(n, n + 1), range(n, n + 1)) for n in range(lead)]
    i = j = lead
    while i < ends[0] or j < ends[1]:
        first, start, a, b = i, j, 1, 1
        while (a != b or i == first or j == start) and (i < ends[0] or j < ends[1]):
            if j == ends[1] or (a <= b and i < ends[0]):
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        # ones belong to the run before
        while i < ends[0] and old[i] == 1:
            i += 1
        while j < ends[1] and new[j] == 1:
            j += 1
        runs.append((range(first, i), range(start, j)))
    return runs + [(range(i + n, i + n + 1), range(j + n, j + n + 1)) for n in range(tail)]


def _place(news: range, shape: Sequence[int], outer: int, elements: int) -> tuple[int, int]:
    """Return the new dimension that is split, and the number of elements in those before it."""
    before = outside = 1
    for at in news:
        n, outside = shape[at], before
        if not before * n or outer % (before * n) or before * n > outer:
            return at, before
        if before * n == outer and elements == 1:
            return at, before
        before *= n
    return news.stop - 1, outside


def _multiples(split: Split, of: int) -> list[int]:
    """Return sizes that are multiples; a group of rows belongs to the owner of its first row."""
    ends = [-(-end // of) * of for end in split.offsets]
    ends[-1] = split.rows
    return [b - a for a, b in itertools.pairwise(ends)]


def _moved(x: Any, split: Split, to: Split) -> Any:
    layout = Layout(
        x.grid_layout.groups, tuple(to if s == split else s for s in x.grid_layout.splits)
    )
    moved = wrap(span(plain(x), split, to.spans), layout)
    moved.is_copy = True
    return moved


# --- Rows


@rule("getitem")
def _getitem(func: Func, x: Any, index: Any) -> Any:
    entries = [*index] if isinstance(index, tuple) else [index]
    used = sum(1 for e in entries if e is not None and e is not Ellipsis)
    if any(isinstance(e, Tensor) and e.dtype == torch.bool and e.dim() > 1 for e in entries):
        raise refused("a mask over several dimensions", "Multiply by it, or use torch.where.")
    if Ellipsis not in [e for e in entries if not isinstance(e, Tensor)]:
        entries.append(Ellipsis)
    at = next(i for i, e in enumerate(entries) if e is Ellipsis)
    entries[at : at + 1] = [slice(None)] * (x.dim() - used)
    tensors = sum(isinstance(e, Tensor | list) for e in entries)
    dim = 0
    for entry in entries:
        if entry is None:
            x = _unsqueeze(func, x, dim)
        elif isinstance(entry, slice):
            x = _sliced(x, dim, entry)
        elif isinstance(entry, Tensor | list):
            if tensors > 1 or dim in x.grid_layout.at(x.dim()):
                raise refused("an index of tensors along or beside a split dimension")
            chosen = plain(x)[(slice(None),) * dim + (plain(entry),)]
            more = chosen.dim() - x.dim()
            splits = {d + more * (d > dim): s for d, s in x.grid_layout.at(x.dim()).items()}
            x = wrap(chosen, x.grid_layout.having(splits, chosen.dim()))
            dim += more
        else:
            x = _row(x, dim, int(entry))
            continue
        dim += 1
    return x


def _sliced(x: Any, dim: int, entry: slice) -> Any:
    """Select rows at a step; those of a split dimension stay where they are."""
    if entry == slice(None):
        return x
    split = x.grid_layout.at(x.dim()).get(dim)
    if split is None:
        return wrap(plain(x)[(slice(None),) * dim + (entry,)], x.grid_layout)
    if split.repeats > 1:
        raise refused("a slice of rows of several images")
    first, last, step = entry.indices(split.rows)
    count = max(0, -(-(last - first) // step))
    ends = [min(count, max(0, -(-(end - first) // step))) for end in split.offsets]
    after = split.resized(b - a for a, b in itertools.pairwise(ends))
    if split.lead > first and step == 1:
        after = replace(after, lead=split.lead - first)
    begin = first + ends[split.group.rank] * step - split.start
    local = plain(x).narrow(
        dim, begin if after.own else 0, (after.own - 1) * step + 1 if after.own else 0
    )
    local = local[(slice(None),) * dim + (slice(None, None, step),)] if step > 1 else local
    splits = x.grid_layout.at(x.dim()) | {dim: after}
    return wrap(local, x.grid_layout.having(splits, x.dim()))


def _row(x: Any, dim: int, at: int) -> Any:
    """Select one row, which every rank gets."""
    split, local, count = x.grid_layout.at(x.dim()).get(dim), plain(x), x.shape[dim]
    if not -count <= at < count:
        raise IndexError(f"index {at} is out of range for dimension {dim} with size {count}")
    at %= count
    if split is not None:
        if split.repeats > 1:
            raise refused("one row of several images in one dimension")
        local, at = span(local, split, [(at, at + 1)] * split.group.size), 0
    row = _dropped(x, dim, local.select(dim, at))
    row.is_copy = split is not None
    return row


@rule("select")
def _select(func: Func, x: Any, dim: int, index: int) -> Any:
    return _row(x, dim % x.dim(), index)


@rule("narrow")
def _narrow(func: Func, x: Any, dim: int, start: int, length: int) -> Any:
    return _sliced(x, dim % x.dim(), slice(start, start + length))


@rule("unbind")
def _unbind(func: Func, x: Any, dim: int = 0) -> Any:
    return tuple(_row(x, dim % x.dim(), at) for at in range(x.shape[dim]))


@rule("split split_with_sizes tensor_split chunk")
def _split(func: Func, x: Any, how: Any, dim: int = 0) -> Any:
    parts = torch.empty(x.shape[dim], device="meta")
    sizes = [len(p) for p in getattr(parts, func.__name__)(how)]
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    at = dim % x.dim()
    if at not in x.grid_layout.at(x.dim()):
        return wrap(tuple(plain(x).split(sizes, at)), x.grid_layout)
    return tuple(_sliced(x, at, slice(a, b)) for a, b in itertools.pairwise(ends))


@rule("index_select")
def _index_select(func: Func, x: Any, dim: int, index: Tensor) -> Any:
    if dim % x.dim() in x.grid_layout.at(x.dim()):
        raise refused("index_select along a split dimension")
    return wrap(plain(x).index_select(dim, plain(index)), x.grid_layout)


@rule("gather", several=True)
def _gather(func: Func, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    """Pick along a dimension that is not split in `x`; that of the index may be."""
    at, layout = dim % x.dim() - x.dim(), common([x, index])
    if isinstance(x, Field) and at in x.grid_layout.by_dim:
        raise refused("gather along a split dimension")
    return wrap(func(placed(x, layout.unsplit(at)), at, placed(index, layout), **kwargs), layout)


@rule("setitem", several=True)
def _setitem(func: Func, x: Any, index: Any, value: Any) -> None:
    """Write along dimensions that are not split; into an ordinary tensor, the whole."""
    if not isinstance(x, Field) or not x.grid_layout.splits:
        func(plain(x), map_plain(index), value.gather() if isinstance(value, Field) else value)
        return
    target = _getitem(torch.Tensor.__getitem__, x, index)
    if [s.sizes for s in target.grid_layout.splits] != [s.sizes for s in x.grid_layout.splits]:
        raise refused("writing some rows of a split dimension")
    index = index if isinstance(index, tuple) else (index,)
    func(plain(x), map_plain(index), placed(value, target.grid_layout))


# --- Rows that move


@rule("roll")
def roll(func: Func, x: Any, shifts: Any, dims: Any = None) -> Any:
    """Read the rows that come to each place, in up to two spans."""
    if dims is None or dims in ((), []):
        raise refused("roll without dims")
    shifts = [shifts] if isinstance(shifts, int) else shifts
    for shift, dim in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True):
        split = x.grid_layout.at(x.dim()).get(dim % x.dim())
        if split is None or not split.rows:
            x = wrap(plain(x).roll(shift, dim), x.grid_layout)
            continue
        if split.repeats > 1:
            raise refused("roll of rows of several images")
        n, reads = split.rows, []
        for a, b in split.spans:
            low, count = (a - shift) % n, b - a
            reads.append([(low, min(n, low + count)), (0, max(0, low + count - n))])
        reads = [[(a, b) for a, b in these if a < b] or [(0, 0)] for these in reads]
        x = wrap(rows(plain(x), split, reads), x.grid_layout)
    return x


@rule("flip fliplr flipud")
def _flip(func: Func, x: Any, *dims: Any) -> Any:
    name = func.__name__
    chosen = {"flipud": [0], "fliplr": [1]}.get(name) or _ints(dims)
    local, splits = plain(x), x.grid_layout.at(x.dim())
    for dim in (d % x.dim() for d in chosen):
        if (split := splits.get(dim)) is not None:
            if split.repeats > 1:
                raise refused("flip of rows of several images")
            local = span(local, split, [(split.rows - b, split.rows - a) for a, b in split.spans])
        local = local.flip(dim)
    return wrap(local, x.grid_layout)


@rule("pad")
def _pad(
    func: Func, x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Pad; the first rank gets the rows before the first, the last those behind the last."""
    sides = {-1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    local_sides = [*pad]
    for dim, (before, behind) in sides.items():
        if dim not in x.grid_layout.by_dim:
            continue
        local_sides[2 * (-1 - dim)] = local_sides[2 * (-1 - dim) + 1] = 0
        n = x.shape[dim]
        cut = slice(max(0, -before), n + min(0, behind))
        if before < 0 or behind < 0:
            x = _sliced(x, dim % x.dim(), cut)
        if before > 0 or behind > 0:
            x = _padded(x, x.grid_layout.by_dim[dim], max(0, before), max(0, behind), mode, value)
    while len(local_sides) > 2 and mode == "constant" and local_sides[-2:] == [0, 0]:
        del local_sides[-2:]
    if not any(local_sides):
        return x
    if not plain(x).numel():
        mode = "constant"  # torch refuses others of no rows
    return wrap(func(plain(x), local_sides, mode, value), x.grid_layout)


def _padded(x: Any, split: Split, before: int, behind: int, mode: str, value: float | None) -> Any:
    n, ranks = split.rows, split.group.size
    if split.repeats > 1:
        raise refused("pad of rows of several images")
    if mode in ("reflect", "circular") and max(before, behind) > n - (mode == "reflect"):
        raise ArgumentError(f"padding of {max(before, behind)} rows in mode {mode} of {n} rows.")
    head, tail = {
        "constant": ((-before, 0), (n, n + behind)),
        "circular": ((n - before, n), (0, behind)),
        "reflect": ((1, before + 1), (n - 1 - behind, n - 1)),
        "replicate": ((0, min(1, before)), (n - min(1, behind), n)),
    }[mode]
    reads = [[own] for own in split.spans]
    reads[0], reads[-1] = [head, *reads[0]], [*reads[-1], tail]
    local, dim = rows(plain(x), split, reads), split.dim
    first, last = split.group.rank == 0, split.group.rank == ranks - 1
    lengths = [(head[1] - head[0]) * first, split.own, (tail[1] - tail[0]) * last]
    if mode in ("reflect", "replicate") or value:
        parts = [*local.split(lengths, dim)]
        for i, wanted in ((0, before * first), (2, behind * last)):
            if mode == "reflect":
                parts[i] = parts[i].flip(dim)
            elif mode == "replicate":
                shape = [*parts[i].shape]
                shape[dim] = wanted
                parts[i] = parts[i].expand(shape) if wanted else parts[i].narrow(dim, 0, 0)
            elif value:
                parts[i] = torch.full_like(parts[i], value)
        local = torch.cat(parts, dim)
    sizes = [*split.sizes]
    sizes[0] += before
    sizes[-1] += behind
    splits = x.grid_layout.by_dim | {
        dim: replace(split, sizes=tuple(sizes), lead=split.lead + before)
    }
    return wrap(local, x.grid_layout.having(splits, 0))


@rule("diff", several=True)
def _diff(
    func: Func, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Any:
    parts = [part for part in (prepend, x, append) if part is not None]
    x = _cat(func, parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        behind, before = (_sliced(x, dim % x.dim(), s) for s in (slice(1, None), slice(-1)))
        x = behind != before if x.dtype == torch.bool else behind - before
    return x


@rule("cat concat concatenate", several=True)
def _cat(func: Func, tensors: Sequence[Any], dim: int = 0) -> Any:
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]]
    dims, given = tensors[0].dim(), [*fields(tensors)]
    at = dim % dims - dims
    here = next((f.grid_layout.by_dim[at] for f in given if at in f.grid_layout.by_dim), None)
    if here is None:
        layout = common(tensors)
        return wrap(torch.cat([placed(t, layout) for t in tensors], dim), layout)
    if any(f.grid_layout.by_dim[at].repeats > 1 for f in given if at in f.grid_layout.by_dim):
        raise refused("cat along rows of several images in one dimension")
    # a rank's rows of the result are as many as it has of all parts, so that sizes add up
    unsplit, splits = [], []
    for t in tensors:
        split, local = t.grid_layout.by_dim.get(at) if isinstance(t, Field) else None, plain(t)
        if split is not None and split.group != here.group:
            local, split = whole(local, dims + at, split), None
        unsplit.append(wrap(local, t.grid_layout.unsplit(at)) if isinstance(t, Field) else t)
        splits.append(split)
    layout = common(unsplit)
    others = tuple(split for split in layout.splits if split.group != here.group)
    layout = Layout(layout.groups, others)
    parts, seen = [], False
    for split, rest in zip(splits, unsplit, strict=True):
        seen = seen or split is not None
        local = placed(rest, layout)
        if split is None:
            sizes = [0] * here.group.size
            sizes[-1 if seen else 0] = local.shape[at]
            split = here.resized(sizes)
            local = part(local, split)
        parts.append((local, split))
    sizes = [sum(n) for n in zip(*(s.sizes for _, s in parts), strict=True)]
    joined, offset, found = here.resized(sizes), 0, []
    for local, split in parts:
        ends = [min(max(e - offset, 0), split.rows) for e in joined.offsets]
        found.append(span(local, split, tuple(itertools.pairwise(ends))))
        offset += split.rows
    return wrap(torch.cat(found, at), layout.having(layout.by_dim | {at: joined}, 0))


@rule("stack", several=True)
def _stack(func: Func, tensors: Sequence[Any], dim: int = 0) -> Any:
    return _cat(
        func, [t.unsqueeze(dim % (t.dim() + 1)) for t in tensors], dim % (tensors[0].dim() + 1)
    )
