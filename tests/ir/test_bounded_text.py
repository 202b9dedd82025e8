"""Texts of users: what is read of them, and that those beyond a limit are refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.bounded_text import MAX_BYTES, MAX_DEPTH, parse_json, parse_yaml, read_text
from autopar.ir.errors import InvalidInput


def test_values_of_yaml_are_those_of_json_and_aliases_are_written_out() -> None:
    assert parse_yaml("a: &x [1, 2.5, yes, null, text]\nb: *x", "it", InvalidInput) == {
        name: [1, 2.5, True, None, "text"] for name in "ab"
    }
    assert parse_json('{"a": [1, NaN]}', "it", InvalidInput)["a"][0] == 1


_BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_BOMB, "more than 131,072 values, aliases written out"),
        ("&a [*a]", "more than 131,072 values"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        ("[" * 1_000_000, "nest"),
        ("a: !!int 3", "line 1 has the tag tag:yaml.org,2002:int; expected none"),
        ("9" * 500, "an integer of 1,661 bits; expected 64 at most"),
        ("9" * 5000, "a number of 5,000 characters"),
        ("1:" * 30_000 + "1", "a number of 60,001 characters"),
        ("a: " + "x" * 70_000, "a string of 70,000 characters"),
        ("2001-99-99", "is not YAML: month must be in 1..12"),
        ("a: [", "is not YAML"),
        ("x" * (MAX_BYTES + 1), "expected 4,194,304 at most"),
    ],
    ids=range(12),
)
def test_yaml_beyond_a_limit_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"^it is not ") as caught:
        parse_yaml(text, "it", InvalidInput)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "is not JSON"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        ("9" * 5000, "is not JSON"),
        (f"[{'0,' * 200_000}0]", "more than 131,072 values"),
        ('"\\ud800"', "half of a surrogate pair"),
    ],
    ids=range(5),
)
def test_json_beyond_a_limit_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"^it is not ") as caught:
        parse_json(text, "it", InvalidInput)
    assert said in str(caught.value)


def test_a_file_that_is_no_text_or_has_no_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(InvalidInput, match="is not text in UTF-8: byte 2 is 0xff"):
        read_text(tmp_path / "binary", "plan", InvalidInput)
    with pytest.raises(InvalidInput, match=r"is too long: expected 100 bytes at most"):
        read_text("/dev/zero", "plan", InvalidInput, max_bytes=100)
    with pytest.raises(InvalidInput, match=r"cannot read plan .*: Is a directory"):
        read_text(tmp_path, "plan", InvalidInput)
    with pytest.raises(InvalidInput, match="embedded null"):
        read_text("a\0b", "plan", InvalidInput)
