"""Complete models, one readable file each; only their layers use ranks.

A model is imported at its first use, because graph networks need PyTorch Geometric and others do
not. Shared by several models: ``generation`` samples texts, ``sizes`` checks sizes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from varcomm.errors import MissingModuleError

if TYPE_CHECKING:
    from .fno import FNO
    from .gpt import GPT
    from .graph_transformer import GraphTransformer
    from .mesh_graph_net import MeshGraphNet
    from .multi_mesh import EncodeProcessDecode
    from .painn import PaiNN
    from .transolver import PointCrossAttention, Transolver
    from .unet import UNet

__all__ = [
    "FNO",
    "GPT",
    "EncodeProcessDecode",
    "GraphTransformer",
    "MeshGraphNet",
    "PaiNN",
    "PointCrossAttention",
    "Transolver",
    "UNet",
]

_FILES = {
    "EncodeProcessDecode": "multi_mesh",
    "FNO": "fno",
    "GPT": "gpt",
    "GraphTransformer": "graph_transformer",
    "MeshGraphNet": "mesh_graph_net",
    "PaiNN": "painn",
    "PointCrossAttention": "transolver",
    "Transolver": "transolver",
    "UNet": "unet",
}
_GRAPH_NETWORKS = frozenset(_FILES) - {"FNO", "GPT", "PointCrossAttention", "Transolver", "UNet"}


def __getattr__(name: str) -> type:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _GRAPH_NETWORKS and find_spec("torch_geometric") is None:
        raise MissingModuleError(
            f"varcomm.models.{name} needs PyTorch Geometric: pip install torch_geometric"
        )
    found: type = getattr(import_module(f".{_FILES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    # only importable models, so that `help` works without PyTorch Geometric
    without = frozenset() if find_spec("torch_geometric") else _GRAPH_NETWORKS
    return sorted({*globals(), *_FILES} - without)
