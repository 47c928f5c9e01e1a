"""How a peer says that a case is not for it."""

__all__ = ["CannotError"]


class CannotError(Exception):
    """A peer that cannot do a case, and why; raised on all ranks alike."""
