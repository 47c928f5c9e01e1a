"""Checks of adjoints, derivatives and models that communicate, on real processes.

Each check is collective. Its verdict is formed over all ranks before any rank raises, so a failure
is the same AssertionError on all ranks.
"""

from varcomm.testing.comparison import same_as_one_process
from varcomm.testing.derivatives import dot_test, gradcheck, gradgradcheck
from varcomm.transport.launch import Ranks, launch

__all__ = [
    "Ranks",
    "dot_test",
    "gradcheck",
    "gradgradcheck",
    "launch",
    "same_as_one_process",
]
