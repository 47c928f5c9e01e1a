"""What varcomm raises.

Each error is also the builtin that a caller would expect, so ``except ValueError`` keeps working.
"""

__all__ = [
    "ArgumentError",
    "CommunicationError",
    "DisagreementError",
    "GroupError",
    "LaunchError",
    "MissingModuleError",
    "MissingPackageError",
    "VarcommError",
]


class VarcommError(Exception):
    """Base of all errors that varcomm raises by itself."""


class ArgumentError(VarcommError, ValueError):
    """An argument that this rank can tell to be wrong, raised before any communication."""


class GroupError(VarcommError, RuntimeError):
    """A group that cannot serve: not initialised, without this rank, or for another device."""


class DisagreementError(VarcommError, RuntimeError):
    """Ranks that call the same operation with arguments that do not fit; raised on every rank."""


class CommunicationError(VarcommError, RuntimeError):
    """A call that this rank could not complete: others did not come in time, or are gone."""


class LaunchError(VarcommError, RuntimeError):
    """Ranks that could not be started or joined, or one of which failed."""


class MissingPackageError(VarcommError, RuntimeError):
    """An optional package that a function needs; the message holds the ``pip install``."""


class MissingModuleError(MissingPackageError, ImportError):
    """The same, raised by the import of a module of varcomm that needs the package throughout."""
