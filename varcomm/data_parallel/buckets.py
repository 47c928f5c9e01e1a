"""Parameters cut into buckets: what travels in one message."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Bucket", "cut", "dense", "gradient_dtype"]


def gradient_dtype(value: torch.Tensor) -> torch.dtype:
    """Return in what dtype the gradient of a parameter comes; of a buffer, its own."""
    return getattr(value, "grad_dtype", None) or value.dtype  # of torch 2.9 or newer


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all its zeros; itself, where it has them."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def cut(values: Sequence[torch.Tensor], order: Sequence[int], nbytes: int) -> list[list[int]]:
    """Cut `values`, taken in `order`, into lists of indices of at most `nbytes` bytes.

    Each is of one dtype and device; a value that is larger has a list to itself. A list comes
    before another whose last value comes later.

    >>> x, y, z = torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)
    >>> cut([x, y, z], [2, 1, 0], nbytes=28), cut([x, y, z], [2, 1, 0], nbytes=27)
    ([[1], [2, 0]], [[2], [1], [0]])
    >>> cut([x[:0], x], [0, 1], nbytes=8)
    [[0], [1]]
    """
    lists: list[list[int]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in order:
        value = values[index]
        key = gradient_dtype(value), value.device
        size = value.numel() * key[0].itemsize
        members, room = current.get(key, ([], 0))
        if size > room or not members:  # the first may have no elements
            members, room = [], nbytes
            lists.append(members)
        members.append(index)
        current[key] = members, room - size
    place = {index: number for number, index in enumerate(order)}
    return sorted(lists, key=lambda members: place[members[-1]])


_NONE: Mapping[int, torch.Tensor] = {}


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together.

    What travels is all gradients in a row and, at the end, whether this rank has one, 0 or 1 for
    each. The sums of these tell which parameters no rank has used: one process would leave them
    without a gradient, and optimizers treat that differently from zeros.

    Attributes
    ----------
    parameters : mapping
        From what a parameter is known by to the parameter.
    """

    parameters: Mapping[int, torch.nn.Parameter]

    def flatten(
        self, gradients: Mapping[int, torch.Tensor], more: Mapping[int, torch.Tensor] = _NONE
    ) -> torch.Tensor:
        """Return what this rank adds to the sum; without a gradient that is zeros.

        What is in `more` is added to what is in `gradients`.
        """
        parts, used = [], []
        for index, parameter in self.parameters.items():
            gradient = gradients.get(index, more.get(index))
            used.append(gradient is not None)
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            parts.append(gradient.reshape(-1))
        flags = parts[0].new_ones(len(parts))
        for place, is_used in enumerate(used):
            if not is_used:
                flags[place] = 0
        flat = torch.cat([*parts, flags])
        for index, part in zip(self.parameters, self._split(flat)[:-1], strict=True):
            if index in gradients and index in more:
                part.add_(more[index].reshape(-1))
        return flat

    def deliver(
        self, total: torch.Tensor, own: Container[int], replaced: Container[int] = ()
    ) -> None:
        """Add the sum over ranks to ``grad`` of each parameter that some rank has used.

        `own` holds those that this rank has used. Without a ``grad`` so far, a parameter gets a
        part of `total` itself. It takes the place of what those in `replaced` have.
        """
        *parts, used = self._split(total)
        anywhere: list[bool] | None = None
        for place, (index, parameter) in enumerate(self.parameters.items()):
            part = parts[place].view(parameter.shape)
            if index in replaced and parameter.grad is not None:
                if parameter.grad.layout == torch.strided:
                    parameter.grad.copy_(part)
                    continue
                parameter.grad = None  # sparse
            if parameter.grad is not None:
                parameter.grad.add_(part)
                continue
            if index not in own:
                # asked for only now: a GPU would have to be waited for
                anywhere = used.bool().tolist() if anywhere is None else anywhere
                if not anywhere[place]:
                    continue
            if parameter.is_contiguous():
                parameter.grad = part.data  # no view, which could not be detached in place
            else:
                parameter.grad = torch.empty_like(parameter, dtype=part.dtype).copy_(part)

    def _split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes = [*(p.numel() for p in self.parameters.values()), len(self)]
        return list(flat.split(sizes))

    def __len__(self) -> int:
        return len(self.parameters)
