"""Index vectors of a partitioned graph, and the edges and graphs to which they refer."""

from varcomm.graph.index import torch_functions as torch_functions  # which registers its rules
