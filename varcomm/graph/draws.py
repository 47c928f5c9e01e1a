"""Random numbers of a counter: a key has the same number on every rank and in every run."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def hashed(*keys: Array | int) -> Array:
    """Return 64 random bits for integers, which are broadcast against each other.

    The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) after each integer.
    """
    bits = np.zeros(1, np.uint64)
    for key in keys:
        bits = bits + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return bits


def uniform(*keys: Array | int) -> Array:
    """Return a random float64 in [0, 1) for integers, as :func:`hashed`."""
    return (hashed(*keys) >> np.uint64(11)) * 2.0**-53


def distinct(keys: Array) -> Array:
    """Return keys of which repeated ones differ, so that an order by their hashes parts them."""
    order = np.argsort(keys, kind="stable")
    is_first = np.diff(keys[order], prepend=keys[order][:1]) != 0
    place = np.arange(len(keys))
    turn = np.empty_like(place)
    turn[order] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    bits = keys.astype(np.uint64)
    return np.where(turn > 0, hashed(bits, turn), bits)
