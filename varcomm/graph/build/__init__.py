"""From a graph, or from pieces of one, to the part that each rank owns."""
