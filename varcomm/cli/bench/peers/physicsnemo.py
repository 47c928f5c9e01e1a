"""``nvidia-physicsnemo``: its V-operations.

They exchange by torch.distributed's all-to-all of lists, which Gloo does not have for uneven
tensors. There sends and receives take its place: the only change that is made to the library.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from varcomm.cli.bench.case import Case
from varcomm.cli.bench.layout import ROOT, Layout
from varcomm.cli.bench.peers.cannot import CannotError

__all__ = ["PACKAGE", "way"]

PACKAGE = "nvidia-physicsnemo"


def way(case: Case, layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how to do a case."""
    autograd, utils = _library()
    if case.engine == "gloo" and not isinstance(utils.dist, _WithAllToAll):
        utils.dist = _WithAllToAll()
    sizes, rank, name = layout.sizes, layout.rank, case.operation
    if name == "all_gather_v":
        if case.engine == "gloo" and len(set(sizes)) > 1:
            raise CannotError("its all_gather_v gives Gloo uneven shards, which refuses them")
        return lambda x: autograd.all_gather_v(x, sizes)
    if name == "reduce_scatter_v":
        if case.backward:
            raise CannotError("its sum of shards is a backward, and has none of its own")
        return lambda x: utils.all_gather_v_bwd_wrapper(x, sizes)
    if name == "gather_v":
        end = None if rank == ROOT else 0  # elsewhere its memory is not initialised
        return lambda x: autograd.gather_v(x, sizes, 0, ROOT)[:end]
    if name == "scatter_v":
        # its backward gives all ranks a gradient of the whole: there must be a tensor of that shape
        rows = layout.total if case.backward and rank != ROOT else 0
        return lambda x: autograd.scatter_v(pad(x, (0, 0, 0, rows)) if rows else x, sizes, 0, ROOT)
    if name == "indexed_all_to_all_v":
        indices = layout.indices(rank)
        return lambda x: autograd.indexed_all_to_all_v(x, indices, layout.matrix)
    raise CannotError(f"has no {name}")


class _WithAllToAll:
    """torch.distributed, but for its all-to-all of lists."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all(
        self,
        places: Sequence[torch.Tensor],
        pieces: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Send and receive what is not empty."""
        rank = dist.get_rank(group)
        works = [
            dist.irecv(place, group=group, group_src=peer)
            for peer, place in enumerate(places)
            if peer != rank and place.numel()
        ]
        works += [
            dist.isend(piece, group=group, group_dst=peer)
            for peer, piece in enumerate(pieces)
            if peer != rank and piece.numel()
        ]
        places[rank].copy_(pieces[rank])
        for work in works:
            assert work is not None
            work.wait()


@cache
def _library() -> tuple[Any, Any]:
    """Import its modules; without what its packages import beside, where that is not installed."""
    found = importlib.util.find_spec("physicsnemo")
    if found is None or not found.submodule_search_locations:
        raise CannotError(f"{PACKAGE} is not installed")
    try:
        return _modules()
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "physicsnemo"]:
            del sys.modules[name]
    # Packages whose __init__ does not run, and a class that only other parts of it use.
    folder = found.submodule_search_locations[0]
    for name in ("physicsnemo", "physicsnemo.core", "physicsnemo.distributed"):
        package = ModuleType(name)
        package.__path__ = ["/".join([folder, *name.split(".")[1:]])]
        sys.modules[name] = package
    if importlib.util.find_spec("treelib") is None:
        trees = ModuleType("treelib")
        trees.Tree = object  # type: ignore[attr-defined]
        sys.modules["treelib"] = trees
    try:
        return _modules()
    except ImportError as error:
        raise CannotError(f"cannot be imported: {error}") from None


def _modules() -> tuple[Any, Any]:
    prefix = "physicsnemo.distributed"
    return importlib.import_module(f"{prefix}.autograd"), importlib.import_module(f"{prefix}.utils")
