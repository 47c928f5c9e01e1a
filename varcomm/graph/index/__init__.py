"""Index vectors of a partitioned graph, and the edges and graphs to which they refer."""
