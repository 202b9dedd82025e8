"""Corpora of text and of arrays: what is read, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from autopar.data.corpus import open_corpus
from autopar.ir.errors import InvalidInput


def test_a_folder_of_text_is_its_bytes_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes("é2".encode())
    (tmp_path / "a.py").write_bytes(b"one")
    (tmp_path / "picture").write_bytes(b"\x00\x01")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "empty.txt").write_bytes(b"")
    corpus = open_corpus(str(tmp_path))
    assert bytes(corpus.read(0, len(corpus)).tolist()) == b"one" + "é2".encode()
    assert corpus.read(2, 2).tolist() == [ord("e"), 0xC3]
    assert str(corpus) == f"{tmp_path}: 6 tokens in 2 files"


def test_the_standard_library_is_a_corpus() -> None:
    corpus = open_corpus("stdlib")
    assert len(corpus) > 5_000_000
    assert corpus.read(0, 1000).max() < 256


@pytest.mark.parametrize("dtype", ["<u2", ">u4", "<i8"])
def test_arrays_are_joined(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(6, dtype=dtype).reshape(2, 3))
    np.save(tmp_path / "b.npy", np.arange(6, 10, dtype=dtype))
    for where in (tmp_path, tmp_path / "*.npy"):
        corpus = open_corpus(str(where))
        assert corpus.read(0, 10).tolist() == list(range(10))
        assert corpus.read(4, 3).tolist() == [4, 5, 6]


def test_raw_integers_are_of_the_dtype_that_is_named(tmp_path: Path) -> None:
    tokens = np.array([1, 70_000, 3], dtype=np.uint32)
    tokens.tofile(tmp_path / "tokens.bin")
    assert open_corpus(str(tmp_path / "tokens.bin"), "uint32").read(0, 3).tolist() == [1, 70_000, 3]
    assert len(open_corpus(str(tmp_path / "tokens.bin"))) == 6


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "pickled.npy").open("wb") as file:
        pickle.dump([1, 2], file)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "floats.npy", np.zeros(4))
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.zeros((2, 3), dtype=np.int64)))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "binary").write_bytes(b"\x00")
    for name, words in {
        "pickled.npy": "not a plain array",
        "objects.npy": "not a plain array",
        "floats.npy": r"float64\[4\], expected an array of integers",
        "columns.npy": "row after row",
        "odd.bin": "no whole number of uint16",
        "binary": "neither text nor",
        "nothing": "no such file",
    }.items():
        with pytest.raises(InvalidInput, match=words):
            open_corpus(str(tmp_path / name))
    with pytest.raises(InvalidInput, match="beside other files"):
        open_corpus(str(tmp_path))
    with pytest.raises(InvalidInput, match="--token-dtype float32"):
        open_corpus("stdlib", "float32")


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("long enough")
    corpus = open_corpus(str(path))
    path.unlink()
    with pytest.raises(InvalidInput, match="11 tokens when training began"):
        corpus.read(0, 4)


def test_the_digest_knows_names_and_lengths_but_not_the_folder(tmp_path: Path) -> None:
    for folder, text in (("a", "text"), ("b", "text"), ("c", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
    a, b, c = (open_corpus(str(tmp_path / folder)).digest for folder in "abc")
    assert a == b != c
