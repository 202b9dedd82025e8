"""Copies of the state in memory: complete or not there, read under the same plan and under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.checkpoint.loading import load_saved
from autopar.runtime.copies.copier import Copier, CopyPlaces
from autopar.runtime.copies.partner import partners
from autopar.runtime.copies.places import Copy, copies_in, newest_complete
from autopar.runtime.copies.reading import open_copies
from autopar.runtime.copies.slot import BODY, Slot, part_of, peek, placed, set_step
from autopar.runtime.copies.snapshot import Snapshots
from tests.harness import run_ranks


def test_a_copy_counts_once_its_step_is_written(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    pieces = placed([part_of("x", tensor, (4, 3), (2, 0))])
    slot = Slot.create(tmp_path / "rank-00000.0", {"model": "m"}, pieces, 16, 0, 2)
    assert slot.step is None
    assert peek(slot.path) is None
    slot.begin()
    slot.tensors[0].copy_(tensor)
    slot.finish(7, b"values")
    assert peek(slot.path) == (7, 0, 2, None)
    again = Slot(slot.path)
    assert (again.step, again.values, again.header) == (7, b"values", {"model": "m"})
    assert torch.equal(again.tensor(again.pieces[0]), tensor)
    again.begin()
    assert peek(slot.path) is None


def test_the_beginning_of_a_copy_is_one_without_what_another_rank_has(tmp_path: Path) -> None:
    parts = [part_of(key, torch.empty(40), (80,), (40,)) for key in ("x", "y", "z")]
    slot = Slot.create(tmp_path / "whole", {}, placed(parts, 3, {parts[0]}), 16, 1, 4)
    assert [piece.key for piece in slot.pieces] == ["y", "z", "x"]
    for piece, place in zip(slot.pieces, slot.tensors, strict=True):
        place.fill_({"x": 1.0, "y": 2.0, "z": 3.0}[piece.key])
    slot.finish(7, b"values")
    assert slot.beginning.numel() < slot.data.numel()
    path = tmp_path / "beginning"
    data = Slot.empty(path, slot.beginning.numel())
    data[BODY:] = slot.beginning[BODY:]
    assert peek(path) is None
    set_step(data, 7)
    assert (peek(slot.path), peek(path)) == ((7, 1, 4, None), (7, 1, 4, 3))
    sent = Slot(path)
    assert sent.values == b"values"
    assert {piece.key: float(sent.tensor(piece)[-1]) for piece in sent.pieces} == {"y": 2.0, "z": 3.0}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path / "rank-00000.0", {}, placed([]), 4, 0, 1)
    data = slot.path.read_bytes()
    (tmp_path / "short").write_bytes(data[:-1])
    (tmp_path / "other").write_bytes(b"x" + data[1:])
    for name in ("short", "other", "absent"):
        with pytest.raises(autopar.CheckpointError, match="is broken"):
            Slot(tmp_path / name)


def test_the_newest_state_is_the_last_of_which_every_rank_has_a_copy() -> None:
    def copy(step: int, generation: int, rank: int, size: int) -> Copy:
        return Copy(step, generation, rank, size, Path("x"))

    assert newest_complete([]) is None
    assert newest_complete([copy(4, 1, 0, 2), copy(5, 1, 0, 2), copy(4, 1, 1, 2)]) == (4, 1)
    assert newest_complete([copy(4, 1, 0, 1), copy(4, 2, 0, 1), copy(5, 3, 0, 2)]) == (4, 2)
    # A copy without what rank 1 has too counts beside a whole one of it.
    short = Copy(6, 1, 0, 2, Path("x"), rest=1)
    assert newest_complete([short, copy(6, 1, 1, 2)]) == (6, 1)
    assert newest_complete([short, Copy(6, 1, 1, 2, Path("x"), rest=0), copy(5, 1, 0, 1)]) == (5, 1)
    assert newest_complete([short, copy(5, 1, 1, 2), copy(5, 1, 0, 2)]) == (5, 1)


def test_partners_are_on_another_host() -> None:
    assert partners(["a", "a"], 0) == (None, [])
    hosts = ["a", "a", "b", "b"]
    assert [partners(hosts, rank) for rank in range(4)] == [(2, [2]), (3, [3]), (0, [0]), (1, [1])]
    uneven = ["a", "a", "a", "b"]
    assert partners(uneven, 0) == (3, [3])
    assert partners(uneven, 3) == (0, [0, 1, 2])
    for names in (hosts, uneven, ["a", "b", "c", "a"]):
        for rank, name in enumerate(names):
            to, _ = partners(names, rank)
            assert to is not None
            assert names[to] != name
            assert rank in partners(names, to)[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x)).relu()) - x).square().mean()


def _module(**constraints: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Model(), dist.get_world_size(), example_inputs=torch.zeros(8, 6), **constraints)
    return pm, torch.optim.AdamW(pm.parameters(), lr=0.01)


def _steps(pm: Any, optimizer: Any, first: int, last: int, copier: Copier | None = None) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        losses.append(float(pm.step(pm.shard_batch(torch.randn(8, 6, generator=generator)))))
        if copier is not None:
            copier.wait_copied()
        optimizer.step()
        optimizer.zero_grad()
        if copier is not None:
            copier.begin(step + 1, _data(step + 1))
    return losses


def _data(step: int) -> dict[str, Any]:
    """On ranks with an even number it outgrows the room that a copy has for it."""
    return {"at": step, "rows": [0] * (4000 * step * (1 - dist.get_rank() % 2))}


def _copied(folder: str, per_host: int, constraints: dict[str, Any]) -> list[float]:
    places = _places(folder, per_host)
    pm, optimizer = _module(**constraints)
    copier = Copier(Snapshots(pm, optimizer), places)
    losses = _steps(pm, optimizer, 0, 3, copier)
    assert copier.finish() == 3
    return losses + _steps(pm, optimizer, 3, 6)


def _places(folder: str, per_host: int) -> CopyPlaces:
    host = str(dist.get_rank() // per_host)
    return CopyPlaces(Path(folder) / host, host, 1)


def _resumed(folder: str, per_host: int, constraints: dict[str, Any]) -> tuple[list[float], int, Any]:
    pm, optimizer = _module(**constraints)
    saved = open_copies(_places(folder, per_host), 3, 1, pm.plan)
    progress = load_saved(pm, optimizer, saved)
    return _steps(pm, optimizer, 3, 6), progress.step, progress.data


@pytest.mark.parametrize("zero", [0, 3])
def test_a_lost_host_is_made_up_for_by_its_partner(tmp_path: Path, zero: int) -> None:
    """At level 0 a partner has all parameters and optimiser state itself."""
    divided = {"dp": 4, "tp": 1, "pp": 1, "zero": zero}
    losses = run_ranks(_copied, 4, str(tmp_path), 2, divided)[0]
    sizes: list[dict[int, int]] = []
    for number in range(2):
        copies = [copy for copy in copies_in(tmp_path / str(number)) if copy.step == 3]
        assert {copy.rank for copy in copies} == {0, 1, 2, 3}
        own = {2 * number, 2 * number + 1}
        lacking = {copy.rank: copy.rest for copy in copies if copy.rest is not None}
        assert lacking == {rank: (rank + 2) % 4 for rank in {0, 1, 2, 3} - own}
        sizes.append({copy.rank: copy.path.stat().st_size for copy in copies})
    if not zero:
        assert all(sizes[1 - rank // 2][rank] < sizes[rank // 2][rank] - 4 * 3 * 100 for rank in range(4))
    again, step, data = run_ranks(_resumed, 4, str(tmp_path), 2, divided)[0]
    assert (again, step, data) == (losses[3:], 3, {"at": 3, "rows": [0] * 12_000})
    for path in (tmp_path / "1").glob("g*/*"):
        path.unlink()
    # The other host alone has everything, and two ranks of another plan go on from it.
    fewer, step, _ = run_ranks(_resumed, 2, str(tmp_path), 2, {"dp": 1, "tp": 2, "pp": 1})[0]
    assert step == 3
    assert fewer == pytest.approx(losses[3:], rel=1e-5)
    # A host that has nothing is sent all of it.
    back, _, _ = run_ranks(_resumed, 4, str(tmp_path), 2, divided)[0]
    assert back == losses[3:]
