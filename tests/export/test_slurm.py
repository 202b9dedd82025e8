"""The script is valid bash, and starts the right program on every node: run with stand-ins for srun and scontrol."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from autopar.export import Options, export
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.training.job import TrainingJob
from tests.export.plans import decoder_plan

SRUN = """#!/bin/bash
[[ "$1" == --kill-on-bad-exit=[01] && "$2" == --no-kill ]] || exit 3
shift 2
for SLURM_NODEID in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$SLURM_NODEID "$@"; done
"""
TORCHRUN = "#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\n'\n"


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "torchrun": TORCHRUN, "scontrol": "#!/bin/bash\necho n1; echo n2\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(plan: Plan, stubs: Path, *arguments: str, options: Options | None = None, **more: str) -> list[list[str]]:
    """What torchrun is given on each node."""
    text = export(plan, "slurm", options).text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    nodes = next(line for line in text.splitlines() if line.startswith("#SBATCH --nodes=")).partition("=")[2]
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_NNODES": nodes, "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
    } | more  # fmt: skip
    done = subprocess.run(["bash", "-c", text, "job", *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split("\0") for line in done.stdout.split("\0\n\0")[:-1]]


def test_one_torchrun_a_node(stubs: Path) -> None:
    plan = decoder_plan(dp=16)
    calls = run(plan, stubs)
    assert len(calls) == 2
    for node, words in enumerate(calls):
        given = dict(zip(words[:12:2], words[1:12:2], strict=True))
        assert (given["--nnodes"], given["--nproc-per-node"], given["--node-rank"]) == ("2", "8", str(node))
        assert (given["--master-addr"], given["--master-port"]) == ("n1", "20077")
        assert words[12:14] == ["-m", "autopar.launching"]
        job = TrainingJob(**json.loads(words[14]))
        assert job == TrainingJob(
            model="examples/gpt.py", plan="plan.yaml", steps=1000, seq_len=1024, job="autopar-decoder", keep=2,
            keep_alive=True,
        )  # fmt: skip


def test_steps_checkpoints_and_programs(stubs: Path) -> None:
    plan = decoder_plan(dp=16)
    (words, _) = run(plan, stubs, STEPS="7", JOB="/there", SAVE_EVERY="3", KEEP="5")
    job = TrainingJob(**json.loads(words[14]))
    assert (job.steps, job.job, job.save_every, job.keep) == (7, "/there", 3, 5)
    (words, _) = run(plan, stubs, JOB="")
    assert TrainingJob(**json.loads(words[14])).job is None
    (words, _) = run(plan, stubs, "my program.py", "--flag")
    assert words[12:14] == ["my program.py", "--flag"]


LATE_SRUN = """#!/bin/bash
trap 'echo told; exit 1' USR1
kill -USR1 $PPID  # as Slurm does to the script before the time is over
while true; do sleep 0.1; done
"""


@pytest.mark.parametrize("pause", ["", "sleep 0.5\n"], ids=["at once", "before the script knows of srun"])
def test_a_job_whose_time_is_nearly_over_tells_its_ranks_once_and_is_queued_again(stubs: Path, pause: str) -> None:
    (stubs / "srun").write_text(LATE_SRUN)
    (stubs / "scontrol").write_text('#!/bin/bash\n[[ "$1" == show ]] && echo n1 || echo "$@"\n')
    text = export(decoder_plan(dp=2), "slurm").text
    assert "#SBATCH --signal=B:USR1@120\n" in text
    text = text.replace("\nSTEP=$!\n", f"\n{pause}STEP=$!\n")
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["told", "requeue 77", ""]
    assert done.returncode == 1


def test_names_are_no_shell_code(stubs: Path, tmp_path: Path) -> None:
    odd = f"a '$(touch {tmp_path}/broken)' \"b\".py"
    plan = decoder_plan(dp=2, name=f"x\n$(touch {tmp_path}/broken)", source=odd)
    (words,) = run(plan, stubs, options=Options(plan_path="it's $HOME.yaml"))
    job = json.loads(words[14])
    assert (job["model"], job["plan"]) == (odd, "it's $HOME.yaml")
    assert not (tmp_path / "broken").exists()


def test_the_script_that_slurm_starts_again_goes_on() -> None:
    text = export(decoder_plan(dp=2), "slurm").text
    assert "#SBATCH --requeue --no-kill\n" in text and "--open-mode=append\n" in text


def test_resources() -> None:
    text = export(decoder_plan(dp=12, per_node=8), "slurm").text
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=6\n" in text
    assert "6 ranks on each node, which has 8 devices" in text
    assert "gpus-per-node" not in export(decoder_plan(dp=2, gpu="cpu"), "slurm").text


def test_a_job_needs_a_model() -> None:
    with pytest.raises(InvalidInput, match=r"--model file\.py"):
        export(decoder_plan(dp=2, source=None), "slurm")
    assert "other.py" in export(decoder_plan(dp=2, source=None), "slurm", Options(model="other.py")).text
