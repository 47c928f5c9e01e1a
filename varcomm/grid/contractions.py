"""Rules of products: linear layers, ``einsum``, attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from varcomm.grid.fetch import span
from varcomm.grid.field import (
    Field,
    by_body,
    fields,
    filled,
    part,
    placed,
    plain,
    refused,
    rule,
    wrap,
)
from varcomm.grid.layout import Layout, Split
from varcomm.grid.reductions import sum_over

Func = Callable[..., Any]
Label = Hashable


def contracted(
    compute: Callable[..., Tensor],
    operands: Sequence[Any],
    labels: Sequence[Sequence[Label]],
    out: Sequence[Label],
) -> Any:
    """Return a product whose operands and result have these labels at their dimensions.

    A label of the result stays split as in the first operand that splits it. A label that is
    summed over is summed on each rank, then over ranks. If another split label has taken the group,
    an operand is gathered: so attention keeps the split of queries, and gathers keys and values.
    """
    layout = next(fields(operands)).grid_layout
    splits = [
        {names[s.dim + len(names)]: s for s in x.grid_layout.splits} if isinstance(x, Field) else {}
        for x, names in zip(operands, labels, strict=True)
    ]
    chosen: dict[Label, Split] = {}
    for kept in (True, False):
        for own in splits:
            for label, split in own.items():
                taken = {other.group for name, other in chosen.items() if name != label}
                if (label in out) == kept and label not in chosen and split.group not in taken:
                    chosen[label] = split
    local = [
        placed(x, layout.having({names.index(n): chosen[n] for n in names if n in chosen}, x.dim()))
        for x, names in zip(operands, labels, strict=True)
    ]
    found = compute(*local)
    summed = [split for label, split in chosen.items() if label not in out]
    placed_at = {out.index(label): split for label, split in chosen.items() if label in out}
    return wrap(sum_over(found, summed), layout.having(placed_at, len(out)))


def _matrices(a: Any, b: Any) -> tuple[list[Label], list[Label], list[Label]]:
    """Return the labels of the operands and of the result of ``torch.matmul``."""
    batch = max(a.dim(), b.dim(), 2) - 2
    rows: list[Label] = ["i"] if a.dim() > 1 else []
    columns: list[Label] = ["j"] if b.dim() > 1 else []
    names: list[Label] = [*range(batch)]
    first = [*names[batch - max(a.dim() - 2, 0) :], *rows, "k"]
    second = [*names[batch - max(b.dim() - 2, 0) :], "k", *columns]
    return first, second, [*names, *rows, *columns]


@rule("matmul mm bmm mv rmatmul", several=True)
def _matmul(func: Func, a: Any, b: Any) -> Any:
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    first, second, out = _matrices(a, b)
    return contracted(torch.matmul, (a, b), (first, second), out)


@rule("addmm baddbmm addbmm", several=True)
def _addmm(func: Func, x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _matmul(torch.matmul, a, b)
    product = product.sum(0) if func.__name__ == "addbmm" else product
    return product * alpha + (x * beta if beta else 0)


@rule("linear", several=True)
def _linear(func: Func, input: Any, weight: Any, bias: Any = None) -> Any:
    names: list[Label] = [*range(input.dim() - 1), "k"]
    last = ["o"] * (weight.dim() - 1)  # a vector removes the dimension
    splits = input.grid_layout.by_dim if isinstance(input, Field) else None
    if isinstance(weight, Field) or (splits is not None and (-1 in splits or not last)):
        out = contracted(func, (input, weight), (names, [*last, "k"]), [*names[:-1], *last])
        return out if bias is None else out + bias
    if isinstance(bias, Field):
        return _linear(func, input, weight) + bias
    out = func(plain(input), weight, bias)
    return wrap(out, input.grid_layout) if isinstance(input, Field) else out


@rule("einsum", several=True)
def _einsum(func: Func, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    terms, _, out = equation.replace(" ", "").partition("->")
    given = terms.split(",")
    if "->" not in equation:
        letters = sorted({c for c in terms if c.isalpha() and terms.count(c) == 1})
        out = ("..." if "..." in terms else "") + "".join(letters)
    more = max(
        (
            x.dim() - len(t.replace("...", ""))
            for x, t in zip(operands, given, strict=True)
            if "..." in t
        ),
        default=0,
    )

    def labels(term: str, dims: int) -> list[Label]:
        before, dots, behind = term.partition("...")
        count = dims - len(before) - len(behind) if dots else 0
        return [*before, *range(more - count, more), *behind]

    names = [labels(t, x.dim()) for t, x in zip(given, operands, strict=True)]
    if any(len({*these}) < len(these) for these in names):
        raise refused("einsum of a diagonal")
    result = labels(out, len(out.replace("...", "")) + more)
    return contracted(lambda *local: func(f"{terms}->{out}", *local), operands, names, result)


@rule("embedding one_hot")
def _embedding(func: Func, ids: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(ids, Field):
        raise refused(f"{func.__name__} of a split table")
    classes = kwargs.get("num_classes", args[0] if args else -1)
    if func.__name__ == "one_hot" and classes == -1:
        raise refused("one_hot without num_classes")
    places = (2, "max_norm"), (4, "scale_grad_by_freq")  # which need the ids of all ranks
    for at, word in places:
        if kwargs.get(word, args[at] if len(args) > at else None):
            raise refused(f"embedding with {word}")
    x, splits = plain(ids), {split.dim - 1: split for split in ids.grid_layout.splits}
    out = func(filled(x, [*ids.grid_layout.by_dim]), *args, **kwargs)
    out = out if x.numel() else out[tuple(map(slice, x.shape))]
    return wrap(out, ids.grid_layout.having(splits, 0))


# --- Attention


@rule("scaled_dot_product_attention", several=True)
def _attention(
    func: Func,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Attend from this rank's queries to keys and values of all ranks, or to those before them."""
    layout = _batches(query, key, value)
    split = query.grid_layout.by_dim.get(-2) if isinstance(query, Field) else None
    layout = layout if split is None else layout.replacing(split)
    others, in_order = layout.unsplit(-2), split is None or split.repeats == 1
    q, ends = placed(query, layout), split if is_causal and in_order else None
    k, v = _tokens(key, others, ends), _tokens(value, others, ends)
    if is_causal:  # where columns are split, the tokens of a rank have gaps
        at = torch.arange(query.shape[-2], device=q.device)[:, None]
        at = at if split is None else part(at, split)
        attn_mask = torch.arange(k.shape[-2], device=q.device) <= at
    elif attn_mask is not None:
        attn_mask = placed(attn_mask, layout)
    if split is not None and not split.own:  # one row of zeros, so that this rank takes part
        q = filled(q, [-2])
        attn_mask = None
    out = func(q, k, v, attn_mask, dropout_p, False, **kwargs)
    out = out if split is None else out.narrow(-2, 0, split.own * split.repeats)
    return wrap(out, layout)


def _batches(*given: Any) -> Layout:
    """Return the splits of samples and heads, which all operands share."""
    found: dict[int, Split] = {}
    for x in fields(given):
        for split in x.grid_layout.splits:
            if split.dim < -2:
                found.setdefault(split.dim, split)
    return next(fields(given)).grid_layout.having(found, 0)


def _tokens(x: Any, layout: Layout, queries: Split | None) -> Tensor:
    """Return keys or values of all ranks; or with `queries`, up to the last of this rank."""
    if queries is None:
        return placed(x, layout)  # type: ignore[no-any-return]
    split = x.grid_layout.by_dim.get(-2) if isinstance(x, Field) else None
    if split is not None and queries.group == split.group and split.repeats == 1:
        # a rank without queries attends to one row of zeros
        spans = [(0, min(b, split.rows)) if a < b else (-1, 0) for a, b in queries.spans]
        x = wrap(span(plain(x), split, spans), x.grid_layout.unsplit(-2))
    found: Tensor = placed(x, layout)
    return found[..., : queries.start + queries.own if queries.own else 1, :]


rule("multi_head_attention_forward", several=True)(by_body)
