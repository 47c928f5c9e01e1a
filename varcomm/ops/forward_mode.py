"""Refusal of ``torch.func.linearize`` for rules of autograd that write into saved tensors."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.ops.graph_operator import records_graph


def refuse_linearize(where: str, writers: str) -> None:
    """Raise ArgumentError if ``torch.func.linearize`` records.

    It keeps tensors that do not depend on the tangents, and `writers` write into some of them.
    """
    if torch.compiler.is_compiling() or not records_graph():
        return
    x = torch.empty(0)
    has_level = forward_ad.unpack_dual(x).primal is not x  # of forward mode, without torch.func
    if has_level and not transforms_active():
        raise ArgumentError(
            f"{where}torch.func.linearize keeps tensors that {writers} write into, and its result "
            "would be wrong when called twice. Use torch.func.jvp."
        )
