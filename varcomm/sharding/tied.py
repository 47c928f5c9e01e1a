"""Tensors of a state dict that have several names."""

from __future__ import annotations

import torch


def named_tensors(model: torch.nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Return the tensors of a state dict, each once, with all its names, in their order."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())
