"""Which peers there are, and what they can do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from types import ModuleType

import torch

from varcomm.cli.bench.case import PEER, Case, Contender
from varcomm.cli.bench.layout import Layout
from varcomm.cli.bench.peers import anemoi, padded, physicsnemo, torch_nn
from varcomm.cli.bench.peers.cannot import CannotError
from varcomm.cli.bench.ways import contender

__all__ = ["PEERS", "entered", "versions"]

# A module has way(case, layout), which returns a function of the input, or raises CannotError on
# all ranks alike; and PACKAGE, of PyPI, or None where it needs none.
PEERS: Mapping[str, ModuleType] = {
    "padded": padded,
    "torch.nn": torch_nn,
    "anemoi": anemoi,
    "physicsnemo": physicsnemo,
}


def entered(
    case: Case, layout: Layout, x: torch.Tensor, gradient: torch.Tensor | None
) -> tuple[list[Contender], dict[str, str]]:
    """Return the peers that can do a case, and why the others cannot."""
    there, cannot = [], {}
    for name, peer in PEERS.items():
        try:
            way: Callable[[torch.Tensor], torch.Tensor] = peer.way(case, layout)
        except CannotError as error:
            cannot[name] = str(error)
        else:
            there.append(contender(name, PEER, way, x, gradient))
    return there, cannot


def versions() -> dict[str, str]:
    """Return which version of each package is installed."""
    found = {}
    for peer in PEERS.values():
        if peer.PACKAGE:
            try:
                found[peer.PACKAGE] = importlib.metadata.version(peer.PACKAGE)
            except importlib.metadata.PackageNotFoundError:
                found[peer.PACKAGE] = "not installed"
    return found
