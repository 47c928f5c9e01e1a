"""Index vectors of a partitioned graph, and the edges and graphs to which they refer."""

from varcomm.graph.index import rules as rules  # which registers them
