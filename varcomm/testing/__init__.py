"""Prove that code which communicates is right: adjoints, derivatives, on real processes.

Each check is collective. Its verdict is formed over all ranks before any of them raises, so a
failure is the same AssertionError everywhere and nobody waits for a rank that has left.
"""

from varcomm.testing.adjoint import dot_test
from varcomm.testing.derivatives import gradcheck, gradgradcheck
from varcomm.transport.launch import Ranks, launch

__all__ = ["Ranks", "dot_test", "gradcheck", "gradgradcheck", "launch"]
