"""What the metadata of a checkpoint may name when it is read."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.folder import read_metadata


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def _read(tmp_path: Path, value: Any) -> str:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError) as caught:
        read_metadata(tmp_path)
    return str(caught.value)


def test_a_member_of_an_enum_may_be_read_by_name(tmp_path: Path) -> None:
    # As Python 3.11.0 to 3.11.3 pickle it. What is read is no metadata, but reading it is allowed.
    assert issubclass(_MEM_FORMAT_ENCODING, Enum)
    assert "names" not in _read(tmp_path, _Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_Call(print, "executed"), "it names builtins.print"),
        (_Call(getattr, Path, "unlink"), "it names pathlib.Path"),
        (_Call(getattr, pickle.dumps, "__self__"), "it names _pickle.dumps"),
        (_Call(getattr, "text", "upper"), "it reads 'upper' of 'text', which is no enum"),
    ],
)
def test_anything_else_is_refused(value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _read(tmp_path, value)
    assert "executed" not in capsys.readouterr().out
