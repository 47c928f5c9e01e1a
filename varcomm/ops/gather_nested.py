"""Gathers without `sizes`: ranks first agree on shapes, and nested tensors travel together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_tensor, checking, has_tangent
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.digest import require_equal
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import TensorOrHandle
from varcomm.ops.nested import leaves, lists, rebuilt
from varcomm.sizes import ShardSizes, checked_dim, checked_rank
from varcomm.transport.agreement import share
from varcomm.transport.engine import as_bytes
from varcomm.transport.group import Group

One = Callable[[Tensor, ShardSizes, int], TensorOrHandle]


@kept_from_compilation
def gather_without_sizes(
    name: str,
    group: Group,
    value: Any,
    dim: int,
    root: int | None,
    use_fp32: bool,
    async_op: bool,
    one: One,
) -> Any:
    """Gather a tensor by ``one(x, sizes, dim)``, or nested tensors side by side.

    All ranks raise if they disagree on anything but the numbers of rows.
    """
    is_tensor = isinstance(value, Tensor)
    found: dict[str, Any] = {}
    failure: Exception | None = None
    with checking(name, group, use_fp32=use_fp32, async_op=async_op) as where:
        try:
            found = dict(sorted(leaves(value).items()))
        except Exception as error:  # also of a key's own repr
            failure = error  # of all ranks, below
        if any(in_graph(x) for x in found.values() if isinstance(x, Tensor)):
            raise ArgumentError(
                f"{where}ranks cannot exchange sizes while a graph is recorded. Pass sizes, as "
                "ShardSizes.from_local returns before."
            )

    def described() -> tuple[dict[str, Any], list[int], bool]:
        if failure is not None:
            raise failure
        if async_op and not is_tensor:
            raise ArgumentError("async_op=True needs one tensor. Gather nested ones without.")
        if root is not None:
            checked_rank(root, group.size, "dst")
        words, rows = _described(found, dim)
        _refuse_samples(value, dim)
        return words | {"dst": root, "use_fp32": use_fp32}, rows, transforms_active()

    shared = share(name, described, group)
    require_equal(where.removesuffix(": "), [words for words, *_ in shared])
    apart = any(transformed for *_, transformed in shared)
    apart = apart or any(has_tangent(x) for x in found.values() if x is not None)
    table = [ShardSizes(rows) for rows in zip(*(rows for _, rows, _ in shared), strict=True)]
    tensors = {path: _with_rows(x) for path, x in found.items() if x is not None}
    dims = [dim % x.dim() for x in tensors.values()]
    if is_tensor:
        return one(tensors[""], table[0], dims[0])
    given = zip(tensors.values(), table, dims, strict=True)
    if apart or len(tensors) < 2:  # rules of torch.func and forward mode are of one tensor
        results: list[Any] = [one(*each) for each in given]
    else:
        arriving = range(group.size) if root in (None, group.rank) else range(0)
        results = _side_by_side([_Rows(*each) for each in given], arriving, one)
    return rebuilt(value, dict(zip(tensors, results, strict=True)))


@dataclass(frozen=True)
class _Rows:
    """A tensor whose rows along `dim` are gathered, `sizes` per rank."""

    tensor: Tensor
    sizes: ShardSizes
    dim: int

    @cached_property
    def sent_dtype(self) -> torch.dtype:
        """Bytes, if there is no derivative."""
        recorded = torch.is_grad_enabled() and self.tensor.requires_grad
        return self.tensor.dtype if recorded else torch.uint8

    def column(self) -> Tensor:
        """Return the elements row by row as a column; torch.cat would drop empty vectors."""
        rows = self.tensor.movedim(self.dim, 0)
        if self.sent_dtype != self.tensor.dtype:
            return as_bytes(packing.flat(rows)).unsqueeze(1)
        return rows.reshape(-1, 1)

    def length(self, rank: int) -> int:
        """Return the length of a rank's column."""
        row = prod(packing.rest(self.tensor.shape, self.dim))
        return self.sizes[rank] * row * (self.tensor.dtype.itemsize // self.sent_dtype.itemsize)

    def joined(self, columns: Sequence[Tensor], ranks: range) -> Tensor:
        """Return the tensor whose columns came from these ranks."""
        values = torch.cat([*columns]).view(-1)
        if self.sent_dtype != self.tensor.dtype:
            values = values.view(self.tensor.dtype)
        rows = sum(self.sizes[rank] for rank in ranks)
        values = values.view(rows, *packing.rest(self.tensor.shape, self.dim))
        return packing.back(values, self.dim).contiguous()


def _side_by_side(inputs: Sequence[_Rows], arriving: range, one: One) -> list[Tensor]:
    """Gather tensors: one exchange for those of each dtype with a derivative, one for all others.

    The rows of the ranks in `arriving` arrive.
    """
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(rows.sent_dtype for rows in inputs):
        together = {at: rows for at, rows in enumerate(inputs) if rows.sent_dtype == dtype}
        ranks = range(len(inputs[0].sizes))
        sizes = ShardSizes(sum(rows.length(rank) for rows in together.values()) for rank in ranks)
        whole = one(torch.cat([rows.column() for rows in together.values()]), sizes, 0)
        lengths = [rows.length(rank) for rank in arriving for rows in together.values()]
        columns = whole.split(lengths) if lengths else [whole] * len(together)
        for place, (at, rows) in enumerate(together.items()):
            results[at] = rows.joined(columns[place :: len(together)], arriving)
    return [results[at] for at in range(len(inputs))]


def _described(found: Mapping[str, Any], dim: int) -> tuple[dict[str, Any], list[int]]:
    """Return words that must be equal on all ranks, and the rows of each tensor."""
    words: dict[str, Any] = {"dim": dim}
    rows, devices = list[int](), set[torch.device]()
    for path, x in found.items():
        of = f" of {path}" if path else ""
        if x is None and path:
            words[f"kind{of}"] = "None"
            continue
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"the value{of} must be a tensor, or tensors and None in tuples, lists and "
                f"dictionaries; got {type(x).__name__}. Convert it to a tensor."
            )
        checked_tensor(x, "", f"the tensor{of}")
        own = _with_rows(x)
        at = checked_dim(dim, own.shape, f"the tensor{of}: ")
        rows.append(own.shape[at])
        devices.add(x.device)
        words |= {
            f"kind{of}": "a tensor",
            f"dtype{of}": str(x.dtype).removeprefix("torch."),
            f"device{of}": x.device.type,
            f"dimensions{of}": x.dim(),
            f"shape of a row{of}": packing.rest(own.shape, at),
            f"requires_grad{of}": torch.is_grad_enabled() and x.requires_grad,
            f"tangent of forward mode{of}": has_tangent(x),
        }
    if len(devices) > 1:
        raise ArgumentError(f"tensors must be on one device; got {sorted(map(str, devices))}.")
    return words, rows


def _refuse_samples(value: Any, dim: int) -> None:
    """Refuse lists of one item per sample: samples of several ranks would become one item."""

    def kind(item: Any) -> dict[str, Any]:
        words = _described(leaves([item]), dim)[0].items()
        return {name: each for name, each in words if not name.startswith("requires_grad")}

    for place, items in lists(value):
        first, *others = map(kind, items)
        if "a tensor" in first.values() and all(other == first for other in others):
            raise ArgumentError(
                f"the value{f' of {place}' if place else ''} is a list whose {len(items)} items "
                "have one kind. If each belongs to one sample, such as the detections of an image, "
                "samples of different ranks would be joined. Gather torch.cat(items) and the "
                "number of rows of each item, and call split. If the items are parts of one value, "
                "pass a tuple."
            )


def _with_rows(x: Tensor) -> Tensor:
    return x if x.dim() else x.unsqueeze(0)  # a number is one row
