"""Layers and models of PyTorch Geometric on partitioned graphs."""
