"""Which layers give on a partitioned graph what they give on the whole one, and how.

Most need nothing but halos where they propagate. What others look up by themselves, degrees of
sources or the largest of all weights, is given to them by functions of the same name.
"""

from varcomm.graph.running.layers.checks import check_deep, check_exact
from varcomm.graph.running.layers.exact import EXACT, EXACT_AGGREGATIONS, REFUSED
from varcomm.graph.running.layers.functions import FUNCTIONS, functions_at

__all__ = [
    "EXACT",
    "EXACT_AGGREGATIONS",
    "FUNCTIONS",
    "REFUSED",
    "check_deep",
    "check_exact",
    "functions_at",
]
