"""A random order of very many things, without a list of them.

A Feistel network permutes the numbers of 2k bits: it cuts a number into halves and in each round adds a hash of one
half to the other, which can be undone whatever the hash. What falls outside of ``range(size)`` is permuted again until
it falls inside; that makes it a permutation of ``range(size)`` (Black and Rogaway, Ciphers with arbitrary finite
domains, 2002, "cycle walking"). The order is the same on every machine, and each place in it is found on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The elements of ``range(size)`` at ``places`` of the permutation that ``key`` names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        found[outside] = _network(found[outside], half, key)
        outside = found >= np.uint64(size)
    return found.astype(np.int64)


def _network(values: NDArray[np.uint64], half: int, key: int) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for number in range(1, _ROUNDS + 1):
        salt = np.uint64((key + number * _GOLDEN) % _WORD)
        left, right = right, left ^ (_hash(right ^ salt) & mask)
    joined: NDArray[np.uint64] = (left << shift) | right
    return joined


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, word by word; products wrap around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
