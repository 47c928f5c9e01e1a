"""``to_dtensor`` and ``from_dtensor``: shards as DTensors and back, in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_shard, checking
from varcomm.sharding.spec import ShardSpec
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group, GroupLike, resolve

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _ToDTensor(torch.autograd.Function):
    """Wrap the shard; unwrap the gradient.

    ``DTensor.from_local`` redistributes gradients outside autograd: second derivatives are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, placement: Any, shape: torch.Size
    ) -> DTensor:
        from torch.distributed.tensor import DTensor

        ctx.placement = placement
        ctx.set_materialize_grads(False)  # plain zeros would have the full shape
        options: Any = {"run_check": False, "shape": shape, "stride": _strides(x, shape)}
        return DTensor.from_local(x.detach(), mesh, (placement,), **options)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        local = _FromDTensor.apply(gradient, ctx.placement)  # type: ignore[no-untyped-call]
        return local, None, None, None


class _FromDTensor(torch.autograd.Function):
    """Redistribute to `placement` and unwrap the shard; wrap the gradient.

    Redistribution is the identity of the full tensor. ``DTensor.redistribute`` of torch 2.11 is
    differentiable only once.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, placement: Any) -> torch.Tensor:
        ctx.place = x.device_mesh, placement, x.shape
        # a compiler traces this before a gradient's own placements are known
        if torch.compiler.is_compiling() or x.placements != (placement,):
            x = x.redistribute(placements=(placement,))
        local: Any = x.to_local()
        # the result of a collective of DTensor's may still be in flight
        waited: torch.Tensor = local.wait() if hasattr(local, "wait") else local
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ToDTensor.apply(*gradients, *ctx.place), None  # type: ignore[no-untyped-call]


def to_dtensor(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, group: GroupLike = None
) -> DTensor:
    """Return this rank's rows as its shard of a DTensor, in the same memory.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sizes[rank]`` rows along `dim`; any dtype.
    sizes : sequence of int
        Rows per rank. Sizes must equal ``ShardSizes.chunked(sum(sizes), P)``, the sizes that torch
        uses.
    dim : int
        Sharded dimension.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.distributed.tensor.DTensor
        A DTensor with the full shape and the placement ``Shard(dim)``. The mesh of the DTensor is
        group if group is a mesh, otherwise an unnamed mesh.

    Raises
    ------
    ArgumentError, DisagreementError
        If `sizes` differ from torch's, do not match `dim` and `tensor`, or the mesh is for another
        device. Inside :func:`varcomm.debug`, also if the calls of ranks differ.

    See Also
    --------
    varcomm.sharding.from_dtensor, varcomm.ShardSizes.chunked

    Notes
    -----
    Adjoint: :func:`from_dtensor`, exact in any order. DTensor has no forward mode. A loss computed
    from DTensors is one number, ``loss.full_tensor()``, on which every rank calls backward.

    Communication: none, but replicated or partial gradients are redistributed.

    In one process: `tensor` itself.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.sharding import to_dtensor
    >>> def fn(rank):
    ...     sizes = varcomm.ShardSizes.chunked(5, 2)
    ...     own = torch.tensor(sizes.range(rank), dtype=torch.float32, requires_grad=True)
    ...     whole = to_dtensor(own, sizes)
    ...     (whole * whole).sum().full_tensor().backward()
    ...     return tuple(whole.shape), own.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [((5,), [0.0, 2.0, 4.0]), ((5,), [6.0, 8.0])]
    """
    from torch.distributed.tensor import Shard

    ranks = resolve(group)
    with checking("to_dtensor", ranks) as where:
        checked, dim = checked_shard(tensor, sizes, dim, ranks, where)
        total, kind = sum(checked), tensor.device.type
        chunks = ShardSizes.chunked(total, ranks.size)
        if tuple(checked) != chunks:
            raise ArgumentError(
                f"{where}torch splits {total} rows over {ranks.size} ranks into {list(chunks)}, "
                f"and a DTensor has no other sizes; got {list(checked)}. Use "
                f"ShardSizes.chunked({total}, {ranks.size}), or move rows to these chunks with an "
                "ExchangePlan.from_needed."
            )
        if isinstance(group, DeviceMesh) and group.device_type != kind:
            raise ArgumentError(
                f"{where}the tensor is on {tensor.device}, and the mesh is one of "
                f"{group.device_type!r}. Move the tensor, or make the mesh for {kind!r}."
            )
    mesh = group
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.from_group(ranks.process_group, kind)
    _compare("to_dtensor", tensor, checked, dim, ranks)
    shape = torch.Size(packing.like(tensor.shape, dim, total))
    return _ToDTensor.apply(tensor, mesh, Shard(dim), shape)  # type: ignore[no-any-return, no-untyped-call]


def from_dtensor(dtensor: DTensor) -> tuple[torch.Tensor, ShardSpec]:
    """Return this rank's shard of a DTensor, in the same memory, and how it is sharded.

    Parameters
    ----------
    dtensor : torch.distributed.tensor.DTensor
        On a mesh of one dimension, with a placement ``Shard(dim)``; any shape and dtype.

    Returns
    -------
    torch.Tensor
        This rank's rows.
    ShardSpec
        Its ``sizes`` and ``dim``, for operations with ``group=dtensor.device_mesh``.

    Raises
    ------
    ArgumentError, DisagreementError
        If `dtensor` does not have exactly one placement ``Shard``, or is not split as torch splits
        it. Inside :func:`varcomm.debug`, also if ranks differ.

    See Also
    --------
    varcomm.sharding.to_dtensor, varcomm.sharding.mark

    Notes
    -----
    Adjoint: :func:`to_dtensor`; exact in any order.
    Communication: none.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from varcomm.sharding import from_dtensor
    >>> def fn(rank):
    ...     mesh = init_device_mesh("cpu", (2,))
    ...     own, spec = from_dtensor(distribute_tensor(torch.arange(5), mesh, [Shard(0)]))
    ...     return varcomm.gather_v(own, spec.sizes, group=mesh), spec.sizes
    >>> varcomm.launch(fn, 2)[0]
    (tensor([0, 1, 2, 3, 4]), ShardSizes(3, 2))
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(dtensor, DTensor):
        kind = type(dtensor).__name__
        raise ArgumentError(f"from_dtensor: dtensor must be a DTensor; got {kind}.")
    mesh, placement = dtensor.device_mesh, dtensor.placements[0]
    if mesh.ndim != 1 or type(placement) is not Shard:
        raise ArgumentError(
            f"from_dtensor: dtensor must be sharded over one dimension of a mesh, [Shard(dim)]; "
            f"got placements {dtensor.placements} on {mesh}. Use "
            "dtensor.redistribute(placements=[Shard(dim)]); of parameters that fully_shard and "
            "parallelize_module shard, dtensor.full_tensor()."
        )
    ranks, dim = resolve(mesh), placement.dim
    sizes = ShardSizes.chunked(dtensor.shape[dim], ranks.size)
    with checking("from_dtensor", ranks) as where:
        local: torch.Tensor = _FromDTensor.apply(dtensor, placement)  # type: ignore[no-untyped-call]
        expected = packing.like(dtensor.shape, dim, sizes[ranks.rank])
        if local.shape != expected:
            raise ArgumentError(
                f"{where}of a DTensor of shape {tuple(dtensor.shape)}, sharded along dim {dim}, "
                f"this rank should have {tuple(expected)} (rows {list(sizes)}); got "
                f"{tuple(local.shape)}. It was made by DTensor.from_local of other shards."
            )
    _compare("from_dtensor", local, sizes, dim, ranks)
    return local, ShardSpec(ranks, dim, (sizes,))


def _compare(name: str, local: torch.Tensor, sizes: Sequence[int], dim: int, group: Group) -> None:
    if debugging():
        place = {"dim": dim, "sizes": list(sizes), "shape of a row": packing.rest(local.shape, dim)}
        kind = {"dtype": str(local.dtype), "requires_grad": local.requires_grad}
        compare(group, {"operation": name, **place, **kind})


def _strides(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of `shape` with the memory layout of the shard."""

    def key(dim: int) -> tuple[int, bool, int]:
        # a dimension of one row lies inside a longer one of equal stride
        return local.stride(dim), local.shape[dim] > 1, -dim

    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=key):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
