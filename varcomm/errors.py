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
    """Base of all errors that varcomm raises by itself.

    Examples
    --------
    One clause for all that varcomm has to say.

    >>> import torch, varcomm
    >>> try:
    ...     varcomm.ShardSizes([3, -1])
    ... except varcomm.VarcommError as error:
    ...     print(f"{type(error).__name__}: {error}")
    ArgumentError: sizes must not be negative; got [3, -1].
    """


class ArgumentError(VarcommError, ValueError):
    """An argument that this rank can tell to be wrong, raised before any communication.

    Examples
    --------
    What one rank can tell by itself it says before anything is sent; here it is rank 0 of two.

    >>> import torch, varcomm
    >>> with varcomm.simulate.world(2, rank=0):
    ...     try:
    ...         varcomm.all_gather_v(torch.zeros(3, 4), [2, 2])
    ...     except ValueError as error:
    ...         print(str(error).partition(", but ")[0])
    all_gather_v on rank 0 of 2: the tensor of shape (3, 4) has 3 rows along dim 0
    """


class GroupError(VarcommError, RuntimeError):
    """A group that cannot serve: not initialised, without this rank, or for another device.

    Examples
    --------
    >>> import torch, varcomm
    >>> try:
    ...     varcomm.all_reduce(torch.ones(2))
    ... except varcomm.GroupError as error:
    ...     print(str(error).partition(" Call ")[0])
    torch.distributed is not initialised.
    """


class DisagreementError(VarcommError, RuntimeError):
    """Ranks that call the same operation with arguments that do not fit; raised on every rank.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     try:
    ...         varcomm.ExchangePlan.from_needed(torch.tensor([0]), [1, 1 + rank])
    ...     except varcomm.DisagreementError as error:
    ...         return str(error)
    >>> print(varcomm.launch(fn, 2)[1])
    ExchangePlan.from_needed: ranks [1] have other sizes than rank 0.
    """


class CommunicationError(VarcommError, RuntimeError):
    """A call that this rank could not complete: others did not come in time, or are gone."""


class LaunchError(VarcommError, RuntimeError):
    """Ranks that could not be started or joined, or one of which failed.

    Examples
    --------
    It ends with what the first rank that failed has raised.

    >>> import varcomm
    >>> try:
    ...     varcomm.launch(lambda rank: 1 / rank, 2)
    ... except varcomm.LaunchError as error:
    ...     print(str(error).splitlines()[-1])
    ZeroDivisionError: division by zero
    """


class MissingPackageError(VarcommError, RuntimeError):
    """An optional package that a function needs; the message holds the ``pip install``."""


class MissingModuleError(MissingPackageError, ImportError):
    """The same, raised by the import of a module of varcomm that needs the package throughout."""
