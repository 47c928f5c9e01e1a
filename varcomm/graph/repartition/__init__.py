"""Graphs that change: rows between two partitions, new owners, even costs, new meshes."""
