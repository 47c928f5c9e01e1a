"""Former place of names of ``operator``; goes when no layer imports it."""

from varcomm.ops.operator import fake_mode, in_graph, is_traced, refuse_linearize, torch_operator

__all__ = ["fake_mode", "in_graph", "is_traced", "refuse_linearize", "torch_operator"]
