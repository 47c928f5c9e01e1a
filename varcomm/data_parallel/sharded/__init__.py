"""Gradients and optimizer states of which each rank owns an uneven piece."""
