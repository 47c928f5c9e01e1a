"""Checkpoints that any number of ranks can load, and that survive a crash."""

from varcomm.checkpoint.full import full_state_dict
from varcomm.checkpoint.load import export, load, read
from varcomm.checkpoint.parts import PerRank, RowsById
from varcomm.checkpoint.save import PendingSave, save
from varcomm.checkpoint.weights import load_safetensors

__all__ = [
    "PendingSave",
    "PerRank",
    "RowsById",
    "export",
    "full_state_dict",
    "load",
    "load_safetensors",
    "read",
    "save",
]
