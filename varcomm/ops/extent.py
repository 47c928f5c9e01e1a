"""Numbers of rows that compiled code does not take for constants.

torch.compile takes the ints that a module holds for constants, and compiles anew where another one
stands. The shapes of tensors may change.
"""

from __future__ import annotations

import torch

__all__ = ["counts_in", "extent_of"]

# Of sizes 0 and 1 the compiler makes constants in any case; there are none.
_ABOVE = 2


def extent_of(*counts: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor without elements whose shape tells these numbers."""
    shape = (*(count + _ABOVE for count in counts), 0)
    # products of numbers of rows, as strides are, may be larger than any int64
    extent = torch.empty_strided(shape, [0] * len(shape), device=device)
    # torch._dynamo.maybe_mark_dynamic, but for importing the compiler into every program: whoever
    # marks the sizes of features as dynamic means those of halos as well
    vars(extent)["_dynamo_weak_dynamic_indices"] = set(range(len(counts)))
    return extent


def counts_in(extent: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers that a shape tells.

    >>> counts_in(extent_of(3, 0, 10**12))
    (3, 0, 1000000000000)
    """
    return tuple(count - _ABOVE for count in extent.shape[:-1])
