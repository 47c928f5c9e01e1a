"""A hash of a few entries of replicated parameters, which a sum over ranks carries.

Parameters that drift apart, by a forgotten sum or another seed, are wrong on every rank in another
way. So each step looks at 32 entries, drawn alike on all ranks, and at other tensors in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varcomm.errors import DisagreementError
from varcomm.ops.carried import Word, words
from varcomm.ops.digest import differing, digest
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

_TENSORS, _RUN = 8, 4  # tensors per step, and entries in a row of each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D  # odd; of the draws, and of the hash


def word_with(
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    parameters: Mapping[str, Tensor],
) -> Word | None:
    """Return a word that also holds entries of parameters on `device`; None if it has no room."""
    of_dtype, log = words(group, dtype, device), group.log
    if of_dtype is None or log is None:
        return None
    plain = (torch.Tensor, torch.nn.Parameter)
    given = {n: p for n, p in parameters.items() if type(p) in plain and p.device == device}
    known = [p for p in given.values() if p.numel()]
    runs = _drawn(known, _TENSORS, log.sampled, log.bits(48))
    log.sampled += _TENSORS
    if not runs:
        return of_dtype.now()

    def explain() -> None:
        own = {name: repr(digest(p)) for name, p in given.items()}
        others, names = differing(share("values of parameters", lambda: own, group))
        if names:
            raise DisagreementError(
                f"{len(names)} of {len(given)} parameters no longer have the same values on all "
                f"ranks, the first is {names[0]!r}; ranks {others} differ from rank 0. Replicated "
                "parameters stay equal if they start equal (varcomm.broadcast_module), and every "
                "step sums their gradients: call vc.data_parallel.sum_gradients(model) after "
                "backward, before the optimizer's step."
            )

    return of_dtype.with_sample(_hash(runs), explain)


def _drawn(known: Sequence[Tensor], count: int, first: int, draw: int) -> list[Tensor]:
    """Return some entries of the next tensors, each a short run along the last dimension."""
    runs = []
    for place in range(min(count, len(known))):
        entries = known[(first + place) % len(known)].detach()
        while entries.dim() > 1:
            draw = (draw * _FACTORS[0] + 1) % (1 << 48)
            entries = entries.select(0, (draw >> 16) % len(entries))
        entries = entries.view(-1)
        draw = (draw * _FACTORS[0] + 1) % (1 << 48)
        start = (draw >> 16) % max(1, len(entries) - _RUN + 1)
        runs.append(entries[start : start + _RUN])
    return runs


def _hash(runs: Sequence[Tensor]) -> Tensor:
    """Return a hash of the bits of all entries, as an int64 on their device."""
    total = runs[0].new_zeros((), dtype=torch.int64)
    for dtype in dict.fromkeys(run.dtype for run in runs):
        entries = torch.cat([run for run in runs if run.dtype == dtype])
        entries = torch.view_as_real(entries).view(-1) if entries.is_complex() else entries
        bits = entries.view(_BITS[entries.element_size()]).to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device).mul_(_FACTORS[1])
        total = total * 31 + (bits * places).sum()
    return total ^ (total >> 29)
