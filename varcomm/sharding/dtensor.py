"""``to_dtensor`` and ``from_dtensor``: a rank's own rows as torch's DTensor, and back, uncopied.

The two are linear maps between what all ranks hold, and each is the other's adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_shard
from varcomm.ops.operator import checking
from varcomm.sharding.spec import ShardSpec
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group, GroupLike, resolve

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["from_dtensor", "to_dtensor"]


class _ToDTensor(torch.autograd.Function):
    """Wrap the shard; a gradient that comes in other placements is brought to the shard's.

    torch's own ``DTensor.from_local`` does the latter past autograd, so that what depends on it has
    second derivatives of zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, dim: int, shape: torch.Size
    ) -> DTensor:
        from torch.distributed.tensor import DTensor, Shard

        ctx.mesh, ctx.placements = mesh, (Shard(dim),)
        ctx.set_materialize_grads(False)  # torch would make plain zeros of the whole shape
        return DTensor.from_local(
            x.detach(),
            mesh,
            ctx.placements,
            run_check=False,
            shape=shape,
            stride=_strides(x, shape),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(ctx.mesh, ctx.placements)
        return _local(gradient), None, None, None


class _FromDTensor(torch.autograd.Function):
    """Unwrap the shard; the gradient is wrapped alike."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        (placement,) = x.placements
        ctx.mesh, ctx.dim, ctx.shape = x.device_mesh, placement.dim, x.shape  # type: ignore[attr-defined]
        local = x.to_local()
        # what a collective of DTensor's returns may still be under way
        waited = local.wait() if hasattr(local, "wait") else local
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> DTensor:
        (gradient,) = gradients
        return _wrapped(gradient, ctx.mesh, ctx.dim, ctx.shape)


def _wrapped(x: torch.Tensor, mesh: DeviceMesh, dim: int, shape: torch.Size) -> DTensor:
    return _ToDTensor.apply(x, mesh, dim, shape)  # type: ignore[no-any-return, no-untyped-call]


def _local(x: DTensor) -> torch.Tensor:
    return _FromDTensor.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def to_dtensor(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, group: GroupLike = None
) -> DTensor:
    """Return this rank's rows as its shard of a DTensor, in the same memory.

    Parameters
    ----------
    tensor : torch.Tensor
        ``sizes[rank]`` rows along `dim`; any dtype.
    sizes : sequence of int
        Rows that each rank holds, one int a rank. They must be those into which torch splits:
        ``ShardSizes.chunked(sum(sizes), P)``.
    dim : int
        The dimension that is sharded.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.distributed.tensor.DTensor
        Of the whole shape, with the placement ``Shard(dim)``, on `group` where that is a mesh, else
        on the mesh without a name that ``DeviceMesh.from_group`` makes of it. Only DTensors of
        equal meshes can be computed with together.

    Raises
    ------
    ArgumentError
        If `sizes` are not those of torch; if `sizes`, `dim` and `tensor` do not fit on this rank;
        if the mesh is of another kind of device, to which torch would copy.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if `sizes`, `dim`, dtypes, the shape of a row
        or ``requires_grad`` differ between ranks.
    GroupError
        If this rank is not in `group`, or if `group` is a mesh of several dimensions.

    Notes
    -----
    Adjoint: :func:`from_dtensor`, after the gradient, where operations of DTensor's have left it
    replicated or partial, has been redistributed. All derivatives are exact, of any order. DTensor
    has no forward mode, and torch raises NotImplementedError there.

    A loss that is made of DTensors is one number for all ranks, ``loss.full_tensor()``, of which
    every rank starts backward. It counts once; so do its gradients here.

    Communication: none, but inside :func:`varcomm.debug`. In backward what torch's redistribution
    needs, and nothing where the gradient is sharded as the tensor is.

    In one process: ``torch.cat(shards, dim)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.sharding import to_dtensor
    >>> def fn(rank):
    ...     sizes = varcomm.ShardSizes.chunked(5, 2)
    ...     own = torch.tensor(sizes.range(rank), dtype=torch.float32, requires_grad=True)
    ...     whole = to_dtensor(own, sizes)
    ...     loss = (whole * whole).sum().full_tensor()
    ...     loss.backward()
    ...     return tuple(whole.shape), loss.item(), own.grad.tolist()
    >>> varcomm.launch(fn, 2)
    [((5,), 30.0, [0.0, 2.0, 4.0]), ((5,), 30.0, [6.0, 8.0])]
    """
    ranks = resolve(group)
    with checking("to_dtensor", ranks) as where:
        checked, dim = checked_shard(tensor, sizes, dim, ranks, where)
        _check_chunks(checked, dim, ranks.size, where)
        kind = tensor.device.type
        if isinstance(group, DeviceMesh) and group.device_type != kind:
            raise ArgumentError(
                f"{where}the tensor is on {tensor.device}, and the mesh is one of "
                f"{group.device_type!r}, to which torch would copy it. Move the tensor, or make "
                f"the mesh for {kind!r}."
            )
    mesh = (
        group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(ranks.process_group, kind)
    )
    _compare("to_dtensor", tensor, checked, dim, ranks)
    return _wrapped(tensor, mesh, dim, torch.Size(packing.like(tensor.shape, dim, sum(checked))))


def from_dtensor(dtensor: DTensor) -> tuple[torch.Tensor, ShardSpec]:
    """Return this rank's shard of a DTensor, in the same memory, and how that is sharded.

    Parameters
    ----------
    dtensor : torch.distributed.tensor.DTensor
        On a mesh of one dimension, with a placement ``Shard(dim)``; any dtype.

    Returns
    -------
    torch.Tensor
        This rank's own rows. What DTensor was still receiving has been waited for.
    ShardSpec
        ``spec.sizes`` and ``spec.dim`` are what varcomm's operations take, beside
        ``group=dtensor.device_mesh``.

    Raises
    ------
    ArgumentError
        If `dtensor` is none, is replicated or partial, is sharded over several dimensions of a
        mesh, or has other rows on this rank than torch's rule gives it.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if shapes, `dim`, dtypes or ``requires_grad``
        differ between ranks.
    GroupError
        If this rank is not in the mesh.

    Notes
    -----
    Adjoint: :func:`to_dtensor`. All derivatives are exact, of any order. The loss is the sum of
    those of all ranks, as after every operation of varcomm's: let each be a part of the whole.

    Communication: none, but inside :func:`varcomm.debug`.

    In one process: ``whole.split(spec.sizes, spec.dim)``, of which rank r has the r-th.

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
    mesh, dim = _checked_placement(dtensor)
    ranks = resolve(mesh)
    sizes = ShardSizes.chunked(dtensor.shape[dim], ranks.size)
    with checking("from_dtensor", ranks) as where:
        local = _local(dtensor)
        expected = packing.like(dtensor.shape, dim, sizes[ranks.rank])
        if local.shape != expected:
            raise ArgumentError(
                f"{where}of a DTensor of shape {tuple(dtensor.shape)}, sharded along dim {dim}, "
                f"this rank should have {tuple(expected)} (rows {list(sizes)}); got "
                f"{tuple(local.shape)}. It was made by DTensor.from_local of other shards."
            )
    _compare("from_dtensor", local, sizes, dim, ranks)
    return local, ShardSpec(ranks, dim, (sizes,))


def _check_chunks(sizes: Sequence[int], dim: int, ranks: int, where: str) -> None:
    total = sum(sizes)
    chunks = ShardSizes.chunked(total, ranks)
    if tuple(sizes) != chunks:
        raise ArgumentError(
            f"{where}torch splits {total} rows over {ranks} ranks into {list(chunks)}, and a "
            f"DTensor has no other sizes; got {list(sizes)}. Take chunks = ShardSizes.chunked("
            f"{total}, {ranks}) from the start, or move the rows that differ, on all ranks: "
            "ExchangePlan.from_needed(torch.tensor(chunks.range(rank)), sizes, group)"
            f"(tensor, dim={dim})."
        )


def _checked_placement(dtensor: object) -> tuple[DeviceMesh, int]:
    """Return the mesh and the sharded dimension, or raise where there are not one of each."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"from_dtensor: dtensor must be a DTensor; got {type(dtensor).__name__}."
        )
    mesh, placements = dtensor.device_mesh, dtensor.placements
    if mesh.ndim != 1:
        raise ArgumentError(
            "from_dtensor: sizes are those of one dimension of a mesh; got placements "
            f"{placements} on {mesh}. Make activations on one dimension, mesh[name]. Parameters "
            "that fully_shard or parallelize_module has sharded over several are theirs: let the "
            "layer compute, or take dtensor.full_tensor()."
        )
    (placement,) = placements
    if placement.is_partial():
        raise ArgumentError(
            f"from_dtensor: {placement} is not summed yet. Shard it first, "
            "dtensor.redistribute(placements=[Shard(dim)]), or into any sizes: "
            "varcomm.reduce_scatter_v(dtensor.to_local(), sizes)."
        )
    if placement.is_replicate():
        raise ArgumentError(
            "from_dtensor: a replicated DTensor has no shards. If ranks use it each in its own "
            "way, take dtensor.to_local(grad_placements=[Partial()]), whose gradient is summed "
            "over ranks; to shard it, dtensor.redistribute(placements=[Shard(dim)])."
        )
    if type(placement) is not Shard:
        raise ArgumentError(
            f"from_dtensor: {placement} has rows in another order than rank by rank. Bring them in "
            "order first: dtensor.redistribute(placements=[Shard(dim)])."
        )
    return mesh, placement.dim


def _compare(name: str, local: torch.Tensor, sizes: Sequence[int], dim: int, group: Group) -> None:
    if debugging():
        call = {
            "operation": name,
            "dim": dim,
            "sizes": list(sizes),
            "shape of a row": packing.rest(local.shape, dim),
            "dtype": str(local.dtype),
            "requires_grad": local.requires_grad,
        }
        compare(group, call)


def _strides(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return those of a dense tensor of `shape` whose dimensions lie in memory as the shard's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=local.stride, reverse=True)[::-1]:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
