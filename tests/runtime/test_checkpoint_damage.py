"""Every byte of a checkpoint is verified before anything changes, and a damaged one can be passed over."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint import checksums
from autopar.runtime.checkpoint.folder import complete, latest
from autopar.runtime.checkpoint.manifest import MANIFEST
from tests.harness import run_ranks
from tests.runtime.small_run import SmallRun

FLIPS = 32


def _files(run: Path) -> list[Path]:
    return [run / "latest", *sorted(latest(run).iterdir())]


def _flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _damages(run: Path) -> dict[str, Callable[[], object]]:
    """What is done to a run with two checkpoints, by name."""
    found: dict[str, Callable[[], object]] = {}
    draw = random.Random(0)
    files = _files(run)
    for number in range(FLIPS):
        file = files[number % len(files)]
        bit = draw.randrange(file.stat().st_size * 8)
        found[f"bit {bit} of {file.name} flipped"] = lambda file=file, bit=bit: _flip(file, bit)
    for file in files:
        content = file.read_bytes()
        for size in (0, draw.randrange(1, len(content) - 1), len(content) - 1):
            found[f"{file.name} cut to {size}"] = lambda file=file, part=content[:size]: file.write_bytes(part)
        found[f"{file.name} with a byte more"] = lambda file=file, more=content + b"\0": file.write_bytes(more)
        found[f"{file.name} missing"] = file.unlink
    _, *own = files
    other = run / list(complete(run))[1]
    for file in own:
        found[f"{file.name} of the other"] = lambda file=file: shutil.copy(other / file.name, file)
    found["two files exchanged"] = lambda: _swap(*(file for file in own if file.suffix == ".distcp"))
    found["two folders exchanged"] = lambda: _swap(latest(run), other)
    return found


def _damage_each(folder: str) -> dict[str, tuple[str, bool]]:
    """What loading says of each damaged copy, and whether model, optimiser and all else are then what they were."""
    run = SmallRun()
    for _ in range(2):
        run.train()
        run.save(f"{folder}/good", keep=2)
    run.train()
    before, found = run.bits(), {}
    for name in _damages(Path(folder, "good")):
        if dist.get_rank() == 0:
            shutil.copytree(f"{folder}/good", f"{folder}/bad")
            _damages(Path(folder, "bad"))[name]()
        dist.barrier()
        try:
            run.load(f"{folder}/bad")
            said = ""
        except CheckpointError as error:
            said = str(error)
        found[name] = (said, run.bits() == before)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/bad")
    assert run.load(f"{folder}/good").step == 2
    assert run.bits() != before
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, bool]]]:
    return run_ranks(_damage_each, 2, str(tmp_path_factory.mktemp("damaged")))


def test_every_damage_is_refused_on_every_rank(damaged: list[dict[str, tuple[str, bool]]]) -> None:
    assert sum("flipped" in name for name in damaged[0]) == FLIPS
    for found in damaged:
        assert not [name for name, (said, _) in found.items() if not said]


def test_nothing_changes_before_the_refusal(damaged: list[dict[str, tuple[str, bool]]]) -> None:
    for found in damaged:
        assert not [name for name, (_, same) in found.items() if not same]


def test_the_error_names_the_checkpoint_beside_it(damaged: list[dict[str, tuple[str, bool]]]) -> None:
    said, _ = next(value for name, value in damaged[0].items() if name.endswith(".distcp flipped"))
    assert "is not what was written" in said and "kept beside it: step-00000001-" in said and "fall_back=True" in said


def _break_newest(folder: str) -> str:
    """The name of the newest checkpoint, of which one bit is another now."""
    newest = latest(Path(folder)).name
    dist.barrier()
    if dist.get_rank() == 0:
        _flip(Path(folder, newest, "__1_0.distcp"), 4321)
    dist.barrier()
    return newest


def _fall_back(folder: str) -> dict[str, Any]:
    run = SmallRun()
    for _ in range(2):
        run.train()
        run.save(folder, keep=2)
    (_, older), newest = complete(Path(folder)), _break_newest(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        progress = run.load(folder, fall_back=True)
    found = {"newest": newest, "step": progress.step, "skipped": progress.skipped}
    found["warned"] = [str(one.message) for one in caught if one.category.__name__ == "CheckpointWarning"]
    run.save(folder, keep=2)
    found["kept"] = (older, sorted(complete(Path(folder)), key=older.__eq__))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest").unlink()
    dist.barrier()
    found["without latest"] = run.load(folder, fall_back=True).step
    for name in complete(Path(folder)):
        dist.barrier()
        Path(folder, name, "state.pt").unlink(missing_ok=True)
    dist.barrier()
    try:
        run.load(folder, fall_back=True)
    except CheckpointError as error:
        found["none"] = str(error)
    return found


@pytest.fixture(scope="module")
def fallen_back(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_fall_back, 2, str(tmp_path_factory.mktemp("run")))


def test_the_newest_that_is_not_damaged_is_loaded_and_the_others_are_named(fallen_back: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(fallen_back):
        assert (found["step"], found["without latest"]) == (1, 2)
        ((name, why),) = found["skipped"].items()
        assert name == found["newest"] and "__1_0.distcp is not what was written" in why
        assert len(found["warned"]) == (1 if rank == 0 else 0)
    assert "going on from" in fallen_back[0]["warned"][0] and "__1_0.distcp" in fallen_back[0]["warned"][0]


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(fallen_back: list[dict[str, Any]]) -> None:
    for found in fallen_back:
        older, kept = found["kept"]
        assert len(kept) == 2 and older in kept and found["newest"] not in kept


def test_where_all_are_damaged_each_is_named(fallen_back: list[dict[str, Any]]) -> None:
    for found in fallen_back:
        assert found["none"].count("state.pt cannot be read") == 2


def _other_optimizer(folder: str) -> tuple[str, bool]:
    """What loading says with another kind of optimiser, once it has state, and whether all is then what it was."""
    run = SmallRun()
    run.train()
    run.save(folder)
    run.optimizer = torch.optim.Adagrad(run.pm.parameters(), lr=0.5)
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    run.optimizer.state.pop(next(iter(run.pm.parameters())))
    before = run.bits()
    try:
        run.load(folder)
    except CheckpointError as error:
        return str(error), run.bits() == before
    return "", False


def test_an_optimizer_that_does_not_fit_is_left_as_it_was(tmp_path: Path) -> None:
    for said, same in run_ranks(_other_optimizer, 2, str(tmp_path)):
        assert "Adagrad keeps ['step', 'sum'] of first.weight; the checkpoint has ['exp_avg'" in said
        assert same


def _other_version(run: Path, version: int) -> Path:
    """The latest checkpoint as another format, and without a manifest, as the first one had it."""
    written = latest(run)
    dist.barrier()
    if dist.get_rank() == 0:
        state = torch.load(written / "state.pt", weights_only=True)
        torch.save(state | {"format": version}, written / "state.pt")
        (written / MANIFEST).unlink(missing_ok=True)
    dist.barrier()
    return written


def _versions(folder: str) -> tuple[int, list[str], str]:
    run = SmallRun()
    run.train()
    run.save(folder)
    written = _other_version(Path(folder), 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = run.load(folder).step
    run.save(folder, keep=2)
    assert written.exists(), "it counts as complete"
    _other_version(Path(folder), 3)
    try:
        run.load(folder, fall_back=True)
    except CheckpointError as error:
        return step, [str(one.message) for one in caught], str(error)
    return step, [], ""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[str], str]]:
    return run_ranks(_versions, 2, str(tmp_path_factory.mktemp("versions")))


def test_a_checkpoint_of_an_earlier_version_is_loaded_and_said_to_be_unverified(versions: list[Any]) -> None:
    assert [step for step, _, _ in versions] == [1, 1]
    assert any("without checksums: damage goes unnoticed" in text for text in versions[0][1])


def test_a_checkpoint_of_a_later_version_is_not_passed_over(versions: list[Any]) -> None:
    for _, _, said in versions:
        assert "has format 3; this version of autopar reads 1 and 2" in said


def test_a_file_has_a_checksum_for_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 10)
    content = bytes(range(25))
    (tmp_path / "file").write_bytes(content)
    running = checksums.RunningSums()
    for start in range(0, 25, 7):
        running.add(content[start : start + 7])
    sums = running.of("file")
    assert sums == checksums.sums_of("file", content) and (sums.size, len(sums.sums)) == (25, 3)
    assert [checksums.block_sum(tmp_path / "file", number) for number in range(3)] == list(sums.sums)
    _flip(tmp_path / "file", 8 * 24)
    assert [checksums.block_sum(tmp_path / "file", n) == sums.sums[n] for n in range(3)] == [True, True, False]
