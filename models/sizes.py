"""Checks of model sizes and of shard sizes."""

from collections.abc import Mapping, Sequence

from varcomm.errors import ArgumentError
from varcomm.sizes import ShardSizes, checked_sizes, exact_int
from varcomm.transport.agreement import agree
from varcomm.transport.group import GroupLike, resolve


def check_sizes(model: str, least: int = 1, **sizes: object) -> None:
    """Raise an ArgumentError unless all sizes of a model are integers of at least `least`.

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


def check_heads(model: str, hidden_channels: int, num_heads: int, name: str = "num_heads") -> None:
    """Raise an ArgumentError unless features are a multiple of heads."""
    if hidden_channels % num_heads:
        raise ArgumentError(
            f"{model}: hidden_channels {hidden_channels} must be a multiple of {name} {num_heads}."
        )


def agreed_sizes(
    what: str, wholes: Mapping[str, tuple[Sequence[int] | None, int]], group: GroupLike = None
) -> list[ShardSizes]:
    """Return checked sizes of shards, balanced if not given; collective.

    Parameters
    ----------
    what : str
        Name of the caller in error messages.
    wholes : mapping of str to a pair
        For each argument name, its value (one int per rank, or None) and the total.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    list of ShardSizes
        In the order of `wholes`.

    Raises
    ------
    ArgumentError
        On every rank, if the sizes of one rank do not sum to the total.

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
