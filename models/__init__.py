"""Graph networks of PyG's message passing; none of them knows of ranks."""

from varcomm.errors import MissingModuleError

try:
    import torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingModuleError(
        'varcomm.models needs PyTorch Geometric: pip install "varcomm[graph]"'
    ) from error

from .mesh_graph_net import MeshGraphNet

__all__ = ["MeshGraphNet"]
