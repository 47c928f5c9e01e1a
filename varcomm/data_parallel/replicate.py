"""``replicate``: the same module on every rank, with gradients that are summed in each backward."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch

from varcomm.data_parallel.global_count import Reduce
from varcomm.data_parallel.set_up import BUCKET_BYTES, set_up
from varcomm.transport.group import GroupLike

__all__ = ["replicate"]

Model = TypeVar("Model", bound=torch.nn.Module)


def replicate(
    model: Model,
    group: GroupLike = None,
    *,
    reduce: Reduce = "sum",
    initial: Literal["broadcast", "check"] = "broadcast",
    bucket_bytes: int = BUCKET_BYTES,
    use_fp32: bool = True,
) -> Model:
    """Make a module equal on all ranks, and sum its gradients over ranks in every backward.

    Collective: every rank calls it with a module of the same parameters and buffers, and all raise
    if one has to. Parameters and buffers get the values of rank 0.

    From then on each rank computes its part of the loss and calls ``backward()``, which adds to
    each parameter's ``grad`` what it would in one process with the whole loss: the sum over ranks
    of what this backward brings, or a mean of it. Micro-batches may be accumulated, parameters may
    be unused on some ranks; one that is unused on all gets no gradient, as in one process. The
    module has a hook more, and its ``state_dict`` is as it was. Calling it again, for the same
    group, starts anew, and forgets what a :class:`GlobalCount` has counted.

    Parameters
    ----------
    model : torch.nn.Module
        Any that has a forward, with parameters of any floating-point or complex dtypes. Frozen ones
        are left alone; which ones are frozen may change later, on all ranks alike.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    reduce : "sum", "mean" or GlobalCount
        What gradients become: their sum over ranks, that divided by the number of ranks, or divided
        by what a :class:`GlobalCount` has counted on all ranks.
    initial : "broadcast" or "check"
        Parameters and buffers get the values of rank 0, or must have them: then ranks compare
        checksums of 4 bytes a tensor, and no value travels.
    bucket_bytes : int
        Gradients travel in messages of about so many bytes.
    use_fp32 : bool
        Sum floats narrower than 4 bytes in fp32 and round once; else in their own dtype.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        On every rank, if `model` is no module, has no forward (as a ``ModuleList``), is or holds a
        ``DistributedDataParallel``, has parameters or buffers that are lazy, sparse or sharded, or
        shares parameters with another module that is replicated over the same ranks or over some of
        them, or with a :class:`ShardedGradients`; if gradients of backwards in :func:`no_sync` are
        yet to be summed; in ``torch.inference_mode()``; or if another argument is wrong. In forward
        and backward, on the rank where it happens, as the notes say; inside :func:`varcomm.debug`
        on all.
    DisagreementError
        On every rank, if names, shapes, dtypes or ``requires_grad`` of parameters or buffers
        differ, other arguments do, or values where they are checked. Inside :func:`varcomm.debug`
        also in backward, if ranks end the backward of other modules, sum or have frozen other
        parameters, or if only some are in :func:`no_sync`.
    GroupError
        If this rank is not in `group`; on every rank, if a parameter is where the group has no
        engine.

    Notes
    -----
    Every rank calls ``backward()`` equally often, from a loss that depends on the module's output
    or on derivatives of it, such as forces. That is enough: the output is tied to the sums, so an
    empty shard takes part though it depends on no parameter. It therefore requires a gradient, even
    if the module only hands on an input. A backward by which parameters get gradients, but which
    does not come by a tensor of the output, is an error, unless it is in :func:`no_sync`: that of a
    penalty alone, of a part of the module that was called by itself or by another method, of a
    tensor in an object that is no container, or ``backward(inputs=...)``. ``torch.autograd.grad``
    sums nothing. For ``backward(create_graph=True)`` and hooks by
    ``register_post_accumulate_grad_hook`` there is an error. To sum once after many micro-batches,
    run the others in :func:`no_sync`. Threads run backward through a module one after the other;
    where all of it is on the CPU, others are an error.

    The output may be written to as without this call, but for inputs, parameters and constants that
    are handed on, and for tensors in it that share memory: there torch raises.

    Parameters that are converted, to another dtype and back too, need another call: torch gives
    them new nodes, and forward raises.

    Several groups: on a mesh, a module may be replicated over one dimension and over another, and a
    module within it over other dimensions than the whole is. Each parameter's gradient is then
    summed over each of its groups once, over the first while backward goes on, and over the others
    at its end, in the order of the calls; each sum is divided as its call says. All ranks make
    these calls in the same order, before they train. Where groups overlap otherwise than dimensions
    of a mesh do, somebody would be counted twice; a rank that can tell so raises.

    Communication: reduce-scatter and all-gather of each bucket, ``2 (P - 1) / P`` times the bytes
    of the parameters that are trained and one value more for each, for each group; up to 16 KiB, a
    single round with ``P - 1`` times the bytes. A :class:`GlobalCount` adds a message of 16 bytes.
    The sums are in rank order, the same on all ranks bit for bit.

    Rounding: floats narrower than 4 bytes travel narrow, and are summed in fp32 and divided there,
    before they are rounded, once for each group; so a mean overflows only if a gradient does. With
    the unit roundoff ``u`` of the dtype that sums and ``v`` of a narrow one, a result is off by at
    most ``(P + 2) u`` times the sum of magnitudes, divided as it is, and ``v`` times its own.

    Buckets are filled from the last parameters to the first, and the sum of each is begun as soon
    as its gradients are there, while backward goes on, on a group of its own; so it may overlap
    with exchanges of the model. That group is made by the ranks of `group` alone. In a world that
    is bound to GPUs (as :func:`varcomm.init` does for NCCL) only all ranks could make one: there,
    sums over a part of the world are begun when backward is done. So they are in
    :func:`varcomm.debug`.

    A batch is skipped on all ranks or on none. A backward that fails before it has come to the
    module, in the loss, is not noticed where its error is caught, nor is one that a rank leaves
    out, in :func:`varcomm.debug` neither: the others wait for the next one of that rank, and sum it
    with theirs.

    If backward ends in an error, ``grad`` is as it was before, but for what one in :func:`no_sync`
    has added to it. If it came as far as to the module, further ones on that rank refuse to run,
    since other ranks may be elsewhere; call ``replicate`` again on all of them.

    Hooks of the parameters (``register_hook``) see what this rank brings, before the sum. Gradients
    that are sparse on a rank become dense. Buffers are made equal once: running statistics of batch
    norm are each rank's own, unless :func:`varcomm.graph.distribute` has made them global.

    A copy of the module (``copy.deepcopy``, ``torch.save`` of the whole module) is not replicated,
    and its forward raises where it would be trained on several ranks. Keep `model` itself while
    parts of it are used: the sums end with it, and gradients of what is left of it are an error. So
    it is where its group is destroyed, until ``replicate`` is called for another.

    In one process: `model` as it is, and backward from the sum of the losses of all ranks; with
    ``"mean"`` from their mean.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     torch.manual_seed(rank)
    ...     model = varcomm.data_parallel.replicate(torch.nn.Linear(1, 1, bias=False))
    ...     for micro_batch in (torch.ones(1, 1), torch.ones(2, 1)):
    ...         model(micro_batch).sum().backward()
    ...     return model.weight.grad.item()
    >>> varcomm.launch(fn, 2)
    [6.0, 6.0]
    """
    set_up(
        "data_parallel.replicate",
        model,
        group,
        reduce=reduce,
        initial=initial,
        bucket_bytes=bucket_bytes,
        use_fp32=use_fp32,
    )
    return model
