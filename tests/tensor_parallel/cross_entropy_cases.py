"""Logits, targets and weights of small vocabularies, and torch's loss of the whole logits."""

import torch
import torch.nn.functional as F

from tests.tensor_parallel.twins import REPLICATED, Sharded, drawn
from varcomm.tensor_parallel import linear_cross_entropy, vocab_parallel_cross_entropy

CLASSES, WIDTH = 11, 4

# how the 11 classes are split, by the number of ranks
SPLITS = {
    1: [[11]],
    2: [[6, 5], [0, 11], [8, 3]],
    3: [[2, 8, 1], [5, 0, 6], [0, 11, 0]],
    5: [[3, 2, 2, 2, 2], [0, 0, 0, 11, 0]],
}

# rows of hidden, of 5 in all, on each rank
ROWS = {1: [5], 2: [5, 0], 3: [1, 0, 4], 5: [1, 0, 2, 2, 0]}


def targets(*shape, classes=CLASSES, seed=0, ignored=0.3, ignore_index=-100):
    """Draw targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, shape, generator=generator)
    skip = torch.rand(shape, generator=generator) < ignored
    return target.masked_fill(skip, ignore_index)


def class_weights(classes=CLASSES):
    return drawn(7, classes).abs() + 0.1


def reference(
    logits,
    target,
    label_smoothing=0.0,
    ignore_index=-100,
    reduction="none",
    weight=None,
    z_loss=0.0,
):
    """The loss of whole logits by torch, with the term that torch has not."""
    counted = target != ignore_index
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight
    loss = F.cross_entropy(*flat, reduction="none", **options).view(target.shape)
    if z_loss:
        loss = loss + (z_loss * logits.logsumexp(-1) ** 2).masked_fill(~counted, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (counted.sum() if weight is None else weight[target[counted]].sum())


def of_logits(sizes, target, group=None, **options):
    """The loss of logits for :func:`~tests.tensor_parallel.twins.compare`."""
    return (
        lambda x: vocab_parallel_cross_entropy(x, target, sizes, group=group, **options),
        lambda x: reference(x, target, **options),
        [(4 * drawn(0, *target.shape, sum(sizes)), Sharded(-1, sizes))],
        REPLICATED,
    )


def of_hidden(sizes, target, rows=None, weight=None, **options):
    """The loss of hidden states, a head and its bias, in the same form."""
    classes, hidden = sum(sizes), drawn(0, *target.shape, WIDTH)

    def fn(x, head, bias):
        more = {"bias": bias, "sequence_sizes": rows}
        return linear_cross_entropy(x, head, target, sizes, class_weight=weight, **more, **options)

    return (
        fn,
        lambda *x: reference(F.linear(*x), target, weight=weight, **options),
        [
            (hidden, REPLICATED if rows is None else Sharded(0, rows)),
            (drawn(1, classes, WIDTH), Sharded(0, sizes)),
            (drawn(2, classes), Sharded(0, sizes)),
        ],
        REPLICATED,
    )
