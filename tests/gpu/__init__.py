"""Tests for GPUs, and the cases that ``python3 -m tests.gpu`` runs on one."""

import importlib.util
from pathlib import Path

import varcomm

# In a checkout without installation varcomm.models is the folder models/.
if importlib.util.find_spec("varcomm.models") is None:
    varcomm.__path__.append(str(Path(__file__).parents[2]))
