"""Rules of functions that move, select and join dimensions and rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.grid.fetch import rows, span
from varcomm.grid.field import (
    RULES,
    Field,
    alias,
    common,
    copy_of,
    gathered,
    map_plain,
    part,
    place_of,
    placed,
    plain,
    refused,
    rule,
    split_of,
    whole,
    wrap,
    write,
)
from varcomm.grid.layout import Layout, Span

Func = Callable[..., Any]


@rule("size")
def _size(func: Func, x: Any, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


@rule("numel len")
def _count(func: Func, x: Any) -> int:
    return x.shape[0] if func is torch.Tensor.__len__ else prod(x.shape)


@rule("format repr")
def _text(func: Func, x: Any, *args: Any, **kwargs: Any) -> str:
    return repr(x)


def _ints(args: Sequence[Any]) -> list[int]:
    """Return sizes or dimensions that are given one by one or as one sequence."""
    return [*(args[0] if len(args) == 1 and isinstance(args[0], list | tuple | range) else args)]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=1024)
def _shape_of(func: Func, shape: Sequence[int], *args: Any, **kwargs: Any) -> torch.Size:
    """Return the shape that torch's function returns on one process."""
    try:
        made: Tensor = func(torch.empty([*shape], device="meta"), *args, **kwargs)
    except RuntimeError as error:
        message = f"{func.__name__} of a field of shape {tuple(shape)}: {error}"
        raise ArgumentError(message) from None
    return made.shape


# --- Whole dimensions


@rule("permute transpose swapaxes swapdims movedim moveaxis t adjoint unsqueeze")
def _turned(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn dimensions as torch does, which shows their order with lengths that differ."""
    order = _shape_of(func, range(2, x.dim() + 2), *map(_hashable, args), **kwargs)
    splits = {order.index(dim + 2): split for dim, split in x.grid_layout.at(x.dim()).items()}
    return wrap(func(plain(x), *args, **kwargs), x.grid_layout.having(splits, len(order)))


RULES.update({f"get {name}": _turned for name in ("T", "mT", "H", "mH")})


@rule("squeeze")
def _squeeze(func: Func, x: Any, dim: Any = None) -> Any:
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    for at in sorted({place_of(d, x.dim()) for d in dims if x.shape[d] == 1}, reverse=True):
        x = _row(x, at, 0)
    return x


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
    layout, split = x.grid_layout, split_of(x, dim)
    if split is not None:
        layout = layout.replacing(split.resized(n * repeats for n in split.sizes))
    return wrap(plain(x).repeat_interleave(repeats, dim), layout)


# --- Reshapes


@rule("flatten")
def _flatten(func: Func, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    old, first, last = x.shape, place_of(start_dim, x.dim()), place_of(end_dim, x.dim())
    return _reshaped(x, old, _shape_of(func, old, first, last), first, len(old) - 1 - last)


@rule("unflatten")
def _unflatten(func: Func, x: Any, dim: int, sizes: Any) -> Any:
    old, at = x.shape, place_of(dim, x.dim())
    return _reshaped(x, old, _shape_of(func, old, at, tuple(sizes)), at, len(old) - 1 - at)


@rule("reshape view")
def _reshape(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    old, shape = x.shape, tuple(_ints(args or [*kwargs.values()]))
    if any(isinstance(n, torch.dtype) for n in shape):
        raise refused("view as another dtype")
    new, left_out = _shape_of(func, old, shape), shape.index(-1) if -1 in shape else None
    return _reshaped(x, old, new, *_equal(old, new, left_out))


@rule("contiguous")
def _contiguous(func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    local = plain(x)
    made, is_view = func(local, *args, **kwargs), _is_view(x, [x.numel()])
    is_same = made.data_ptr() == local.data_ptr()
    out = wrap(made if is_view or not is_same else made.clone(), x.grid_layout)
    return alias(out, x) if is_view and is_same else out


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


def _reshaped(x: Any, old: Sequence[int], shape: Sequence[int], lead: int, tail: int) -> Any:
    """Return a field in another shape.

    Dimensions fall into runs with the same number of elements before and after. In a run, the
    split dimension may follow others (`repeats` of all its rows) and be followed by others (each
    rank then has as many elements for a row). Rows that would be divided over ranks move first.
    """
    splits, after = x.grid_layout.at(len(old)), {}
    local, lengths, copied = plain(x), [*shape], x.copied
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
        if split.rows * inner % behind:
            raise refused(f"a reshape of {tuple(old)} to {tuple(shape)}, which parts split rows,")
        if any(n * inner % behind for n in split.sizes):
            if split.repeats > 1:
                raise refused("a reshape of rows of several images, which parts split rows,")
            # rows that belong together go to the owner of the first
            together = behind // gcd(inner, behind)
            moved = split.ending(-(-end // together) * together for end in split.offsets)
            local, split, copied = span(local, split, moved.spans), moved, copy_of(x)
        after[at] = replace(
            split,
            sizes=tuple(n * inner // behind for n in split.sizes),
            repeats=outer // before,
            lead=split.lead * (inner == behind),
        )
        lengths[at] = after[at].own * after[at].repeats
    made = local.reshape(lengths)
    if made.data_ptr() == local.data_ptr() and not _is_view(x, shape):
        made = made.clone()
    out = wrap(made, x.grid_layout.having(after, len(shape)))
    out.copied = copied
    return out


def _is_view(x: Any, shape: Sequence[int]) -> bool:
    """Whether a reshape on one process returns a view, which a rank of one row might get anyway.

    The whole field has the order of dimensions, and the gaps in memory, of the local tensor.
    """
    local, whole = plain(x), x.shape
    if all(split.own > 1 or split.rows < 2 for split in x.grid_layout.splits):
        return True
    sizes, steps = local.shape, local.stride()
    order = sorted(range(local.dim()), key=lambda dim: (steps[dim], sizes[dim] > 1, -dim))
    strides, step, near = [0] * local.dim(), 1, 1
    for dim in order:
        if steps[dim]:
            strides[dim] = step = step * (1 if steps[dim] == near else 2)
            step, near = step * whole[dim], steps[dim] * max(sizes[dim], 1)
    try:
        torch.empty_strided(whole, strides, device="meta").view(shape)
    except RuntimeError:
        return False
    return True


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


# --- Rows


def _index_of(entry: Any) -> Any:
    """Return an index of arrays, tuples or ranges as a list; refuse other classes by name."""
    if isinstance(entry, bool):
        raise refused("an index of True or False", "Use unsqueeze(0), or None as the index.")
    if isinstance(entry, tuple | range):
        return [*entry]
    if entry is None or entry is Ellipsis or isinstance(entry, Tensor | slice):
        return entry
    if hasattr(entry, "__array__"):
        return torch.as_tensor(entry)
    if not isinstance(entry, list) and not hasattr(entry, "__index__"):
        raise refused(f"an index of class {type(entry).__name__}")
    return entry


@rule("getitem")
def _getitem(func: Func, x: Any, index: Any) -> Any:
    entries = [*index] if isinstance(index, tuple) else [index]
    entries = [_index_of(entry) for entry in entries]
    used = sum(1 for e in entries if e is not None and e is not Ellipsis)
    if any(isinstance(e, Tensor) and e.dtype == torch.bool and e.dim() > 1 for e in entries):
        raise refused("a mask over several dimensions", "Multiply by it, or use torch.where.")
    ellipses = sum(e is Ellipsis for e in entries)
    if ellipses > 1:
        raise refused("an index with two ellipses")
    entries += [] if ellipses else [Ellipsis]
    at = next(i for i, e in enumerate(entries) if e is Ellipsis)
    entries[at : at + 1] = [slice(None)] * (x.dim() - used)
    tensors = sum(isinstance(e, Tensor | list) for e in entries)
    dim = 0
    for entry in entries:
        if entry is None:
            x = x.unsqueeze(dim)
        elif isinstance(entry, slice):
            x = _sliced(x, dim, entry)
        elif isinstance(entry, Tensor | list):
            if tensors > 1 or split_of(x, dim) is not None:
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
    dim = place_of(dim, x.dim())
    length = 0 if entry == slice(None) else x.shape[dim]
    first, last, step = entry.indices(length)
    if (first, last, step) == (0, length, 1):
        return x
    split, every = split_of(x, dim, "a slice"), (slice(None),) * dim
    if split is None:
        return wrap(plain(x)[(*every, entry)], x.grid_layout)
    if step < 1:
        raise refused("a slice with a negative step", "torch has none: use flip.")
    count = max(0, -(-(last - first) // step))
    ends = [min(count, max(0, -(-(end - first) // step))) for end in split.offsets]
    after = split.ending(ends)
    if split.lead > first and step == 1:
        after = replace(after, lead=split.lead - first)
    begin = first + ends[split.group.rank] * step - split.start
    own = slice(begin, begin + (after.own - 1) * step + 1, step) if after.own else slice(0)
    return wrap(plain(x)[(*every, own)], x.grid_layout.replacing(after))


def _row(x: Any, dim: int, at: int) -> Any:
    """Select one row, which every rank gets."""
    dim = place_of(dim, x.dim())
    split, local, count = split_of(x, dim, "one row"), plain(x), x.shape[dim]
    if not -count <= at < count:
        raise IndexError(f"index {at} is out of range for dimension {dim} with size {count}")
    at %= count
    if split is not None:
        local, at = span(local, split, [(at, at + 1)] * split.group.size), 0
    left = {d - (d > dim): s for d, s in x.grid_layout.at(x.dim()).items() if d != dim}
    row = wrap(local.select(dim, at), x.grid_layout.having(left, x.dim() - 1))
    row.copied = copy_of(x) if split is not None else x.copied
    return row


@rule("select")
def _select(func: Func, x: Any, dim: int, index: int) -> Any:
    return _row(x, dim, index)


@rule("narrow")
def _narrow(func: Func, x: Any, dim: int, start: int, length: int) -> Any:
    rows = torch.empty(x.shape[dim], device="meta").narrow(0, start, length)  # checks both
    first = rows.storage_offset()
    return _sliced(x, dim, slice(first, first + length))


@rule("unbind")
def _unbind(func: Func, x: Any, dim: int = 0) -> Any:
    return tuple(_row(x, dim, at) for at in range(x.shape[dim]))


@rule("split split_with_sizes tensor_split chunk")
def _split(func: Func, x: Any, how: Any, dim: int = 0) -> Any:
    parts = torch.empty(x.shape[dim], device="meta")
    sizes = [len(p) for p in getattr(parts, func.__name__)(how)]
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if split_of(x, dim) is None:
        return wrap(tuple(plain(x).split(sizes, dim)), x.grid_layout)
    return tuple(_sliced(x, dim, slice(a, b)) for a, b in itertools.pairwise(ends))


@rule("gather", several=True)
def _gather(func: Func, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    """Pick along a dimension that is not split in `x`; that of the index may be."""
    at, layout = place_of(dim, x.dim()) - x.dim(), common([x, index])
    if isinstance(x, Field) and at in x.grid_layout.by_dim:
        raise refused("gather along a split dimension")
    return wrap(func(placed(x, layout.unsplit(at)), at, placed(index, layout), **kwargs), layout)


@rule("setitem", several=True)
def _setitem(func: Func, x: Any, index: Any, value: Any) -> None:
    """Write along dimensions that are not split."""
    if not x.grid_layout.splits:
        func(plain(x), *map_plain((index, value), gathered))
        return
    target = _getitem(torch.Tensor.__getitem__, x, index)
    if [s.sizes for s in target.grid_layout.splits] != [s.sizes for s in x.grid_layout.splits]:
        raise refused("writing some rows of a split dimension")
    index = index if isinstance(index, tuple) else (index,)
    write(func, x, map_plain(index), placed(value, target.grid_layout))


# --- Rows that move


@rule("roll")
def roll(func: Func, x: Any, shifts: Any, dims: Any = None) -> Any:
    """Read the rows that come to each place, in up to two spans."""
    if dims is None or dims in ((), []):
        raise refused("roll without dims")
    shifts = [shifts] if isinstance(shifts, int) else shifts
    for shift, dim in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True):
        split = split_of(x, dim, "roll")
        if split is None or not split.rows:
            x = wrap(plain(x).roll(shift, dim), x.grid_layout)
            continue
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
    local = plain(x)
    for dim in chosen:
        if (split := split_of(x, dim, "flip")) is not None:
            local = span(local, split, [(split.rows - b, split.rows - a) for a, b in split.spans])
        local = local.flip(dim)
    return wrap(local, x.grid_layout)


@rule("pad")
def _pad(
    func: Func, x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Pad; rows before the first and behind the last belong to the owners of these."""
    sides, rest, layout = {-1 - i: pad[2 * i : 2 * i + 2] for i in range(len(pad) // 2)}, [*pad], {}
    for dim in sides.keys() & x.grid_layout.by_dim.keys():
        n, (before, behind) = x.shape[dim], sides[dim]
        x = _sliced(x, dim, slice(max(0, -before), n + min(0, behind)))
    local = plain(x)
    for dim, (before, behind) in sides.items():
        if (split := x.grid_layout.by_dim.get(dim)) is None:
            continue
        before, behind = max(0, before), max(0, behind)
        owners = [rank for rank, n in enumerate(split.sizes) if n] or [0]
        if before or behind:
            split_of(x, dim, "pad")
        sizes = [*split.sizes]
        sizes[owners[0]] += before
        sizes[owners[-1]] += behind
        layout[dim] = replace(split, sizes=tuple(sizes), lead=split.lead + before)
        at, rank = 2 * (-1 - dim), split.group.rank
        if mode == "constant":
            rest[at : at + 2] = before * (rank == owners[0]), behind * (rank == owners[-1])
            continue
        rest[at : at + 2] = 0, 0
        reads = [[own] for own in split.spans]
        head, tail = _mirrored(split.rows, before, behind, mode)
        reads[owners[0]] = [*head, *reads[owners[0]]]
        reads[owners[-1]] = [*reads[owners[-1]], *tail]
        local = rows(local, split, reads)
    if any(rest):
        local = func(local, rest, mode if local.numel() else "constant", value)
    return wrap(local, x.grid_layout.having(x.grid_layout.by_dim | layout, 0))


def _mirrored(n: int, before: int, behind: int, mode: str) -> tuple[list[Span], list[Span]]:
    """Return the spans of `n` rows that are read before the first row and behind the last."""
    if mode != "replicate" and max(before, behind) > n - (mode == "reflect"):
        raise ArgumentError(f"padding of {max(before, behind)} rows in mode {mode} of {n} rows.")
    if mode == "circular":
        return [(n - before, n)], [(0, behind)]
    if mode == "replicate":
        return [(0, 1)] * before, [(n - 1, n)] * behind
    head = [(at, at + 1) for at in range(before, 0, -1)]
    return head, [(n - at, n - at + 1) for at in range(2, behind + 2)]


@rule("diff", several=True)
def _diff(
    func: Func, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Any:
    parts = [part for part in (prepend, x, append) if part is not None]
    x = _cat(func, parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        behind, before = (_sliced(x, dim, s) for s in (slice(1, None), slice(-1)))
        x = behind != before if x.dtype == torch.bool else behind - before
    return x


@rule("cat concat concatenate", several=True)
def _cat(func: Func, tensors: Sequence[Any], dim: int = 0) -> Any:
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]]
    at = place_of(dim, tensors[0].dim()) - tensors[0].dim()
    splits = [split_of(t, at, "cat") if isinstance(t, Field) else None for t in tensors]
    here = next((split for split in splits if split is not None), None)
    if here is None:
        layout = common(tensors)
        return wrap(torch.cat([placed(t, layout) for t in tensors], dim), layout)
    unsplit = []
    for i, (t, split) in enumerate(zip(tensors, splits, strict=True)):
        if split is not None:
            local = plain(t)
            if split.group != here.group:
                local, splits[i] = whole(local, t.dim() + at, split), None
            t = wrap(local, t.grid_layout.unsplit(at))
        unsplit.append(t)
    layout = common(unsplit)
    others = tuple(split for split in layout.splits if split.group != here.group)
    layout = Layout(layout.groups, others)
    # a rank's rows of the result are as many as it has of all parts, so that sizes add up
    parts, seen = [], False
    for t, split in zip(unsplit, splits, strict=True):
        local, seen = placed(t, layout), seen or split is not None
        if split is None:
            sizes = [0] * here.group.size
            sizes[-1 if seen else 0] = local.shape[at]
            split = here.resized(sizes)
            local = part(local, split)
        parts.append((local, split))
    joined = here.resized(map(sum, zip(*(split.sizes for _, split in parts), strict=True)))
    found, offset = [], 0
    for local, split in parts:
        ends = [min(max(end - offset, 0), split.rows) for end in joined.offsets]
        found.append(span(local, split, split.ending(ends).spans))
        offset += split.rows
    return wrap(torch.cat(found, at), layout.replacing(joined))


@rule("stack", several=True)
def _stack(func: Func, tensors: Sequence[Any], dim: int = 0) -> Any:
    at = place_of(dim, tensors[0].dim() + 1)
    return _cat(func, [each.unsqueeze(at) for each in tensors], at)
