"""Gathers without `sizes`: ranks first agree on shapes, and nested tensors travel together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.ops import levels, packing
from varcomm.ops.checks import checked_tensor, checking
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.digest import require_equal
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import TensorOrHandle, apply
from varcomm.ops.nested import leaves, rebuilt
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.ops.root_input import outside_transforms
from varcomm.ops.rule import Operator
from varcomm.sizes import ShardSizes, checked_dim, checked_rank
from varcomm.transport.agreement import share
from varcomm.transport.engine import Pending, as_bytes
from varcomm.transport.group import Group

__all__ = ["gather_without_sizes"]

# The dtype of packed bytes: autograd derives floating dtypes alone, and torch cannot add this one,
# so that an accidental sum of packed bytes is an error.
CARRIER = torch.float8_e5m2


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
    """Gather a tensor by ``one(x, sizes, dim)``, or nested tensors in one exchange.

    All ranks raise if they disagree on anything but the numbers of rows.
    """
    is_tensor = isinstance(value, Tensor)
    own: Any = None
    found: dict[str, Any] = {}
    failure: Exception | None = None
    with checking(name, group, use_fp32=use_fp32, async_op=async_op) as where:
        try:
            found = dict(sorted(leaves(value).items()))
            if async_op and not is_tensor:
                raise ArgumentError("async_op=True needs one tensor. Gather nested ones without.")
            if root is not None:
                checked_rank(root, group.size, "dst")
            # here: transforms and grad mode belong to this thread
            own = _described(found, dim, root)
        except Exception as error:  # also of a key's own repr
            failure = error  # of all ranks, below
        if any(in_graph(x) for x in found.values() if isinstance(x, Tensor)):
            raise ArgumentError(
                f"{where}ranks cannot exchange sizes while a graph is recorded. Pass sizes, as "
                "ShardSizes.from_local returns before."
            )

    def described() -> Any:
        if failure is not None:
            raise failure
        return own

    shared: list[Any] = []
    outside_transforms(lambda: shared.extend(share(name, described, group)))
    require_equal(where.removesuffix(": "), [words for words, *_ in shared])
    table = [ShardSizes(rows) for rows in zip(*(rows for _, rows, _ in shared), strict=True)]
    apart = any(is_apart for *_, is_apart in shared)
    tensors = {path: _with_rows(x) for path, x in found.items() if x is not None}
    dims = [dim % x.dim() for x in tensors.values()]
    if is_tensor:
        return one(tensors[""], table[0], dims[0])
    given = zip(tensors.values(), table, dims, strict=True)
    if apart or len(tensors) < 2:  # rules of torch.func and forward mode are of one tensor
        results: list[Any] = [one(*each) for each in given]
    else:
        results = _gathered(name, group, list(given), root, use_fp32)
    return rebuilt(value, dict(zip(tensors, results, strict=True)))


def _gathered(
    name: str,
    group: Group,
    given: Sequence[tuple[Tensor, ShardSizes, int]],
    root: int | None,
    use_fp32: bool,
) -> list[Tensor]:
    parts = tuple(
        _Part(x.dtype, tuple(x.shape), dim, sizes, torch.is_grad_enabled() and x.requires_grad)
        for x, sizes, dim in given
    )
    own = _Pack.apply(parts, (group.rank,), *[x for x, *_ in given])  # type: ignore[no-untyped-call]
    operator = _Gather(name, group, parts, root, use_fp32)
    return list(_Unpack.apply(parts, operator.ranks, apply(operator, own)))  # type: ignore[no-untyped-call]


def _described(
    found: Mapping[str, Any], dim: int, root: int | None
) -> tuple[dict[str, Any], list[int], bool]:
    """Return words that must be equal on all ranks, the rows, and whether derivatives are apart."""
    words: dict[str, Any] = {"dim": dim, "dst": root}
    rows, devices = list[int](), set[torch.device]()
    apart: bool = transforms_active()
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
        apart = apart or forward_ad.unpack_dual(x).tangent is not None
        words |= {
            f"kind{of}": "a tensor",
            f"dtype{of}": str(x.dtype).removeprefix("torch."),
            f"device{of}": x.device.type,
            f"dimensions{of}": x.dim(),
            f"shape of a row{of}": packing.rest(own.shape, at),
            f"requires_grad{of}": torch.is_grad_enabled() and x.requires_grad,
        }
    if len(devices) > 1:
        raise ArgumentError(f"tensors must be on one device; got {sorted(map(str, devices))}.")
    return words, rows, apart


def _with_rows(x: Tensor) -> Tensor:
    return x if x.dim() else x.unsqueeze(0)  # a number is one row


@dataclass(frozen=True)
class _Part:
    """One tensor among the packed ones; `has_gradient` decides whether backward sends it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    sizes: ShardSizes
    has_gradient: bool

    def nbytes(self, rank: int) -> int:
        row = prod(packing.rest(self.shape, self.dim))
        return self.sizes[rank] * row * self.dtype.itemsize


Parts = tuple[_Part, ...]


def _packed(parts: Parts, ranks: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the rows of these ranks, rank by rank, each tensor by tensor."""
    none = tensors[0].new_empty(0, dtype=torch.uint8)
    if not ranks:
        return none.view(CARRIER)
    split = []
    for part, x in zip(parts, tensors, strict=True):
        flat = packing.pack(x, [part.sizes[rank] for rank in ranks], part.dim)
        split.append(_blocks(as_bytes(flat), [part.nbytes(rank) for rank in ranks]))
    blocks = [block for of_rank in zip(*split, strict=True) for block in of_rank]
    return torch.cat([none, *blocks]).view(CARRIER).data


def _unpacked(parts: Parts, ranks: Sequence[int], packed: Tensor) -> list[Tensor]:
    """Return the tensors whose rows :func:`_packed` has packed."""
    flat = packed.view(torch.uint8)
    blocks = _blocks(flat, [part.nbytes(rank) for rank in ranks for part in parts])
    tensors = []
    for place, part in enumerate(parts):
        sizes = [part.sizes[rank] for rank in ranks]
        # copied, because the bytes of a number start at a multiple of its width
        own = torch.cat([flat[:0], *blocks[place :: len(parts)]]).view(part.dtype)
        shape = packing.like(part.shape, part.dim, sum(sizes))
        tensors.append(packing.unpack(own, shape, sizes, part.dim).view(shape).data)
    return tensors


def _blocks(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    blocks: tuple[Tensor, ...] = flat.split(list(sizes)) if sizes else ()
    return blocks


class _Pack(torch.autograd.Function):
    """Pack tensors; the transpose of :class:`_Unpack`."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, ranks: Sequence[int], *tensors: Tensor) -> Tensor:
        ctx.how = parts, ranks
        return _packed(parts, ranks, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = _Unpack.apply(*ctx.how, gradient)  # type: ignore[no-untyped-call]
        pairs = zip(found, ctx.how[0], strict=True)
        return None, None, *[own if part.has_gradient else None for own, part in pairs]


class _Unpack(torch.autograd.Function):
    """Unpack tensors; the transpose of :class:`_Pack`."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, ranks: Sequence[int], packed: Tensor) -> tuple[Tensor, ...]:
        ctx.how, out = (parts, ranks), _unpacked(parts, ranks, packed)
        fixed = (x for x, part in zip(out, parts, strict=True) if not part.has_gradient)
        ctx.mark_non_differentiable(*fixed)
        ctx.device = packed.device
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        parts, ranks = ctx.how
        given = [
            gradient
            if part.has_gradient
            else torch.zeros(
                packing.like(part.shape, part.dim, sum(part.sizes[rank] for rank in ranks)),
                dtype=part.dtype,
                device=ctx.device,
            )
            for gradient, part in zip(gradients, parts, strict=True)
        ]
        return None, None, _Pack.apply(parts, ranks, *given)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Packed(Operator):
    """The pair's fields; `root` is None if every rank gets the rows of all."""

    name: str  # type: ignore[misc]
    group: Group
    parts: Parts
    root: int | None
    use_fp32: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose rows this rank gets."""
        return tuple(range(self.group.size)) if self.root in (None, self.group.rank) else ()

    def describe(self, x: Tensor) -> dict[str, Any]:
        shown = [(str(p.dtype), p.dim, *p.sizes, p.has_gradient) for p in self.parts]
        return {"root": self.root, "tensors": [list(each) for each in shown]}

    def _moved(
        self, x: Tensor, send: Sequence[int], recv: Sequence[int], schedule: Any
    ) -> tuple[Any, Tensor]:
        values = packing.plain(x.view(torch.uint8))
        return packing.exchange(self.name, self.group, values, send, recv, schedule)


class _Gather(_Packed):
    """From the packed rows of each rank to those of all, on every rank or at the root."""

    def send(self, x: Tensor) -> Pending:
        group, own = self.group, x.numel()
        send = [own * (self.root in (None, rank)) for rank in range(group.size)]
        total = [sum(part.nbytes(rank) for part in self.parts) for rank in range(group.size)]
        if self.root is None and levels.gathers_short(group, sum(total), x.device):
            return levels.start_gather(self.name, group, packing.plain(x), total, lambda out: out)
        recv = [count * bool(self.ranks) for count in total]
        works, out = self._moved(x, send, recv, "all_gather" if self.root is None else "one")
        return Pending(works, lambda: out.view(CARRIER))

    def result(self, x: Tensor) -> Tensor:
        return x.new_empty(sum(part.nbytes(rank) for part in self.parts for rank in self.ranks))

    @property
    def adjoint(self) -> _Scatter:
        name = "reduce_scatter_v" if self.root is None else "scatter_v"
        return _Scatter(name, self.group, self.parts, self.root, self.use_fp32)


class _Scatter(_Packed):
    """From packed gradients of all rows to each rank's own rows of their sum over ranks.

    Tensors without a gradient are zeros, and are not sent.
    """

    def send(self, x: Tensor) -> Pending:
        group, ranks = self.group, self.ranks
        sent = tuple(part for part in self.parts if part.has_gradient)
        flat = x.view(torch.uint8)
        blocks = _blocks(flat, [part.nbytes(rank) for rank in ranks for part in self.parts])
        repeated = self.parts * len(ranks)
        if len(sent) < len(self.parts):
            kept = (b for b, part in zip(blocks, repeated, strict=True) if part.has_gradient)
            flat = torch.cat([flat[:0], *kept])
        send = [sum(part.nbytes(r) for part in sent) * bool(ranks) for r in range(group.size)]
        own = sum(part.nbytes(group.rank) for part in sent)
        recv = [own * (self.root in (None, rank)) for rank in range(group.size)]
        works, got = self._moved(flat, send, recv, "all" if self.root is None else "one")
        return Pending(works, lambda: self._summed(sent, got))

    def _summed(self, sent: Parts, got: Tensor) -> Tensor:
        rank, senders = self.group.rank, self.group.size if self.root is None else 1
        blocks = _blocks(got, [part.nbytes(rank) for part in sent] * senders)
        out, place = [got[:0]], 0
        for part in self.parts:
            if not part.has_gradient:
                out.append(got.new_zeros(part.nbytes(rank)))
                continue
            copies = torch.cat(blocks[place :: len(sent)]).view(part.dtype)
            copies = copies.view(senders, copies.numel() // senders)
            out.append(as_bytes(sum_in_rank_order(copies.unbind(), self.use_fp32)))
            place += 1
        return torch.cat(out).view(CARRIER)

    def result(self, x: Tensor) -> Tensor:
        return x.new_empty(sum(part.nbytes(self.group.rank) for part in self.parts))

    @property
    def adjoint(self) -> _Gather:
        name = "all_gather_v" if self.root is None else "gather_v"
        return _Gather(name, self.group, self.parts, self.root, self.use_fp32)
