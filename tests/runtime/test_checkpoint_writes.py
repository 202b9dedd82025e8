"""What is kept on disk, and what becomes of a write that has no room, or fails, or would save what is not finite."""

from __future__ import annotations

import resource
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError
from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.checkpoint import free_space
from autopar.runtime.checkpoint.folder import complete, has_checkpoint, latest, new_name
from tests.harness import run_ranks
from tests.runtime.small_run import SmallRun

Usage = namedtuple("Usage", "total used free")


def said(work: Callable[[], object]) -> str:
    """The error that ``work`` raises."""
    try:
        work()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _folders(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir())


def _keep(run: SmallRun, folder: Path) -> dict[str, Any]:
    """The steps of the checkpoints that are left after each of several writes."""
    steps = []
    for keep in (1, 2, 2, 3, 3, 1):
        run.train()
        run.save(str(folder), keep=keep)
        steps.append([int(name.split("-")[1]) for name in complete(folder)])
    cut_off = folder / new_name(99)
    if dist.get_rank() == 0:
        cut_off.mkdir()
        (cut_off / "__0_0.distcp").write_bytes(bytes(1000))
    dist.barrier()
    run.save(str(folder))
    return {
        "steps": steps,
        "none": said(lambda: run.save(str(folder), keep=0)),
        "cut off": cut_off.exists(),
        "left": len(_folders(folder)),
    }


def _room(run: SmallRun, folder: Path) -> dict[str, Any]:
    """Saving where one rank sees a full disk, and how much is needed for how much."""
    run.save(str(folder))
    before = _folders(folder)
    written = sum(file.stat().st_size for file in latest(folder).iterdir())
    asked: list[int] = []
    usage, room = shutil.disk_usage, free_space.check_room
    free_space.check_room = lambda path, needed: (asked.append(needed), room(path, needed))[1]
    if dist.get_rank() == 1:
        shutil.disk_usage = lambda path: Usage(10**9, 10**9, written // 2)  # type: ignore[assignment]
    full = [said(lambda mode=mode: run.save(str(folder), asynchronous=mode)) for mode in (True, False)]
    shutil.disk_usage, free_space.check_room = usage, room
    return {"full": full, "same": _folders(folder) == before, "needed": asked[0], "written": written}


def _failing(run: SmallRun, folder: Path) -> dict[str, Any]:
    """A write beside training that fails on rank 1 alone, and training that goes on after it was told."""
    run.save(str(folder))
    before = _folders(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    saving = run.save(str(folder), asynchronous=True)
    if dist.get_rank() == 1:  # sees the end of the write; the other one may not have
        while not saving.done:
            time.sleep(0.01)
    found: dict[str, Any] = {"step": said(run.train), "again": said(run.train), "wait": said(saving.wait)}
    found["save"] = said(lambda: run.save(str(folder)))
    dist.barrier()
    found["same"] = _folders(folder) == before
    # Not told by a step, but by one rank's own wait(): every rank is told by the next save.
    saving = run.save(str(folder), asynchronous=True)
    if dist.get_rank() == 0:
        found["own"] = said(saving.wait)
    found["next"] = said(lambda: run.save(str(folder)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["after"] = said(lambda: run.save(str(folder)))
    found["left"] = len(_folders(folder))
    return found


def _not_finite(run: SmallRun, folder: Path) -> dict[str, str]:
    """Saving with one number that is none, in state of which parameters know nothing."""
    found = {}
    average = next(iter(run.optimizer.state.values()))["exp_avg_sq"]
    mean = dict(run.pm.named_buffers())["norm.running_mean"]
    for name, tensor in (("optimiser", local_of(average)), ("buffer", mean)):
        kept = tensor.clone()
        if dist.get_rank() == 1:
            tensor[0] = float("inf" if name == "optimiser" else "nan")
        found[name] = said(lambda: run.save(str(folder)))
        tensor.copy_(kept)
    found["nothing"] = str(has_checkpoint(folder))
    found["finite"] = said(lambda: run.save(str(folder)))
    return found


def _all(folder: str) -> dict[str, Any]:
    run, path = SmallRun(), Path(folder)
    run.train()
    return {
        "keep": _keep(run, path / "keep"),
        "room": _room(run, path / "room"),
        "failing": _failing(run, path / "failing"),
        "not finite": _not_finite(run, path / "finite"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, 2, str(tmp_path_factory.mktemp("writes")))


def test_the_newest_few_are_kept(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["keep"]["steps"] == [[2], [3, 2], [4, 3], [5, 4, 3], [6, 5, 4], [7]]
        assert rank["keep"]["none"].startswith("InvalidInput: keep=0")


def test_what_a_write_that_was_cut_off_has_left_is_removed(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not rank["keep"]["cut off"] and rank["keep"]["left"] == 1


def test_without_room_nothing_is_written_and_every_rank_says_so(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["room"]["same"]
        for text in rank["room"]["full"]:
            assert text.startswith("CheckpointError") and "has no room" in text and "MiB are free" in text


def test_the_room_that_is_asked_for_is_what_is_written_and_little_more(found: list[dict[str, Any]]) -> None:
    needed, written = found[0]["room"]["needed"], found[0]["room"]["written"]
    assert written <= needed < 1.5 * written + 2**16


def test_a_failed_write_is_raised_by_the_next_step_of_every_rank_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        failing = rank["failing"]
        for text in (failing["step"], failing["wait"], failing["save"]):
            assert text.startswith("CheckpointError") and "rank 1: [Errno 27] File too large" in text, failing
            assert len(text.splitlines()) == 2, "no stack traces"
        assert failing["again"] == ""


def test_a_failed_write_leaves_what_was_there_and_the_next_one_succeeds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        failing = rank["failing"]
        assert failing["same"] and failing["after"] == "" and failing["left"] == 1


def test_a_failure_that_one_rank_waited_for_is_raised_on_all_by_the_next_save(found: list[dict[str, Any]]) -> None:
    assert "File too large" in found[0]["failing"]["own"]
    for rank in found:
        assert "File too large" in rank["failing"]["next"]


def test_optimisers_and_buffers_that_are_not_finite_are_never_saved(found: list[dict[str, Any]]) -> None:
    for rank in found:
        texts = rank["not finite"]
        assert texts["optimiser"].startswith("NotFinite: step 8: 1 tensors of the optimiser are not finite on rank 1")
        assert "/exp_avg_sq" in texts["optimiser"]
        assert "1 buffers are not finite on rank 1, the first is norm.running_mean" in texts["buffer"]
        assert texts["nothing"] == "False" and texts["finite"] == ""


def test_a_tensor_takes_at_least_what_torch_writes(tmp_path: Path) -> None:
    for shape in ((), (1,), (1000, 3), (0, 4)):
        torch.save(torch.zeros(shape), tmp_path / "tensor")
        assert (tmp_path / "tensor").stat().st_size <= free_space.stored_bytes(torch.zeros(shape))
