"""Histograms of lengths: what is counted, drawn from them, read and refused."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import InvalidInput
from autopar.ir.lengths import LengthHistogram

LENGTHS = st.lists(st.integers(1, 100_000), min_size=1, max_size=200)


@given(LENGTHS)
def test_every_document_is_counted_in_its_bin(lengths: list[int]) -> None:
    found = LengthHistogram.of(lengths)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)
    assert found.num_documents == len(lengths)


@given(LENGTHS, st.integers(0, 3))
def test_what_is_drawn_is_distributed_as_the_documents_are(lengths: list[int], seed: int) -> None:
    found = LengthHistogram.of(lengths)
    drawn = found.drawn(len(lengths), seed)
    assert drawn == found.drawn(len(lengths), seed)
    for own, other in zip(sorted(drawn), sorted(lengths), strict=True):
        assert abs(own - other) <= max(1, 0.1 * other)
    assert min(lengths) <= min(drawn)
    assert max(drawn) <= 1.1 * max(lengths) + 1


def test_empty_bins_give_no_documents() -> None:
    found = LengthHistogram(edges=(1, 2, 100, 101), counts=(0, 5, 0))
    assert all(2 <= length < 100 for length in found.drawn(50, 0))
    assert found.quantile(1.0) == 99
    assert fmean(found.drawn(1000, 1)) == pytest.approx(50.5, abs=1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = LengthHistogram.of([3, 5, 5, 900])
    found.save(tmp_path / "lengths.json")
    assert LengthHistogram.load(tmp_path / "lengths.json") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "the file: Input should be"),
        ('{"edges": [1, 2]}', "counts: Field required"),
        ('{"edges": [1, 2, 3], "counts": [1, -1]}', "counts.1: Input should be greater"),
        ('{"edges": [0, 2], "counts": [1]}', "edges.0: Input should be greater"),
        ('{"edges": [1, 2], "counts": [1, 2]}', "edges: 2 of them around 2 counts"),
        ('{"edges": [1, 5, 3], "counts": [1, 2]}', "edges.2: 3 after 5"),
        ('{"edges": [1, 5], "counts": [0]}', "counts: there are no documents"),
        ('{"edges": [1, 5], "counts": [1], "mean": 3}', "mean: Extra inputs"),
        ('{"format": 2, "edges": [1, 5], "counts": [1]}', "format: Input should be 1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="no histogram of lengths") as error:
        LengthHistogram.load(path)
    assert said in str(error.value)
    with pytest.raises(InvalidInput, match="cannot read lengths"):
        LengthHistogram.load(tmp_path / "nowhere.json")
