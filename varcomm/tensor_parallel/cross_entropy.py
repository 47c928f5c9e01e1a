"""Cross entropy over a vocabulary that is sharded, from logits or from hidden states and a head.

Each rank reduces its own columns to three numbers per token (:mod:`.class_statistics`), a few rows
at a time. These numbers are gathered, and every rank computes the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.carried import refuse_if
from varcomm.ops.checks import check_on_device, checked_shard, checked_tensor, checking
from varcomm.ops.digest import digest
from varcomm.ops.graph_operator import in_graph
from varcomm.ops.handle import apply
from varcomm.ops.reduction import accumulation_dtype
from varcomm.ops.replicated import ComparedGather, ReplicatedUse
from varcomm.sizes import ShardSizes, exact_int
from varcomm.tensor_parallel.class_statistics import class_statistics
from varcomm.tensor_parallel.derivatives import in_transform, refuse_linearize
from varcomm.tensor_parallel.layout import checked_choice, checked_number
from varcomm.tensor_parallel.linear import autocast, checked_operands
from varcomm.tensor_parallel.mappings import shard_ends, shard_sizes
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.engine import is_capturing
from varcomm.transport.group import Group, GroupLike, named, resolve

Reduction = Literal["none", "mean", "sum"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    sizes: Sequence[int] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    weight: Tensor | None = None,
    z_loss: float = 0.0,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `target` is replicated, and compute the loss of sharded logits, replicated.

    Every rank calls ``backward`` on its copy of the loss, which counts once.

    Parameters
    ----------
    logits : torch.Tensor
        Floats ``(*T, sizes[rank])``: this rank's classes along the *last* dimension.
    target : torch.Tensor
        int64 ``(*T)``: the class of each token, counted over all ranks; identical on all ranks.
    sizes : sequence of int, optional
        Classes per rank; zeros are allowed. If None, ranks exchange their sizes.
    label_smoothing : float
        Part of the target's mass that goes to all K classes, in [0, 1). Megatron distributes `s`
        over the K - 1 wrong classes: pass ``s * K / (K - 1)``.
    ignore_index : int
        Tokens with this target have loss and gradient 0 and do not count in a mean.
    reduction : {"none", "mean", "sum"}
        The mean is the sum of all losses over the sum of the weights of their targets.
    weight : torch.Tensor, optional
        Floats ``(sum(sizes),)``: a weight per class, complete and identical on all ranks.
    z_loss : float
        Add ``z_loss * logsumexp(logits) ** 2`` per token that is not ignored, without class weights
        (Chowdhery et al., "PaLM", 2022, section 5).
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    torch.Tensor
        ``(*T)``, or a scalar; bit for bit the same on all ranks. fp32 for narrower logits,
        otherwise their dtype.

    Raises
    ------
    ArgumentError
        Before any data moves, if arguments do not match, or a target is not a class (on a GPU, a
        kernel then fails, as in torch). On every rank, if the logits are complete: identical on all
        ranks, with all targets among them; with `sizes`, from 20 targets other than 0 on, or
        inside :func:`varcomm.debug`.

    See Also
    --------
    linear_cross_entropy, VocabParallelEmbedding

    Notes
    -----
    Communication: one all-gather of three numbers per token, of 4 bytes each for logits of up to 4
    bytes; nothing in backward. Two more numbers compare the calls of ranks.

    Memory: logits and their gradient, some numbers per token and rank, and 4 MiB on a CPU or 256
    MiB on a GPU. With ``create_graph=True``, ``torch.func`` and in forward mode, a few times the
    memory of the logits.

    In one process: :func:`torch.nn.functional.cross_entropy` of all logits, one token per row.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import vocab_parallel_cross_entropy
    >>> def fn(rank):
    ...     logits = torch.zeros(2, [2, 1][rank], requires_grad=True)
    ...     loss = vocab_parallel_cross_entropy(logits, torch.tensor([2, 0]), [2, 1])
    ...     loss.sum().backward()
    ...     return loss.exp().tolist(), (3 * logits.grad).round().tolist()
    >>> varcomm.launch(fn, 2)
    [([3.0, 3.0], [[1.0, 1.0], [-2.0, 1.0]]), ([3.0, 3.0], [[-2.0], [1.0]])]
    """
    options = _Options(label_smoothing, ignore_index, reduction, z_loss)
    return _loss("vocab_parallel_cross_entropy", group, options, target, weight, sizes, logits)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    sizes: Sequence[int] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    bias: Tensor | None = None,
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Assume that `hidden` and `target` are replicated, and compute the loss of a sharded head.

    :func:`vocab_parallel_cross_entropy` of ``hidden @ weight.T + bias``, of which only the logits
    of one chunk of tokens exist at a time.

    Parameters
    ----------
    hidden : torch.Tensor
        Floats ``(*T, H)``, identical on all ranks; with `sequence_sizes`, this rank's part.
    weight : torch.Tensor
        Rows of the head for this rank's classes, ``(sizes[rank], H)``.
    bias : torch.Tensor, optional
        Bias of the head for this rank's classes, ``(sizes[rank],)``, or None.
    target : torch.Tensor
        int64 ``(*T)``: the class of each token of the full sequence; identical on all ranks.
    sizes, label_smoothing, ignore_index, reduction, z_loss, group
        As in :func:`vocab_parallel_cross_entropy`.
    class_weight : torch.Tensor, optional
        ``(sum(sizes),)``: a weight per class.
    sequence_sizes : sequence of int, optional
        Rows of the first dimension of `hidden` per rank; zeros are allowed.

    Returns
    -------
    torch.Tensor
        The loss, as from :func:`vocab_parallel_cross_entropy`, with the same errors.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message.

    Notes
    -----
    Communication: one all-gather of three numbers per token, and in backward an all-reduce of the
    gradient of `hidden`; with `sequence_sizes`, a gather of `hidden` and a reduce-scatter.

    Memory: `hidden` (gathered) and `weight` are kept, and the logits of a chunk exist two or three
    times; with ``create_graph=True``, ``torch.func`` and in forward mode all logits. Backward
    computes the logits of each chunk again (Wijmans et al., "Cut Your Losses in Large-Vocabulary
    Language Models", 2025). Under ``torch.autocast`` operands are cast as for a linear layer.

    In one process: ``torch.nn.functional.cross_entropy`` of ``torch.nn.functional.linear(hidden,
    weight, bias)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import linear_cross_entropy
    >>> def fn(rank):
    ...     head = torch.zeros([2, 1][rank], 4)
    ...     return linear_cross_entropy(torch.ones(2, 4), head, torch.tensor([2, 0]), [2, 1]).exp()
    >>> varcomm.launch(fn, 2)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    options = _Options(label_smoothing, ignore_index, reduction, z_loss)
    head = weight, bias, sequence_sizes
    return _loss("linear_cross_entropy", group, options, target, class_weight, sizes, hidden, head)


@dataclass(frozen=True)
class _Options:
    label_smoothing: float
    ignore_index: int
    reduction: Reduction
    z_loss: float

    def check(self, where: str) -> None:
        """Raise ArgumentError if one of the options is wrong."""
        of_one, of_z = "a number in [0, 1)", "a finite number from 0"
        checked_number(self.label_smoothing, "label_smoothing", where, of_one, lambda s: 0 <= s < 1)
        checked_number(self.z_loss, "z_loss", where, of_z, lambda z: 0 <= z < math.inf)
        if exact_int(self.ignore_index) is None:
            raise ArgumentError(f"{where}ignore_index must be an int; got {self.ignore_index!r}.")
        checked_choice(self.reduction, "reduction", where, get_args(Reduction))


def _loss(
    name: str,
    group: GroupLike,
    options: _Options,
    target: Tensor,
    weight: Tensor | None,
    sizes: Sequence[int] | None,
    values: Tensor,
    linear: tuple[Tensor, Tensor | None, Sequence[int] | None] | None = None,
) -> Tensor:
    """Return the loss of logits, or of hidden states and a linear head; one collective.

    With smoothing `s` a token has the distribution ``(1 - s) [c = y] + s / K`` over classes `c`,
    times their weights: `share` for each class, and a mass `q` for the target `y`.
    """
    ranks = resolve(group)
    head, bias, sequence_sizes = linear or (None, None, None)
    stated = sizes is not None
    of_classes, dim = (values, -1) if linear is None else (linear[0], 0)
    asked, use = shard_sizes(name, of_classes, sizes, dim, ranks), None
    with checking(name, ranks) as where:
        options.check(where)
        _check_floats(values, "logits" if linear is None else "hidden", where)
        if linear is not None:
            checked_operands(values, linear[0], bias, where, "hidden")
        sizes = ShardSizes(checked_shard(of_classes, asked, dim, ranks, where)[0])
        if sizes.total == 0:
            raise ArgumentError(f"{where}sizes sum to 0: there are no classes ({list(sizes)}).")
        tokens = values.shape[:-1]
        if sequence_sizes is not None:
            parts, _ = checked_shard(values, sequence_sizes, 0, ranks, where, "sequence_sizes")
            tokens = torch.Size((sum(parts), *tokens[1:]))
        _check_target(target, tokens, values.device, where)
        of_weight = "weight" if linear is None else "class_weight"
        _check_weights(weight, of_weight, values.device, sizes, where)
        refuse_linearize(where, "chunks of rows")
        ignore_index = int(options.ignore_index)
        check = _recorded_classes if in_graph(target) else _classes
        classes = check(target, sizes.total, ignore_index, name, ranks.rank, ranks.size)
    if head is not None:
        values, head, bias = autocast(values, head, bias)
        if sequence_sizes is None:
            use = ReplicatedUse(ranks, use_fp32=True)
        else:
            values = all_gather_v(values, parts, 0, group=ranks.process_group)
    if not torch.compiler.is_compiling() and debugging():
        described = {
            "operation": name,
            "sizes": list(sizes),
            "options": repr(options),
            "shape of target": list(target.shape),
            "values of target": digest(target),
            "weights": None if weight is None else digest(weight),
            "hidden": None if use is None else [*values.shape, values.requires_grad],
        }
        compare(ranks, described)
    dtype = accumulation_dtype(values.dtype, use_fp32=True)
    share = float(options.label_smoothing) / sizes.total
    ignored, own = target == ignore_index, sizes.range(ranks.rank)
    ends = shard_ends(ranks, sizes, target)
    owner = torch.bucketize(classes, ends, right=True)
    mine, own_weights = owner == ranks.rank, None
    counted = torch.ones_like(classes, dtype=dtype)
    if weight is not None:
        weights = weight.detach().to(dtype)
        own_weights, counted = weights[own.start : own.stop], weights[classes]
    counted = counted.masked_fill(ignored, 0)
    q = (1 - float(options.label_smoothing)) * counted

    column, local_q = (classes - own.start).masked_fill(~mine, 0), q.masked_fill(~mine, 0)
    own_rows = class_statistics(values, column, local_q, head, bias, own_weights, share, use)
    gather = ComparedGather(ranks, (3,) * ranks.size, 0, use_fp32=True)
    top, log, part = apply(gather, torch.stack(own_rows)).unflatten(0, (ranks.size, 3)).unbind(1)
    top = top.detach()
    if ranks.size > 1 and all(n == sizes[0] for n in sizes) and not in_transform():
        check_parts = _recorded_parts if in_graph(target) else _parts
        # without a target, none shows that logits are complete
        shown = classes.masked_fill(ignored.all(), sizes.total - 1)
        of_call = name, ranks.name, ranks.rank, sizes[0], stated
        top = check_parts(top, log.detach(), shown, *of_call)
    # A shift near the log-sum-exp. Its own rounding cancels because only differences from tops
    # are used; `above` from their sum would be rounded.
    peak = (top + log.detach()).amax(0)
    rest = torch.logsumexp(top - peak + log, 0)
    above = peak - top + rest  # the log-sum-exp above the top of each shard
    loss: Tensor = part.sum(0) + q * above.gather(0, owner.unsqueeze(0)).squeeze(0)
    if share:
        of_shards = ends.diff(prepend=ends.new_zeros(1)).to(dtype)
        if weight is not None:
            of_shards = torch.stack([part.sum() for part in weights.split(list(sizes))])
        loss = loss + share * (of_shards.view(-1, *[1] * q.dim()) * above).sum(0)
    if options.z_loss:
        loss = loss + options.z_loss * (peak + rest) ** 2
    loss = loss.masked_fill(ignored, 0)
    if options.reduction == "none":
        return loss
    total = loss.sum()
    return total if options.reduction == "sum" else total / counted.sum()


def _check_floats(x: Tensor, name: str, where: str) -> None:
    checked_tensor(x, where, name)
    if not x.is_floating_point() or x.dtype.itemsize < 2 or x.dim() == 0:
        raise ArgumentError(
            f"{where}{name} must be floats of 2 bytes or more with at least 1 dimension; got "
            f"{x.dtype} of shape {tuple(x.shape)}."
        )


def _check_target(target: Tensor, tokens: torch.Size, device: torch.device, where: str) -> None:
    checked_tensor(target, where, "target")
    if target.dtype != torch.int64 or target.shape != tokens or target.device != device:
        raise ArgumentError(
            f"{where}target must be int64 of shape {tuple(tokens)}, the id of a class per token "
            f"(classes are along the last dimension of logits), on {device}; got {target.dtype} of "
            f"shape {tuple(target.shape)} on {target.device}. Distributions are not supported."
        )


def _check_weights(
    weight: Tensor | None, name: str, device: torch.device, sizes: ShardSizes, where: str
) -> None:
    if weight is None:
        return
    _check_floats(weight, name, where)
    if weight.shape != (sizes.total,) or weight.requires_grad or weight.device != device:
        raise ArgumentError(
            f"{where}{name} must have {sizes.total} entries, one per class, complete on all ranks, "
            f"on {device} and without a gradient; got shape {tuple(weight.shape)} on "
            f"{weight.device}, requires_grad={weight.requires_grad}."
        )


def _classes(
    target: Tensor, classes: int, ignored: int, name: str, rank: int, ranks: int
) -> Tensor:
    """Return targets with class 0 for ignored tokens; check that all are classes."""
    known = target.masked_fill(target == ignored, 0).contiguous()

    def message() -> str:
        outside = (known < 0) | (known >= classes)
        first = tuple(outside.nonzero()[0].tolist())
        return (
            f"{name} on rank {rank} of {ranks}: target{list(first)} is {int(target[first])}, which "
            f"is not a class, 0...{classes - 1}, and not ignore_index, {ignored}; so are "
            f"{int(outside.sum()) - 1} more."
        )

    check_on_device(known.view(-1), classes, message)
    return known


_MANY = 20  # targets that are rarely all of the first shard


def _parts(
    top: Tensor,
    log: Tensor,
    classes: Tensor,
    name: str,
    group: str,
    rank: int,
    size: int,
    stated: bool,
) -> Tensor:
    """Return `top`; raise if the logits are complete: identical on all ranks, with all targets.

    Ranks with equal logits in all classes show nothing, as with weights of zeros. Shards that start
    equal look like them; with sizes, many targets decide.
    """
    ranks = named(group, rank)
    if is_capturing():
        return top
    same = (top == top[0]).all() & (log == log[0]).all() & (classes < size).all()
    found = same & (log[0].isfinite() & (log[0] < math.log(size) - 1e-3)).any()
    if stated and not debugging():  # ignored targets are 0
        found = found & (classes.count_nonzero() >= _MANY)
    refuse = partial(_refuse_parts, name, ranks, size)
    if not (found.is_cpu or debugging()):
        refuse_if(ranks, found, refuse)
    elif found:
        refuse()
    return top


def _refuse_parts(name: str, ranks: Group, size: int) -> None:
    raise ArgumentError(
        f"{name} on {ranks.label}: the logits of {size} classes are identical on all ranks, and "
        f"all targets are below {size}, so these are complete logits. Pass the logits of this "
        "rank's classes (a transformers model: parallelize(model, gather_output=False)), or call "
        "torch.nn.functional.cross_entropy with complete logits. If they are shards that start "
        "equal, draw each with another seed."
    )


_recorded_parts = torch.library.custom_op(
    "varcomm::parts_of_classes",
    mutates_args=(),
    schema="(Tensor top, Tensor log, Tensor classes, str name, str group, int rank, SymInt size, "
    "bool stated) -> Tensor",
)(lambda top, *others: _parts(top, *others).clone(memory_format=torch.contiguous_format))

# in a compiled graph the targets are checked when it runs
_recorded_classes = torch.library.custom_op(
    "varcomm::known_classes",
    mutates_args=(),
    schema="(Tensor target, SymInt classes, int ignored, str name, int rank, int ranks) -> Tensor",
)(_classes)

for _recorded in (_recorded_parts, _recorded_classes):
    _recorded.register_fake(lambda x, *_: x.new_empty(x.shape))
