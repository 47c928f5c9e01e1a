"""Whether a ``ShardedGradients`` sums the gradient of a parameter, as is noted at its node."""

from __future__ import annotations

import torch

from varcomm.data_parallel.leaf import accumulator, notes
from varcomm.errors import ArgumentError

__all__ = ["MARK", "check_not_taken", "is_taken"]

# Under which a node keeps a weak reference to who takes what comes to it.
MARK = "varcomm.sharded"


def is_taken(parameter: torch.Tensor) -> bool:
    """Tell whether a ShardedGradients sums the gradient of a parameter."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return False
    mark = notes(accumulator(parameter)).get(MARK)
    return mark is not None and mark() is not None


def check_not_taken(parameter: torch.Tensor, what: str) -> None:
    """Raise if somebody else is about to sum it over ranks as well."""
    if is_taken(parameter):
        raise ArgumentError(
            f"{what} belongs to a ShardedGradients, which sums its gradients in backward. Take one "
            "of the two, or call its close() first."
        )
