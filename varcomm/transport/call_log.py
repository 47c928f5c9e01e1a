"""The calls of a group, as ranks compare them at their next sum: a digest, and the last names.

A rank that makes other calls than its peers can receive rows of the right size and the wrong
meaning. A rank whose call needs no gradient sends nothing in backward, where its peers wait. So
each call changes a digest of 64 bits, and sums over ranks carry a few bits of it
(:mod:`varcomm.ops.carried`). The digest is set back only after an error: if it differs once, each
later sum finds it with other bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

Entry = tuple[str, int]  # name of a call, and word_of(name)
RECORDED = ", requires_grad True"  # ends the name of a call whose backward will send messages

_SHOWN = 64  # last calls whose names are kept
_FACTOR = 0x9E3779B97F4A7C15  # odd: another digest stays another
_MASK = (1 << 64) - 1
_INVERSE = pow(_FACTOR, -1, 1 << 64)


@dataclass
class Layer:
    """A layer, as ranks compare it."""

    name: str
    is_compiled: bool = False  # a rank may fall back to eager code
    word: int = field(init=False)

    def __post_init__(self) -> None:
        self.word = word_of(self.name)


class CallLog:
    """The calls of one rank in a group since it was made."""

    __slots__ = (
        "active", "compares_layers", "count", "digest", "errors", "last", "layers", "pending",
        "sampled",
    )  # fmt: skip

    def __init__(self) -> None:
        self.active = True  # whether sums compare it
        self.errors = 0  # how often ranks have found that they differ
        self.digest = 0
        self.compares_layers = True  # until a rank has found that others compile theirs
        self.layers = 0  # the digest of layers
        self.count = 0  # calls
        self.last: deque[str | tuple[str]] = deque(maxlen=_SHOWN)  # a layer is in a tuple
        self.sampled = 0  # sums of gradients, of which some carry entries of parameters
        # comparisons of sums on a GPU that are not made yet
        self.pending: deque[Callable[[], None]] = deque()

    def add(self, entry: Entry) -> None:
        """Add a call."""
        name, word = entry
        self.digest = (self.digest ^ word) * _FACTOR & _MASK
        self.count += 1
        self.last.append(name)

    def remove(self, entry: Entry) -> None:
        """Remove the last call, which has sent nothing."""
        _, word = entry
        self.digest = self.digest * _INVERSE & _MASK ^ word
        self.count -= 1
        self.last.pop()

    def add_layer(self, layer: Layer) -> None:
        """Add a layer that has run, whose calls are here already; compiled code adds none."""
        if self.compares_layers and not layer.is_compiled:
            self.layers = (self.layers ^ layer.word) * _FACTOR & _MASK
            self.last.append((layer.name,))

    def whole(self) -> int:
        """Return the digest of calls and layers."""
        return (self.digest + self.layers) & _MASK

    def bits(self, number: int) -> int:
        """Return that many bits of the digest; the upper ones, which depend on all calls."""
        return self.whole() >> (64 - number)

    def numbered(self) -> dict[tuple[int, int], str]:
        """Return the last names by the number of the call, and that of a layer after this call."""
        number = lost = self.count - sum(isinstance(name, str) for name in self.last)
        after, names = 0, {(lost, 0): ""}
        for name in self.last:
            number, after = (number + 1, 0) if isinstance(name, str) else (number, after + 1)
            names[number, after] = name if isinstance(name, str) else name[0]
        return {at: name for at, name in names.items() if not lost or at[0] > lost}

    def clear(self) -> None:
        """Begin anew, after ranks have found that they differ."""
        self.errors += 1
        self.digest = self.layers = self.count = self.sampled = 0
        self.last.clear()
        self.pending.clear()


def word_of(name: str) -> int:
    """Return the number by which a call enters the digest: the same in all processes."""
    return crc32(name.encode())
