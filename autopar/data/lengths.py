"""How long the documents of a corpus are.

A file of text is a document, and so is an array of tokens, unless a token is named that ends each document:

    17 4 0 9 0 8 2      ended by 0      lengths 3, 2 and 2: the ending token belongs to its document
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.data.corpus import Corpus
from autopar.ir.errors import InvalidInput

# Tokens that are read at once.
_CHUNK = 1 << 22


def document_lengths(corpus: Corpus, end: int | None = None) -> list[int]:
    """Tokens of each document, in order. end: the token that ends one; None if a file is one.

    Documents end with their file. Raises InvalidInput if no file has that token.
    """
    if end is None:
        return [piece.num_tokens for piece in corpus.pieces]
    found: list[int] = []
    start, ended = 0, False
    for piece in corpus.pieces:
        ends = [_ends(corpus.read(at, min(_CHUNK, start + piece.num_tokens - at)), end) + at for at in
                range(start, start + piece.num_tokens, _CHUNK)]  # fmt: skip
        last = start + piece.num_tokens
        places = np.concatenate([[start], *ends, [last]])
        ended = ended or len(places) > 2
        found += [int(length) for length in np.diff(places) if length]
        start = last
    if not ended:
        raise InvalidInput(
            f"--end-of-document {end}: {corpus} has no such token.\n  try: the number of the token that your tokeniser "
            "puts at the end of a document, or none if each file is one"
        )
    return found


def _ends(tokens: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Places behind each ``end``."""
    return np.flatnonzero(tokens == end) + 1
