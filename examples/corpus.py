"""Rows of bytes from the source code of Python's standard library: a corpus that needs no download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256


class SourceCode(Dataset[dict[str, Tensor]]):
    """Rows of ``seq_len`` bytes, one after the other: ``{"input_ids": (seq_len,), "labels": (seq_len,)}``."""

    def __init__(self, seq_len: int, num_rows: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= seq_len * num_rows:
                break
        self.rows = torch.tensor(list(text[: seq_len * num_rows])).view(num_rows, seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}
