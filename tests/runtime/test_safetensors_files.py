"""Files that are written tensor by tensor are those of safetensors; broken folders are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from autopar.ir.errors import CheckpointError, InvalidInput
from autopar.runtime.checkpoint.pretrained import parse_size, split
from autopar.runtime.checkpoint.safetensors_files import INDEX, SINGLE, TensorFiles, TensorFileWriter

TENSORS = {
    "wide": torch.arange(12.0, dtype=torch.float64).view(3, 4),
    "weight": torch.arange(12.0).view(4, 3),
    "half": torch.arange(6.0).to(torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "none": torch.zeros(0, 5),
    "count": torch.tensor([1, 2, 3]),
    "mask": torch.tensor([True, False]),
}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / SINGLE, TENSORS)
    for value in TENSORS.values():
        writer.write(value)
    writer.close()
    torch.testing.assert_close(load_file(tmp_path / SINGLE), TENSORS)
    files = TensorFiles(tmp_path)
    assert {name: value.read() for name, value in files.tensors.items()}.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(files.tensors[name].read(), value), name
    before = files.bytes_read
    assert torch.equal(files.tensors["weight"].narrow(0, 1, 2).narrow(1, 2, 1).read(), TENSORS["weight"][1:3, 2:])
    assert files.bytes_read - before == 8
    files.close()


def test_files_keep_to_their_size() -> None:
    values = {f"w{number}": torch.zeros(10) for number in range(5)}
    files = split(values, 80)
    assert [list(part) for part in files.values()] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    assert list(split(values, 200)) == [SINGLE]
    assert [list(part) for part in split(values, 1).values()] == [[name] for name in values]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), (17, 17), ("12B", 12)])
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", 0, "5 parsecs"])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(InvalidInput, match="max_shard_size"):
        parse_size(text)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights that can be read in slices"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is broken"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "w.safetensors"}}))
    with pytest.raises(CheckpointError, match="cannot read"):
        TensorFiles(tmp_path)
    save_file({"v": torch.zeros(3)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not hold w"):
        TensorFiles(tmp_path)
    (tmp_path / SINGLE).write_bytes(b'\x08\0\0\0\0\0\0\0{"a": 1}')
    with pytest.raises(CheckpointError, match="cannot read"):
        TensorFiles(tmp_path)
