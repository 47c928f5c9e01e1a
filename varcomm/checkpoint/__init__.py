"""Checkpoints that any number of ranks can load, and that a crash leaves whole."""

from varcomm.checkpoint.background import PendingSave
from varcomm.checkpoint.kinds import PerRank, Rows
from varcomm.checkpoint.loading import load, read
from varcomm.checkpoint.saving import save

__all__ = ["PendingSave", "PerRank", "Rows", "load", "read", "save"]
