"""Former place of names of ``operator`` and ``compilation``; goes when no layer imports it."""

from varcomm.ops.compilation import UNCOMPILED, kept_from_compilation, uncompiled
from varcomm.ops.operator import apply, apply_with_token, begin, in_forward_mode, is_recorded

__all__ = [
    "UNCOMPILED",
    "apply",
    "apply_with_token",
    "begin",
    "in_forward_mode",
    "is_recorded",
    "kept_from_compilation",
    "uncompiled",
]
