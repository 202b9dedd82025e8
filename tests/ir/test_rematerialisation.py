"""What blocks may keep, as a person writes it."""

from __future__ import annotations

import pytest

from autopar.ir.errors import InvalidInput
from autopar.ir.rematerialisation import parse_bytes, parse_remat


@pytest.mark.parametrize(
    ("text", "found"), [("selective", "selective"), ("full", "full"), ("40%", 0.4), ("12.5 %", 0.125), ("100%", 1.0)]
)
def test_levels_and_shares(text: str, found: str | float) -> None:
    assert parse_remat(text) == found


@pytest.mark.parametrize("text", ["most", "listed", "0.4", "101%", "-1%", "%", "1e9%", "", "٤%"])
def test_neither_level_nor_share(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected none, selective, alternate, full, or a share"):
        parse_remat(text)


@pytest.mark.parametrize(
    ("text", "found"), [("20GiB", 20 * 2**30), ("1.5 kB", 1500), ("7B", 7), ("3mib", 3 * 2**20), ("2TB", 2e12)]
)
def test_sizes(text: str, found: float) -> None:
    assert parse_bytes(text) == found


@pytest.mark.parametrize("text", ["20", "GiB", "-1GiB", "1e3GB", "20 Gi", "99999999999B"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a number of bytes, as in 20GiB"):
        parse_bytes(text)
