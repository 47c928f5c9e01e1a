"""Gradients of parameters that every rank has a copy of."""

from varcomm.data_parallel.sum_gradients import sum_gradients

__all__ = ["sum_gradients"]
