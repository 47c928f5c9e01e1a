"""Checks of positions and weights."""

from __future__ import annotations

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.partitioners.curve import MOST_COORDINATES
from varcomm.sizes import holds_integers

__all__ = ["check_node_weight", "check_sum", "checked_positions", "checked_weight"]


def checked_positions(pos: object, name: str, method: str, rows: int | None = None) -> torch.Tensor:
    """Return `pos` as (n, D) if it holds finite positions; `rows` is the expected n, if known."""
    shape = f"({'n' if rows is None else rows}, D)"
    if not isinstance(pos, torch.Tensor) or pos.is_complex() or pos.dtype == torch.bool:
        got = pos.dtype if isinstance(pos, torch.Tensor) else type(pos).__name__
        raise ArgumentError(f"{name} must be a tensor of real numbers; got {got}.")
    if pos.dim() not in (1, 2) or rows not in (None, len(pos)) or pos.shape[1:].numel() == 0:
        raise ArgumentError(
            f'method="{method}" needs {name} of shape {shape}, a row for each node; got '
            f"{tuple(pos.shape)}."
        )
    pos = pos.detach().view(len(pos), pos.shape[1:].numel())
    if method == "hilbert" and pos.shape[1] > MOST_COORDINATES:
        raise ArgumentError(
            f'method="hilbert" takes at most {MOST_COORDINATES} coordinates; got {pos.shape[1]}. '
            'Choose method="rcb".'
        )
    # a NaN makes both bounds NaN
    if pos.numel() and not bool(torch.stack(pos.aminmax()).isfinite().all()):
        row = int((~pos.isfinite()).any(1).nonzero()[0])
        raise ArgumentError(f"{name} must be finite; row {row} is {pos[row].tolist()}.")
    return pos


def checked_weight(weight: torch.Tensor, name: str, rows: int, row: str) -> torch.Tensor:
    """Return `weight` as int64, if it holds a non-negative integer per row.

    Sums of integers are exact, in any order and on any number of ranks.
    """
    if not isinstance(weight, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor; got {type(weight).__name__}.")
    if not holds_integers(weight) or weight.shape != (rows,):
        hint = "" if holds_integers(weight) else " Scale and round it."
        raise ArgumentError(
            f"{name} must hold an integer for each of the {rows} {row}; got {weight.dtype} of "
            f"shape {tuple(weight.shape)}.{hint}"
        )
    weight = weight.detach().to(torch.int64)
    if rows and int(weight.min()) < 0:
        raise ArgumentError(f"{name} must not be negative; its least is {int(weight.min())}.")
    return weight


def check_node_weight(total: float, parts: int, name: str) -> None:
    """Raise ArgumentError if the weights of all nodes cannot be split into parts."""
    if total == 0:
        raise ArgumentError(f"{name} must not be zero everywhere.")
    check_sum(total, 2.0**62 / parts, name)


def check_sum(total: float, limit: float, name: str) -> None:
    """Raise ArgumentError if a sum, possibly rounded, exceeds a limit below half of int64."""
    if total >= limit:
        raise ArgumentError(
            f"{name} adds up to {total:.3g}, and must stay below {limit:.3g}. Divide all weights."
        )
