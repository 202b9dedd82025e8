"""Token files that are damaged: headers of arrays, raw integers, text."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from autopar.data.corpus import TOKEN_DTYPES, open_corpus
from autopar.data.lengths import document_lengths
from autopar.data.sequences import Sequences
from tests.fuzz.harness import Read, failures, none_of
from tests.fuzz.mutation import changed_bytes

_SHAPES = ((60,), (6, 10), (0,), (), (2, 3, 10))
_DESCRIPTIONS = (
    "<i4",
    "<u2",
    "|i1",
    "<f4",
    "|O",
    "<i0",
    "<i3",
    "<i99999999",
    "<M8[s]",
    "(2,)<i4",
    "<U9",
    "",
    "x" * 500,
    "'",
)
_NUMBERS = (
    "60",
    "-1",
    "0",
    "9" * 30,
    "2**70",
    "1e3",
    "60,1",
    "None",
    "9" * 5000,
    "4611686018427387904",
    "()",
    "(" * 300,
)


def array(chance: random.Random) -> bytes:
    """An array file, with a header that is built by hand or changed."""
    if chance.random() < 0.5:
        written = BytesIO()
        values = np.arange(60, dtype=chance.choice(("<u2", ">i4", "<i8", "u1")))
        np.lib.format.write_array(written, values.reshape(chance.choice(((60,), (6, 10)))))
        return changed_bytes(written.getvalue(), chance, first=chance.choice((10, 128, None)))
    order, comma = chance.choice(("False", "True", "0", "None")), chance.choice((",", ""))
    description = chance.choice(_DESCRIPTIONS)
    header = f"{{'descr': '{description}', 'fortran_order': {order}, 'shape': ({chance.choice(_NUMBERS)}{comma}), }}"
    if chance.random() < 0.2:
        header = chance.choice(
            ("[" * 200, "'a'" * 3000, "__import__('os')", "{" * 90, "lambda: 0", header[:-3], header + "\0")
        )
    major = chance.choice((1, 1, 1, 2, 3, 0, 255))
    length = len(header).to_bytes(2 if major == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((major, 0)) + length + header.encode() + bytes(240)


def read(chance: random.Random, folder: Path) -> None:
    kind = chance.randrange(4)
    path = folder / ("tokens.npy", "tokens.npy", "tokens.bin", "tokens.txt")[kind]
    content = array(chance) if kind < 2 else changed_bytes(bytes(range(256)) * 2, chance)
    path.write_bytes(content)
    corpus = open_corpus(str(path), chance.choice((*TOKEN_DTYPES, "float32", "")) if kind == 2 else "uint16")
    corpus.read(0, min(len(corpus), 100))
    corpus.read(len(corpus) - 1, 1)
    document_lengths(corpus, chance.choice((None, 0, 3, -1, 10**20)))
    Sequences(corpus, chance.choice((1, 8)), 0).windows(chance.randrange(100), 3)


KINDS = [("tokens", read, 3000)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    none_of(failures(kind, read, count, tmp_path))
