"""Models of PyTorch Geometric on a part of a graph: what their layers are given in place of it."""
