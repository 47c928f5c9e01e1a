"""Logits, targets and weights of small vocabularies, and what torch makes of them."""

import torch
import torch.nn.functional as F

from varcomm import ShardSizes

CLASSES = 11

# how the 11 classes are split, by the number of ranks
SPLITS = {
    1: {"whole": [11]},
    2: {"off by one": [6, 5], "one empty": [0, 11], "uneven": [8, 3]},
    3: {"uneven": [2, 8, 1], "one empty": [5, 0, 6], "all on one": [0, 11, 0]},
    4: {"balanced": list(ShardSizes.balanced(11, 4)), "empty": [0, 7, 0, 4]},
    5: {"balanced": list(ShardSizes.balanced(11, 5)), "all on one": [0, 0, 0, 11, 0]},
}


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def targets(*shape, classes=CLASSES, seed=0, ignored=0.3, ignore_index=-100):
    """Draw targets, some of them ignored, and each rank's first and last class among them."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, shape, generator=generator)
    skip = torch.rand(shape, generator=generator) < ignored
    return target.masked_fill(skip, ignore_index)


def class_weights(classes=CLASSES, seed=7):
    return drawn(classes, seed=seed).abs() + 0.1


def reference(
    logits,
    target,
    label_smoothing=0.0,
    ignore_index=-100,
    reduction="none",
    weight=None,
    z_loss=0.0,
    smooth_over="all",
):
    """The loss of whole logits, by torch, or from its log-softmax where torch has no option."""
    counted = target != ignore_index
    if smooth_over == "all":
        flat = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            target.reshape(-1),
            weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        loss = flat.view(target.shape)
    else:
        classes = logits.shape[-1]
        of_class = F.one_hot(target.masked_fill(~counted, 0), classes).to(logits.dtype)
        q = of_class * (1 - label_smoothing) + (1 - of_class) * label_smoothing / (classes - 1)
        q = q if weight is None else q * weight
        loss = -(q * F.log_softmax(logits, -1)).sum(-1).masked_fill(~counted, 0)
    if z_loss:
        loss = loss + (z_loss * logits.logsumexp(-1) ** 2).masked_fill(~counted, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if weight is None:
        return loss.sum() / counted.sum()
    return loss.sum() / weight[target[counted]].sum()
