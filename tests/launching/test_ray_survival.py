"""A supervised job on Ray goes on when a rank is killed, and when an actor is, to the losses of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launching.plans import ROOT, environ, run
from tests.launching.test_torchrun import MODEL, losses_of
from tests.patience import Patience

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")

STEPS, HELD_FROM = 20, 10
# Batches that are held back until there is a file, so that what is done to the job meets it while it trains.
HELD = f"""
import os
import time

def batches(batch_size, seq_len=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for number in range(100):
        while number >= {HELD_FROM} and not os.path.exists(__file__ + ".go"):
            time.sleep(0.05)
        yield tuple(torch.randint(256, (batch_size, seq_len), generator=generator) for _ in range(2))
"""


class Watched:
    """A job, what it says, and the processes of it."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.out, self.err = folder / "out", folder / "err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environ(), cwd=ROOT)

    def wait(self, true: Callable[[], object]) -> None:
        patience = Patience([self.process.pid], idle_s=120, limit_s=1200)
        while not true():
            assert self.process.poll() is None and not patience.lost(), self.err.read_text()[-4000:]
            time.sleep(0.2)

    def said(self) -> list[str]:
        return [line for line in self.err.read_text().splitlines() if "local Ray instance" not in line]

    def supervisor(self, rank: int) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            own = "autopar.launching" in process.cmdline()
            if own and process.parent().name().startswith("ray::") and process.environ().get("RANK") == str(rank):
                return process
        raise AssertionError(f"no supervisor of rank {rank}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL + HELD)
    done = run(
        sys.executable, "-m", "autopar", "search", str(tmp_path / "model.py"), "--gpus", "2", "--gpu", "cpu",
        "--dp", "2", "-o", str(tmp_path / "plan.yaml"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_a_rank_and_an_actor_that_are_killed(folder: Path) -> None:
    words = ("-m", "autopar", "train", str(folder / "model.py"), str(folder / "plan.yaml"), "--steps", str(STEPS))
    job = Watched(folder, sys.executable, *words, "--ray", "local", "--keep-alive", "--job", str(folder / "run"))
    try:
        job.wait(lambda: len(losses_of(job.out.read_text())) >= HELD_FROM - 1)
        (rank,) = (child for child in job.supervisor(1).children() if child.name() == "autopar rank 1")
        rank.kill()
        job.wait(lambda: any("going on from step" in line for line in job.said()))
        first, second, *_ = job.said()
        assert first.startswith("rank 1 on ") and "was killed by signal 9 (SIGKILL)" in first
        assert second.endswith("copied in memory, with the same plan")
        os.kill(job.supervisor(1).ppid(), 9)
        job.wait(lambda: "supervisors have come back" in job.said())
        (folder / "model.py.go").touch()
        job.wait(lambda: STEPS in losses_of(job.out.read_text()))
        assert job.process.wait(120) == 0, job.err.read_text()
    finally:
        job.process.kill()
    assert any(line.startswith("the supervisor of rank 1 on ") for line in job.said())
    assert "with a plan for 1 ranks" in job.err.read_text()
    undisturbed = run(sys.executable, *words)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = {step: float(loss) for step, loss in losses_of(undisturbed.stdout).items()}
    found = {step: float(loss) for step, loss in losses_of(job.out.read_text(), resumed=True).items()}
    assert len(found) == STEPS  # of the step before a failure the loss is said when the job goes on
    assert found == pytest.approx(expected, rel=1e-5)
