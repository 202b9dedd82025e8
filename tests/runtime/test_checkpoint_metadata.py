"""What the metadata of a checkpoint may name when it is read."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.contents import parse_metadata


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
