"""Mesh files: their cells, and results on a mesh."""
