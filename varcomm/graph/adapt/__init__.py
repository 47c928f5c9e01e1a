"""Adaptation of PyTorch Geometric models to partitioned graphs."""
