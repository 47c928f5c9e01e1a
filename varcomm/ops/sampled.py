"""A hash of a few entries of replicated parameters, which a sum over ranks carries.

Parameters that drift apart, by a forgotten sum or another seed, are wrong on every rank in another
way. So every fourth step looks at 32 entries, drawn alike on all ranks, of other tensors each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from varcomm.errors import DisagreementError
from varcomm.ops.carried import Word, words
from varcomm.ops.checks import TENSORS
from varcomm.ops.digest import differing, digest
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

_EVERY, _TENSORS, _RUN = 4, 8, 4  # steps, tensors in one of them, entries in a row of each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D  # odd; of the draws, and of the hash


def word_with(
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    parameters: Sequence[Tensor],
    name_of: Callable[[int], str],
) -> Word | None:
    """Return a word that also holds entries of parameters on `device`; None if it has no room."""
    of_dtype, log = words(group, dtype, device), group.log
    if of_dtype is None or log is None:
        return None
    step, log.sampled = log.sampled, log.sampled + 1
    runs = []
    if step % _EVERY == 0:
        runs = _drawn(parameters, device, step // _EVERY * _TENSORS, log.bits(48))
    if not runs:
        return of_dtype.now()

    def explain() -> None:
        own = {name_of(n): repr(digest(p)) for n, p in enumerate(parameters)}
        others, names = differing(share("values of parameters", lambda: own, group))
        if names:
            raise DisagreementError(
                f"{len(names)} of {len(parameters)} parameters no longer have the same values on "
                f"all ranks, the first is {names[0]!r}; ranks {others} differ from rank 0. "
                "Replicated parameters stay equal if they start equal (varcomm.broadcast_module), "
                "and every step sums their gradients: call vc.data_parallel.sum_gradients(model) "
                "after backward, before the optimizer's step."
            )

    return of_dtype.with_sample(_hash(runs, group), explain)


def _drawn(
    parameters: Sequence[Tensor], device: torch.device, first: int, draw: int
) -> list[Tensor]:
    """Return some entries of the next tensors, each a short run along the last dimension."""
    runs = []
    for place in range(min(_TENSORS, len(parameters))):
        entries = parameters[(first + place) % len(parameters)]
        if type(entries) not in TENSORS or entries.device != device or not entries.numel():
            continue
        entries = entries.detach()
        while entries.dim() > 1:
            draw = (draw * _FACTORS[0] + 1) % (1 << 48)
            entries = entries[(draw >> 16) % len(entries)]
        entries = entries.view(-1)
        draw = (draw * _FACTORS[0] + 1) % (1 << 48)
        start = (draw >> 16) % max(1, len(entries) - _RUN + 1)
        runs.append(entries[start : start + _RUN])
    return runs


def _hash(runs: Sequence[Tensor], group: Group) -> Tensor:
    """Return a hash of the bits of all entries, as an int64 on their device."""
    key = "factors of entries", runs[0].device
    factors: Tensor | None = group.auxiliary.get(key)
    if factors is None:  # one per 8 bytes of the entries, and all odd
        places = torch.arange(1, 4 * _TENSORS * _RUN, 2, device="cpu")
        factors = group.auxiliary[key] = (places * _FACTORS[1]).to(runs[0].device)
    total: Tensor | None = None
    for dtype in dict.fromkeys(run.dtype for run in runs):
        entries = torch.cat([run for run in runs if run.dtype == dtype])
        entries = torch.view_as_real(entries).view(-1) if entries.is_complex() else entries
        bits = entries.view(_BITS[entries.element_size()])
        sum_of_bits = (bits.to(torch.int64) * factors[: len(bits)]).sum()
        total = sum_of_bits if total is None else total * 31 + sum_of_bits
    assert total is not None
    return total ^ (total >> 29)
