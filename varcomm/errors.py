"""Errors of varcomm, and the checks of integers that raise them.

Each error is also a subclass of the fitting builtin, so ``except ValueError`` works.
"""

import operator

import torch


class VarcommError(Exception):
    """Base of all errors of varcomm.

    Attributes
    ----------
    on_all_ranks : bool
        Whether every rank of the group raises the error.
    """

    on_all_ranks = False


class ArgumentError(VarcommError, ValueError):
    """A wrong argument on this rank, raised before any communication."""


class GroupError(VarcommError, RuntimeError):
    """A group that is not initialised, does not contain this rank, or is for another device."""


class DisagreementError(VarcommError, RuntimeError):
    """Calls that do not match between ranks; raised on every rank."""

    on_all_ranks = True


class CommunicationError(VarcommError, RuntimeError):
    """A call that this rank could not complete, because another rank is late or has exited."""


class LaunchError(VarcommError, RuntimeError):
    """A failure to start or join ranks, or a failure of a launched rank.

    The message ends with the error of the rank that failed first.
    """


class MissingPackageError(VarcommError, RuntimeError):
    """A missing optional package; the message contains the ``pip install`` command."""


class MissingModuleError(MissingPackageError, ImportError):
    """A missing optional package, raised by the import of a module that needs it."""


def exact_int(value: object) -> int | None:
    """Return `value` as an int if it is an integer of any library, and not a bool; else None.

    >>> exact_int(3), exact_int(3.0), exact_int(True), exact_int("3")
    (3, None, None, None)
    """
    if isinstance(value, int | torch.SymInt):  # symbols stay symbols
        return None if isinstance(value, bool) else value  # type: ignore[return-value]
    if getattr(value, "dtype", None) == torch.bool:  # torch would make an index of it
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None


def checked_rank(rank: int, ranks: int, name: str, where: str = "") -> int:
    """Return `rank` if it is one of the group, or raise ArgumentError."""
    value = exact_int(rank)
    if value is None or not 0 <= value < ranks:
        raise ArgumentError(
            f"{where}{name} must be a rank of the group, 0...{ranks - 1}; got {rank!r}."
        )
    return value


def at_least(least: int, value: object, name: str) -> int:
    """Return `value` as an int if it is an integer from `least` on, or raise ArgumentError."""
    exact = exact_int(value)
    if exact is None or exact < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}; got {value!r}.")
    return exact
