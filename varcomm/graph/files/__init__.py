"""Saved partitions, mesh files and pictures."""
