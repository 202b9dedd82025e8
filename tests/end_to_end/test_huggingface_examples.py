"""The examples with Trainer and Accelerate give the losses of one rank, under torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import transformers

from tests.patience import run

ROOT = Path(__file__).parents[2]

pytest.importorskip("accelerate")


def _torchrun(ranks: int, *command: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = run(*launcher, *command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _trainer(ranks: int, output: Path, steps: int, *more: str) -> dict[int, float]:
    _torchrun(ranks, "examples/hf_trainer.py", f"--output={output}", f"--steps={steps}", *more)
    state = json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    expected = _trainer(1, tmp_path / "one", 20)
    assert len(expected) == 20 and expected[20] < expected[1] - 1
    assert _trainer(4, tmp_path / "four", 20, "--dp=2", "--tp=2", "--zero=1") == pytest.approx(expected, abs=2e-4)
    # As if it had been stopped after ten steps; on other ranks, under another plan.
    shutil.rmtree(tmp_path / "four" / "checkpoint-20")
    assert _trainer(2, tmp_path / "four", 20, "--pp=2", "--resume") == pytest.approx(expected, abs=2e-4)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "four")
    assert model.config.vocab_size == 256


def _accelerate(ranks: int, *more: str) -> list[float]:
    printed = _torchrun(ranks, "examples/accelerate_loop.py", "--steps=6", *more)
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.slow
def test_accelerate() -> None:
    expected = _accelerate(1)
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.5
    assert _accelerate(4, "--dp=2", "--tp=2") == pytest.approx(expected, abs=1e-4)
    assert _accelerate(2, "--pp=2") == pytest.approx(expected, abs=1e-4)
