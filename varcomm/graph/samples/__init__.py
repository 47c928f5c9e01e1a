"""Rows of nodes in files: each rank reads and writes its own."""
