"""Gradients of parameters that every rank has a copy of."""

from varcomm.data_parallel.replicate import replicate
from varcomm.data_parallel.sum_gradients import sum_gradients
from varcomm.data_parallel.sum_hook import sum_hook

__all__ = ["replicate", "sum_gradients", "sum_hook"]
