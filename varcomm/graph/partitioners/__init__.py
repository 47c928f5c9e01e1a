"""Which rank owns which node: by one process that has the graph, or by ranks that have pieces."""
