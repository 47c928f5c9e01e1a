"""Graph networks of PyG's message passing; none of them knows of ranks."""

from .mesh_graph_net import MeshGraphNet

__all__ = ["MeshGraphNet"]
