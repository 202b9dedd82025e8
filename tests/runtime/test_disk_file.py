"""Tensors in a file: what is written comes back, and what has changed on the disk does not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.errors import DiskError
from autopar.runtime.disk.file import _LONG_AGO, TensorFile, TensorLayout
from autopar.runtime.disk.mover import Mover

LAYOUTS = [
    TensorLayout("weight", (300, 7), torch.float32),
    TensorLayout("none", (0, 3), torch.float32),
    TensorLayout("narrow", (5000,), torch.bfloat16),
    TensorLayout("number", (), torch.int64),
]


def file_of(tmp_path: Path) -> TensorFile:
    return TensorFile(tmp_path, LAYOUTS)


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([layout.name for layout in LAYOUTS]),
            st.sampled_from(["read", "write", "drop", "flush", "stay"]),
        ),
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_values_come_back(tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, str]], seed: int) -> None:
    """Wherever they are when something is stored into them."""
    file = file_of(tmp_path_factory.mktemp("disk"))
    torch.manual_seed(seed)
    expected = {layout.name: torch.zeros(layout.shape, dtype=layout.dtype) for layout in LAYOUTS}
    for name, move in moves:
        value = torch.randn(expected[name].shape).to(expected[name].dtype)
        expected[name] = value
        file.tensors[name].copy_(value)
        if move != "stay":
            getattr(file, move)()
    for _ in range(2):
        for name, value in expected.items():
            assert torch.equal(file.tensors[name], value)
        file.read()


def test_what_is_taken_is_replaced(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    file.tensors["weight"].fill_(1.0)
    assert file.write() == file.num_bytes
    file.take()
    file.tensors["weight"].fill_(2.0)
    assert file.drop() == file.num_bytes  # it has changed
    assert file.read() == file.num_bytes
    assert file.drop() == 0
    assert bool((file.tensors["weight"] == 2.0).all())


def test_a_store_on_the_way_ends_the_process(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.runtime.test_disk_file import file_of
file = file_of(Path({os.fspath(tmp_path)!r}))
with file._closed_to_stores():
    print(file.tensors["weight"].sum().item(), flush=True)
    file.tensors["weight"].fill_(1.0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "0.0\n"), ended.stderr


def test_the_file_leaves_nothing_behind(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    tensor = file.tensors["weight"]
    assert not list(tmp_path.iterdir())
    del file
    tensor.fill_(3.0)  # what is mapped lives as long as its tensors
    assert tensor.sum() == 3.0 * tensor.numel()


def damage(file: TensorFile, offset: int, bit: int) -> None:
    """As a disk does it, which says nothing."""
    with Path(f"/proc/self/fd/{file._descriptor}").open("r+b", buffering=0) as other:
        (byte,) = os.pread(other.fileno(), 1, offset)
        os.pwrite(other.fileno(), bytes([byte ^ 1 << bit]), offset)
        os.fsync(other.fileno())
    os.utime(file._descriptor, ns=(_LONG_AGO, _LONG_AGO))


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_seen(tmp_path: Path, bit: int) -> None:
    file = file_of(tmp_path)
    file.tensors["weight"].fill_(1.0)
    file.write()
    file.read()
    file.drop()
    damage(file, 1234, bit)
    with pytest.raises(OSError, match="weight is not what was written"):
        file.read()
    file.tensors["weight"].fill_(2.0)  # it is closed to stores no longer


def test_a_change_in_memory_is_no_damage(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    for number in range(20):
        file.write()
        file.tensors["weight"].data[number % 3].add_(1.0)
        file.tensors["narrow"].data.mul_(2.0)
        file.flush()  # as the system does it when memory runs short
        file.read()


def test_a_short_file_is_seen(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    file.write()
    os.ftruncate(file._descriptor, 4096)
    with pytest.raises(OSError, match="ends early"):
        file.read()


def test_moves_of_a_file_are_in_order(tmp_path: Path) -> None:
    mover, files = Mover(tmp_path), [file_of(tmp_path) for _ in range(4)]
    for file in files:
        mover.made(file)
    for turn in range(20):
        for number, file in enumerate(files):
            mover.need(file)
            assert bool((file.tensors["weight"] == turn).all())
            mover.fetch(files[(number + 1) % 4])
            file.tensors["weight"].add_(1.0)
            mover.release(file, changed=True)
    mover.settle()
    assert mover.traffic.written == 80 * files[0].num_bytes
    assert 76 * files[0].num_bytes <= mover.traffic.read <= 80 * files[0].num_bytes


def test_an_error_of_the_disk_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, file = Mover(tmp_path), file_of(tmp_path)
    mover.made(file)
    mover.release(file, changed=True)
    mover.settle()

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DiskError, match=f"{tmp_path}.*failed: Input/output error(.|\n)*try: another folder"):
        mover.need(file)
