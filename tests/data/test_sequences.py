"""Sequences come once an epoch, in an order that depends on the seed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.data.corpus import open_corpus
from autopar.data.order import permuted
from autopar.data.sequences import Sequences
from autopar.ir.errors import InvalidInput


@given(size=st.integers(1, 600), key=st.integers(0, 2**64 - 1))
def test_an_order_has_everything_once(size: int, key: int) -> None:
    found = permuted(np.arange(size), size, key)
    assert sorted(found.tolist()) == list(range(size))
    one_by_one = [int(permuted(np.array([place]), size, key)[0]) for place in range(0, size, 7)]
    assert one_by_one == found[::7].tolist()


def test_an_order_looks_random() -> None:
    """Neighbours are far apart as often as chance has it, and of two keys few things stay in their place."""
    size = 10_000
    first, second = (permuted(np.arange(size), size, key) for key in (1, 2))
    assert 0.3 < np.abs(np.diff(first)).mean() / size < 0.37
    assert (first == second).sum() < 10


def test_an_order_of_a_trillion_takes_no_memory() -> None:
    assert len(set(permuted(np.arange(1000), 10**12, 3).tolist())) == 1000


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    np.save(tmp_path / "tokens.npy", np.arange(43))
    return str(tmp_path / "tokens.npy")


def test_an_epoch_has_every_sequence_once(corpus: str) -> None:
    sequences = Sequences(open_corpus(corpus), 4, seed=0)
    assert len(sequences) == 10
    epochs = [sequences.windows(first, 10) for first in (0, 10)]
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 40, 4))
        torch.testing.assert_close(epoch, epoch[:, :1] + torch.arange(5))
    assert not torch.equal(*epochs)


def test_rows_are_the_same_however_they_are_read(corpus: str) -> None:
    whole = Sequences(open_corpus(corpus), 4, seed=5).windows(7, 26)
    parts = [Sequences(open_corpus(corpus), 4, seed=5).windows(7 + 13 * rank, 13) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(Sequences(open_corpus(corpus), 4, seed=6).windows(7, 26), whole)


def test_too_little_data_is_refused(corpus: str) -> None:
    with pytest.raises(InvalidInput, match=r"43 tokens in 1 file; one sequence and the token after it take 44"):
        Sequences(open_corpus(corpus), 43, seed=0)
