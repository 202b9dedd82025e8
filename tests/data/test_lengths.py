"""Where documents of a corpus begin and end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopar.data import lengths
from autopar.data.corpus import open_corpus
from autopar.data.lengths import document_lengths
from autopar.ir.errors import InvalidInput


def test_a_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes("é".encode())
    assert document_lengths(open_corpus(str(tmp_path))) == [3, 2]


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_a_token_ends_a_document_and_so_does_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(lengths, "_CHUNK", chunk)
    np.save(tmp_path / "a.npy", np.array([17, 4, 0, 9, 0, 8, 2], np.uint16))
    np.save(tmp_path / "b.npy", np.array([0, 5, 0], np.uint16))
    np.save(tmp_path / "c.npy", np.array([6, 6], np.uint16))
    corpus = open_corpus(str(tmp_path))
    assert document_lengths(corpus, 0) == [3, 2, 2, 1, 2, 2]
    assert document_lengths(corpus) == [7, 3, 2]


def test_a_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3], np.uint16))
    with pytest.raises(InvalidInput, match=r"--end-of-document 7: .*has no such token"):
        document_lengths(open_corpus(str(tmp_path)), 7)
