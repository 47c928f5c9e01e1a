"""``Sharded``: the boxes of a larger tensor that one rank has, for saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NoReturn, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_tensor
from varcomm.sharding.spec import ShardSpec
from varcomm.sizes import exact_int

Place = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Box:
    """A block of a larger tensor.

    Attributes
    ----------
    offsets : tuple of int
        First index of the block in each dimension.
    tensor : torch.Tensor
        The block, with as many dimensions.

    See Also
    --------
    Sharded, mark

    Examples
    --------
    >>> import torch
    >>> from varcomm.sharding import Box
    >>> Box((2, 0), torch.ones(2, 3)).offsets
    (2, 0)
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Sharded(torch.Tensor):
    """A tensor with some boxes on this rank: none, one, or several.

    The attribute ``shape`` is the shape of the full tensor. ``varcomm.checkpoint`` and
    :mod:`torch.distributed.checkpoint` save and load it; operations of torch do not accept it. If
    several ranks have the same box, the box is written once.

    Parameters
    ----------
    shape : sequence of int
        Shape of the full tensor.
    boxes : iterable of Box
        The boxes of this rank, of one dtype; empty boxes are left out.
    dtype : torch.dtype, optional
        Required if this rank has no boxes.
    local : torch.Tensor, optional
        The tensor, of any shape, that contains the boxes as views.

    See Also
    --------
    mark, Box, varcomm.checkpoint.save

    Examples
    --------
    >>> import torch
    >>> from varcomm.sharding import Box, Sharded
    >>> Sharded((4, 3), [Box((2, 0), torch.ones(2, 3))])
    Sharded(shape=(4, 3), dtype=torch.float32, boxes=[((2, 0), (2, 3))])
    """

    boxes: tuple[Box, ...]
    local: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Iterable[Box],
        dtype: torch.dtype | None = None,
        local: torch.Tensor | None = None,
    ) -> Self:
        """Make a tensor without memory of its own."""
        given = list(boxes)
        dtypes = {box.tensor.dtype for box in given} | ({dtype} if dtype is not None else set())
        if len(dtypes) > 1:
            raise ArgumentError(
                f"boxes of one tensor must be of one dtype; got {sorted(map(str, dtypes))}."
            )
        for box in given:
            check_inside("a box", box.offsets, box.tensor.shape, shape)
        device = given[0].tensor.device if given else torch.device("cpu")
        # one element, which no operation reads
        element = torch.empty((), dtype=next(iter(dtypes), None), device=device)
        made = element.expand(torch.Size(shape)).as_subclass(cls)
        made.boxes = tuple(
            Box(tuple(box.offsets), box.tensor.detach()) for box in given if box.tensor.numel()
        )
        made.local = local
        return made

    @classmethod
    def of(cls, local: torch.Tensor, spec: ShardSpec) -> Self:
        """Wrap this rank's part of a tensor sharded by `spec`; one box per fused block.

        ArgumentError if the number of rows of `local` is not this rank's number of rows in `spec`.
        """
        spec.check_local(local)
        boxes = _translated(local, ((0,) * local.dim(), tuple(local.shape)), spec)
        shape = packing.like(local.shape, spec.dim, spec.total)
        return cls(shape, boxes, local.dtype, local)

    @classmethod
    def elements(
        cls, flat: torch.Tensor, shape: Sequence[int], start: int, spec: ShardSpec | None = None
    ) -> Self:
        """Wrap elements ``start, start + 1, ...`` of a tensor in row-major order.

        `flat` has shape (n,), and `shape` is the shape of the tensor. With `spec`, that tensor is
        this rank's part of a sharded tensor. The boxes, at most ``2 ndim - 1``, are views of
        `flat`. ArgumentError if `flat` has several dimensions or ends beyond the tensor.

        >>> piece = Sharded.elements(torch.arange(5), (3, 4), start=3)
        >>> [(box.offsets, box.tensor.tolist()) for box in piece.boxes]
        [((0, 3), [[0]]), ((1, 0), [[1, 2, 3, 4]])]
        """
        checked_tensor(flat, "Sharded.elements: ", "flat")
        first = exact_int(start)
        if flat.dim() != 1 or first is None or not 0 <= first <= prod(shape) - len(flat):
            raise ArgumentError(
                "Sharded.elements: flat must be of one dimension and lie within a tensor of shape "
                f"{tuple(shape)}; got shape {tuple(flat.shape)} from element {start!r} on."
            )
        boxes, taken = [], 0
        for place in flat_places(tuple(shape), first, first + len(flat)):
            offsets, sizes = place
            part = flat[taken : taken + prod(sizes)].view(sizes)
            taken += prod(sizes)
            boxes += [Box(offsets, part)] if spec is None else _translated(part, place, spec)
        whole = shape if spec is None else packing.like(shape, spec.dim, spec.total)
        return cls(whole, boxes, flat.dtype, flat)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a Sharded tensor with `fn` applied to the tensor of each box."""
        boxes = [Box(box.offsets, fn(box.tensor)) for box in self.boxes]
        return type(self)(self.shape, boxes, None if boxes else self.dtype)

    def data_ptr(self) -> int:
        """Return 0, as of other tensors without values of their own."""
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.map(lambda tensor: copy.deepcopy(tensor, memo))
        copied.local = copy.deepcopy(self.local, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ArgumentError(
            "a Sharded tensor cannot be pickled, as by torch.save: this rank has only a part. Save "
            "the optimizer or the module with varcomm.checkpoint.save, on all ranks."
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        places = [(box.offsets, tuple(box.tensor.shape)) for box in self.boxes]
        return f"Sharded(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={places})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise ArgumentError(
            f"{func} cannot be applied to a Sharded tensor, which can only be saved and loaded. "
            "Use the tensors of its boxes. In place of torch's async_save, use "
            "varcomm.checkpoint.save with async_=True."
        )

    # the protocol of torch.distributed.checkpoint: boxes to load, boxes to save, and one box

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.offsets), b.tensor.shape) for b in self.boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for box in self._written():
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)
            properties = TensorProperties.create_from_tensor(box.tensor)
            data = TensorWriteData(chunk, properties, self.shape)
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        boxes = self._written()
        tensor = next(box.tensor for box in boxes if box.offsets == tuple(index.offset))
        return tensor if len(boxes) == 1 else _OneOfSeveral.of(tensor, index.fqn)

    def _written(self) -> tuple[Box, ...]:
        """Return the boxes, or one empty box of a tensor without elements, which a file names."""
        if self.numel():
            return self.boxes
        return (Box((0,) * self.dim(), torch.empty(self.shape, dtype=self.dtype)),)


class _OneOfSeveral(torch.Tensor):
    """One of several boxes of a tensor on this rank, which only safetensors refuses.

    torch.distributed.checkpoint fills a safetensors file from a dict by the name of the tensor, in
    which the last box replaces the others. A box learns of the format when it is written.
    """

    key: str

    @classmethod
    def of(cls, tensor: torch.Tensor, key: str) -> Self:
        """Return a view of a box of the tensor with this name."""
        box = tensor.as_subclass(cls)
        box.key = key
        return box

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, cls):  # such as its copy on the CPU
            result.key = next(arg.key for arg in args if isinstance(arg, cls))
        return result

    def is_contiguous(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ArgumentError; safetensors asks this of each tensor, and torch.save does not."""
        raise ArgumentError(
            f"{self.key!r} has several boxes on this rank, and torch.distributed.checkpoint keeps "
            "only the last one in a safetensors file. Use varcomm.checkpoint.save or torch's "
            "FileSystemWriter, or save each fused block as a tensor of its own."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.empty(0, dtype=self.dtype)
        own = self.resolve_conj().resolve_neg()
        plain.set_(own.untyped_storage(), own.storage_offset(), own.shape, own.stride())
        return plain.__reduce_ex__(protocol)


def check_inside(
    name: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> None:
    """Raise ArgumentError unless a box is inside a tensor of this shape."""
    inside = len(offsets) == len(sizes) == len(shape) and all(
        first >= 0 and size >= 0 and first + size <= n
        for first, size, n in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise ArgumentError(
            f"{name} of shape {tuple(sizes)} at {tuple(offsets)} is not inside a tensor of shape "
            f"{tuple(shape)}."
        )


def _translated(part: torch.Tensor, place: Place, spec: ShardSpec) -> list[Box]:
    """Return a box of this rank's part as boxes of the full tensor, one per fused block."""
    offsets, dim = place[0], spec.dim
    first, stop = offsets[dim], offsets[dim] + place[1][dim]
    boxes, begin = [], 0
    for start, end in spec.ranges(spec.group.rank):
        low, high = max(first, begin), min(stop, begin + end - start)
        if low < high:
            at = (*offsets[:dim], start + low - begin, *offsets[dim + 1 :])
            boxes.append(Box(at, part.narrow(dim, low - first, high - low)))
        begin += end - start
    if stop > begin:
        raise ArgumentError(f"{spec}: this rank has {begin} rows along dim {dim}; got {stop}.")
    return boxes


def flat_places(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Place]:
    """Yield offsets and sizes of boxes that have the elements ``start ... stop - 1``.

    First the rest of a row, then full rows, then the beginning of a row.
    """
    if start < stop and not shape:
        yield (), ()
    if start == stop or not shape:
        return
    row = prod(shape[1:])
    ends = {cut for cut in (-(-start // row) * row, stop // row * row) if start < cut < stop}
    for low, high in pairwise(sorted({start, *ends, stop})):
        number, first = divmod(low, row)
        if first == 0 and high - low >= row:
            yield (number, *(0,) * (len(shape) - 1)), ((high - low) // row, *shape[1:])
        else:
            for offsets, sizes in flat_places(shape[1:], first, first + high - low):
                yield (number, *offsets), (1, *sizes)


def refuse_unwritable(what: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a tensor cannot be overwritten in place."""
    places, reason = zip(tensor.shape, tensor.stride(), strict=True), ""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        reason = "was made in inference mode, and can be overwritten only there"
    if any(step == 0 and n > 1 for n, step in places):
        reason = "is an expanded tensor, whose elements share memory"
    if reason:
        raise ArgumentError(f"{what} {reason}. Use its clone().")
