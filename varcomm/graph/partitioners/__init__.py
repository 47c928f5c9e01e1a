"""Partitioners: the owner of each node."""
