"""What the metadata of a checkpoint may name when it is read."""

from __future__ import annotations

import pickle
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.contents import parse_metadata, parse_state
from autopar.runtime.checkpoint.untrusted_files import check_pickle


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def _read(value: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_metadata(pickle.dumps(value), Path("step-00000001-00000000"))
    return str(caught.value)


def test_a_member_of_an_enum_may_be_read_by_name() -> None:
    # As Python 3.11.0 to 3.11.3 pickle it. What is read is no metadata, but reading it is allowed.
    assert issubclass(_MEM_FORMAT_ENCODING, Enum)
    assert "names" not in _read(_Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_Call(print, "executed"), "it names builtins.print"),
        (_Call(getattr, Path, "unlink"), "it names pathlib.Path"),
        (_Call(getattr, pickle.dumps, "__self__"), "it names _pickle.dumps"),
        (_Call(getattr, "text", "upper"), "it reads 'upper' of 'text', which is no enum"),
    ],
)
def test_anything_else_is_refused(value: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _read(value)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "it names entry 2,147,483,647 of 9 at most"),
        (b"Np99999999\n.", "it names entry 99,999,999 of 12 at most"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.", "it has no end"),
        (b"cbuiltins", "it ends within an op"),
    ],
)
def test_a_pickle_that_asks_for_more_memory_than_its_length_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_metadata(content, tmp_path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_followed_to_their_end(protocol: int) -> None:
    value = [{"a": (1, 2**70, -3, 2.5, None, True), "é" * 300: [b"x" * 300, "y" * 70_000]}, Path("a"), {1, 2}]
    check_pickle(pickle.dumps(value, protocol=protocol))


def test_a_state_with_compressed_files_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(CheckpointError, match=r"'archive/data.pkl' in it is compressed"):
        parse_state((tmp_path / "state.pt").read_bytes(), tmp_path)
