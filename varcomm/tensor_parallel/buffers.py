"""Memory that is allocated once and used at every call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

__all__ = ["Buffers"]


class Buffers:
    """Memory for the results of one call, and for what it needs on the way, kept by the caller.

    .. warning::
       What a call returns lives in its buffers, and is **valid until the next call with the same
       buffers, which overwrites it.** Clone what is to be kept.

    Make one for each place in a program that calls; layers in a loop may share it, if nothing of
    one layer is still used at the same place of the next. The first call allocates, later ones
    only where they need more, or are of another device, or in :class:`torch.inference_mode` where
    the former was not. Without such an object, each call allocates.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.inference import Buffers, norm_column_linear
    >>> def fn(rank):
    ...     norm, buffers = torch.nn.RMSNorm(2), Buffers()
    ...     with torch.inference_mode():
    ...         first = norm_column_linear(torch.ones(1, 2), norm, torch.eye(2), buffers=buffers)
    ...         again = norm_column_linear(-torch.ones(1, 2), norm, torch.eye(2), buffers=buffers)
    ...     return first is not again, first.tolist()  # which the second call has overwritten
    >>> varcomm.launch(fn, 1)
    [(True, [[-1.0, -1.0]])]
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(
        self, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return uninitialised memory, the same for a role at each call while it is enough."""
        nbytes = prod(shape) * dtype.itemsize
        memory = self._memory.get(role)
        if (
            memory is None
            or memory.nbytes < nbytes
            or memory.device != device
            # outside of it, nothing can be written into a tensor of inference mode
            or memory.is_inference() != torch.is_inference_mode_enabled()
        ):
            self._memory.pop(role, None)  # no need to keep both
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._memory[role] = memory
        return memory[:nbytes].view(dtype).view(*shape)

    def hold(self, tensor: torch.Tensor) -> str | None:
        """Return for which role the memory of `tensor` was taken, or None if it is of others."""
        place = tensor.untyped_storage().data_ptr()
        for role, memory in self._memory.items():
            if place and memory.untyped_storage().data_ptr() == place:
                return role
        return None
