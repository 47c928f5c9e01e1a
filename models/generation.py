"""Text generation, token by token, identical on all ranks."""

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops.broadcast import broadcast
from varcomm.sizes import ShardSizes, exact_int
from varcomm.tensor_parallel import ColumnParallelLinear, gather_from_tensor_model_parallel_region
from varcomm.transport.agreement import compare


class Decoder(Protocol):
    """A model that :func:`generate` accepts, such as :class:`varcomm.models.GPT`."""

    head: Any  # an nn.Linear, or its parallel replacement

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the input of the head: (S, *F, H), or this rank's part of the sequence."""


@torch.no_grad()
def generate(
    model: Decoder,
    ids: Tensor,
    steps: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    context: int | None = None,
) -> Tensor:
    """Continue texts token by token.

    Parameters
    ----------
    model : Decoder
        The same model on all ranks, sharded or not.
    ids : Tensor
        The first tokens of the texts, (S, *F) of int64 with S at least 1; identical on all ranks.
    steps : int
        Number of tokens to add.
    temperature : float
        Divisor of the logits before a token is drawn; 0 selects the most likely token.
    generator : torch.Generator, optional
        Generator of the draws; None means torch's default generator. If the model is sharded, the
        first rank of the group draws.
    context : int, optional
        Number of last tokens that the model reads; None means all.

    Returns
    -------
    Tensor
        (S + steps, *F), identical on all ranks.

    Raises
    ------
    ArgumentError
        If an argument is out of range, or if the model must read more tokens than the sum of its
        `sequence_sizes`.
    DisagreementError
        If ranks that share the layers pass different arguments.
    FloatingPointError
        If logits are not finite.

    See Also
    --------
    varcomm.models.GPT, varcomm.tensor_parallel.parallelize

    Notes
    -----
    Draws are independent of the number of ranks. Logits differ between numbers of ranks only by
    rounding.

    Communication: one round of messages that compares the arguments, and one broadcast of all
    draws. Per token, the messages of the layers for the full context, and an all-gather of the
    logits of the last token.

    Examples
    --------
    >>> import torch
    >>> from varcomm.models import GPT
    >>> model = GPT(11, 8, num_layers=1, num_heads=2)
    >>> model.generate(torch.tensor([3, 1, 4]), 5).shape
    torch.Size([8])
    """
    name = f"{type(model).__name__}.generate"
    if isinstance(model.head, ColumnParallelLinear):
        given = {
            "ids": tuple(ids.shape),
            "steps": steps,
            "context": context,
            "temperature": temperature,
        }
        words = {word: repr(value) for word, value in given.items()}  # in which a NaN equals itself
        compare(model.head.group, {"operation": name, **words})
    longest = _longest(model.head, ids, steps, temperature, context, f"{name}: ")
    for draw in _draws(model.head, (steps, *ids.shape[1:], 1), generator, ids.device):
        logits = _last_logits(model, ids[-longest:]).double()
        if not logits.isfinite().all():
            raise FloatingPointError(f"{name}: logits are not finite.")
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            below = logits - logits.amax(-1, keepdim=True)  # finite for any divisor
            shares = (below / temperature).softmax(-1).cumsum(-1)
            chosen = torch.searchsorted(shares, draw * shares[..., -1:], right=True)
            chosen = chosen.clamp(max=shares.shape[-1] - 1)
        ids = torch.cat([ids, chosen.movedim(-1, 0)])
    return ids


def _longest(
    head: Any, ids: Tensor, steps: int, temperature: float, context: int | None, where: str
) -> int:
    """Return the number of tokens in the longest input of the model, after checks."""
    made, seen = exact_int(steps), 1 if context is None else exact_int(context)
    counted = made is not None and made >= 0 and seen is not None and seen >= 1
    if ids.dim() == 0 or len(ids) == 0 or not (counted and 0 <= temperature < inf):
        raise ArgumentError(
            f"{where}needs a token, a whole number of steps and a temperature, at least 0, and a "
            f"context of at least 1; got ids {tuple(ids.shape)}, {steps}, {temperature} and "
            f"{context}."
        )
    longest = min(len(ids) + steps - 1, len(ids) + steps if context is None else context)
    sizes = getattr(head, "sequence_sizes", None)
    if sizes is not None and longest > sum(sizes):
        raise ArgumentError(
            f"{where}{longest} tokens are more than sequence_sizes {list(sizes)} sum to, "
            f"{sum(sizes)}. Pass context."
        )
    return longest


def _draws(
    head: Any, shape: Sequence[int], generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Return numbers in [0, 1) from the first rank's generator, on all ranks."""
    on = generator.device if generator else device
    draws = torch.rand(*shape, generator=generator, dtype=torch.float64, device=on).to(device)
    if not isinstance(head, ColumnParallelLinear):
        return draws
    return broadcast(draws, group=head.group.process_group)


def _last_logits(model: Decoder, ids: Tensor) -> Tensor:
    """Return the logits of the next token, (*F, V)."""
    last, head = len(ids) - 1, model.head
    if not isinstance(head, ColumnParallelLinear):
        return cast(Tensor, head(model.hidden(ids)[last]))
    if head.sequence_sizes is None:
        logits = head(model.hidden(ids)[last:])
    else:
        # Pad to the sum of sequence_sizes; causal attention ignores tokens after the last place.
        sizes, rank = ShardSizes(head.sequence_sizes), head.group.rank
        behind = ids.new_zeros(sizes.total - len(ids), *ids.shape[1:])
        own, owner = model.hidden(torch.cat([ids, behind])), sizes.owner(last)
        start = last - sizes.offsets[rank] if rank == owner else len(own)
        row = [int(other == owner) for other in range(len(sizes))]
        logits = head(own[start : start + 1], sequence_sizes=row)
    group = head.group.process_group
    return gather_from_tensor_model_parallel_region(logits[0], head.spec.sizes, -1, group)
