"""Former place of names of ``compilation``; goes when no layer imports it."""

from varcomm.ops.compilation import counts_in, extent_of

__all__ = ["counts_in", "extent_of"]
