"""PyG's layers: which of them are exact on a sharded graph, and functions that are replaced."""

from varcomm.graph.adapt.layers.checks import check_deep, check_exact
from varcomm.graph.adapt.layers.exact import EXACT, EXACT_AGGREGATIONS, REFUSED
from varcomm.graph.adapt.layers.functions import FUNCTIONS, functions_in

__all__ = [
    "EXACT",
    "EXACT_AGGREGATIONS",
    "FUNCTIONS",
    "REFUSED",
    "check_deep",
    "check_exact",
    "functions_in",
]
