"""Sizes of models, which are checked, and of their shards: as given, or balanced."""

from collections.abc import Mapping, Sequence

from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes, checked_sizes, exact_int
from varcomm.transport.agreement import agree
from varcomm.transport.group import GroupLike, resolve


def check_sizes(model: str, least: int = 1, **sizes: object) -> None:
    """Raise an ArgumentError unless all sizes of a model are whole numbers from `least` on.

    Examples
    --------
    >>> check_sizes("GPT", vocab_size=11, hidden_size=0)
    Traceback (most recent call last):
    varcomm.errors.ArgumentError: GPT: hidden_size must be a whole number from 1 on, got 0.
    """
    for name, size in sizes.items():
        if (whole := exact_int(size)) is None or whole < least:
            raise ArgumentError(
                f"{model}: {name} must be a whole number from {least} on, got {size!r}."
            )


def agreed_sizes(
    what: str, wholes: Mapping[str, tuple[Sequence[int] | None, int]], group: GroupLike = None
) -> list[ShardSizes]:
    """Return sizes that sum up to what there is, balanced where none are given; collective.

    Parameters
    ----------
    what : str
        Who asks, for the message of an error.
    wholes : mapping of str to a pair
        By the name of an argument, what was given for it, one int a rank or None, and how much
        there is to be shared out.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share; None is the whole world.

    Returns
    -------
    list of ShardSizes
        In the order of `wholes`.

    Raises
    ------
    ArgumentError
        On every rank, if sizes do not sum up to what there is on one of them.

    Examples
    --------
    >>> import varcomm
    >>> def fn(rank):
    ...     return agreed_sizes("model", {"head_sizes": (None, 5), "mlp_sizes": ([0, 7], 7)})
    >>> varcomm.launch(fn, 2)[0]
    [ShardSizes(3, 2), ShardSizes(0, 7)]
    """
    ranks = resolve(group)

    def check() -> list[ShardSizes]:
        found = []
        for name, (given, total) in wholes.items():
            sizes = ShardSizes.balanced(total, ranks.size) if given is None else given
            sizes = ShardSizes(checked_sizes(sizes, name, ranks.size))
            if sizes.total != total:
                raise ArgumentError(
                    f"{name} {list(sizes)} sum to {sizes.total}, but there are {total}."
                )
            found.append(sizes)
        return found

    return agree(what, check, ranks)
