"""Former place of a name of ``compilation``; goes when no layer imports it."""

from varcomm.ops.compilation import ByNumber

__all__ = ["ByNumber"]
