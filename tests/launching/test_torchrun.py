"""Within a job of torchrun: ``autopar train`` joins it, so does any script, and too few ranks are refused."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.core import TyperGroup
from typer.main import get_command

from autopar.cli.app import app
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.launching.launch import launch
from autopar.training.job import TrainingJob
from tests.launching.plans import run

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(8, 256)

    def forward(self, tokens, targets):
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def model():
    return Net()

def example_inputs(batch_size=8, seq_len=16):
    return tuple(torch.zeros(batch_size, seq_len, dtype=torch.long) for _ in range(2))
"""
SCRIPT = """
import torch
import torch.distributed as dist
import autopar
from model import example_inputs, model

torch.manual_seed(0)
pm = autopar.parallelize(model(), 2, example_inputs=example_inputs(), plan="plan.yaml")
optimizer = torch.optim.AdamW(pm.parameters())
for _ in range(2):
    loss = pm.step(*pm.shard_batch(example_inputs()))
    optimizer.step()
    optimizer.zero_grad()
with open(f"{__file__}.rank{dist.get_rank()}", "w") as said:
    print(dist.get_rank(), "of", dist.get_world_size(), "loss", round(loss.item(), 6), file=said)
dist.destroy_process_group()
"""

KILLED = """
import os
import signal

def batches(batch_size, seq_len=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for number in range(100):
        now = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "RESTART_COUNT")]
        if (*now, os.environ.get("RANK"), number) in (("2", "0", "1", 5), ("2", "1", "0", 7)):
            os.kill(os.getpid(), signal.SIGKILL)
        yield tuple(torch.randint(256, (batch_size, seq_len), generator=generator) for _ in range(2))
"""

ONCE = """
import os
import signal
import time
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode

class Hangs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.name():
            time.sleep(100)
        return func(*args, **(kwargs or {}))

def batches(batch_size, seq_len=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    once = Path(__file__).with_suffix(".once")
    for number in range(100):
        if os.environ["RANK"] == "1" and number == 5 and not once.exists():
            once.touch()
            TROUBLE
        yield tuple(torch.randint(256, (batch_size, seq_len), generator=generator) for _ in range(2))
"""
KILLED_ONCE = ONCE.replace("TROUBLE", "os.kill(os.getpid(), signal.SIGKILL)")
HUNG_ONCE = ONCE.replace("TROUBLE", "Hangs().__enter__()")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a script that trains it, and a plan for two ranks."""
    made = tmp_path_factory.mktemp("job")
    (made / "model.py").write_text(MODEL)
    (made / "script.py").write_text(SCRIPT.replace("plan.yaml", str(made / "plan.yaml")))
    command = ("search", str(made / "model.py"), "--gpus", "2", "--gpu", "cpu", "--dp", "2")
    done = run(sys.executable, "-m", "autopar", *command, "-o", str(made / "plan.yaml"))
    assert done.returncode == 0, done.stderr
    assert Plan.load(made / "plan.yaml").num_ranks == 2
    return made


def torchrun(ranks: int, *command: str) -> tuple[int, str, str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = run(*launcher, *command)
    return done.returncode, done.stdout, done.stderr


def losses_of(out: str, *, resumed: bool = False) -> dict[int, str]:
    """The losses that are printed, by step. resumed: that of a step that a run goes on from as well."""
    lines = [line.split() for line in out.splitlines() if line[:4].strip().isdigit()]
    return {int(step): loss for step, loss, *more in lines if resumed or more != ["before"]}


def test_a_script_of_ones_own(folder: Path) -> None:
    code, _, err = torchrun(2, str(folder / "script.py"))
    assert code == 0, err
    said = [(folder / f"script.py.rank{rank}").read_text().split() for rank in range(2)]
    assert [line[:3] for line in said] == [["0", "of", "2"], ["1", "of", "2"]]
    assert said[0][-1] == said[1][-1]


def test_another_number_of_ranks_is_refused_on_every_rank(folder: Path) -> None:
    words = ("-m", "autopar", "train", str(folder / "model.py"), str(folder / "plan.yaml"), "--steps", "2")
    code, out, err = torchrun(3, *words)
    assert code
    assert err.count("PlanMismatch: the plan is for 2 ranks") == 1, err
    assert "this job has 3" in err
    assert "exitcode  : 2 " in err, err  # as torchrun says; it ends the ranks that have not left yet
    assert "loss" not in out


def test_torchrun_takes_no_option_of_train_for_one_of_its_own() -> None:
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    options = [name for one in command.commands["train"].params for name in one.opts if name.startswith("--")]
    assert {"--job", "--keep", "--save-every"} <= set(options)
    for option in options:
        words = ["-m", "autopar", "train", "model.py", "plan.yaml", option, "value"]
        found = get_args_parser().parse_args(["--nproc-per-node", "2", *words])  # ends the process if it cannot
        assert [found.training_script, *found.training_script_args] == words[1:]


@pytest.mark.slow
def test_the_same_command_starts_goes_on_and_says_that_it_is_done(folder: Path) -> None:
    words = (
        "-m",
        "autopar",
        "train",
        str(folder / "model.py"),
        str(folder / "plan.yaml"),
        "--job",
        str(folder / "run"),
    )
    said = []
    for steps in ("2", "4", "4"):
        code, out, err = torchrun(2, *words, "--steps", steps, "--keep", "2")
        assert code == 0, err
        said.append(list(losses_of(out)))
    assert said == [[1, 2], [3, 4], []]
    assert "nothing to do: 4 steps are done" in out


@pytest.mark.slow
def test_torchrun_starts_ranks_again_that_were_killed_in_a_store_that_it_keeps(folder: Path) -> None:
    (folder / "killed.py").write_text(MODEL + KILLED)
    losses = []
    for name, restarts in (("killed", "2"), ("undisturbed", "0")):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", restarts, *where)
        words = ("train", str(folder / "killed.py"), str(folder / "plan.yaml"), "--job", str(folder / name))
        done = run(sys.executable, *launcher, "-m", "autopar", *words, "--steps", "10", "--save-every", "2")
        assert done.returncode == 0, done.stderr
        losses.append(losses_of(done.stdout))
    assert losses[0] == losses[1] and len(losses[1]) == 10


def test_one_worker_supervises_the_ranks_of_all(folder: Path) -> None:
    (folder / "killed_once.py").write_text(MODEL + KILLED_ONCE)
    words = ("-m", "autopar", "train", str(folder / "killed_once.py"), str(folder / "plan.yaml"), "--steps", "8")
    code, out, err = torchrun(2, *words, "--keep-alive")
    assert code == 0, err
    losses = losses_of(out, resumed=True)
    assert list(losses) == list(range(1, 9))
    lines = [line for line in err.splitlines() if "rank" in line]
    assert "was killed by signal 9 (SIGKILL)" in lines[0] and lines[0].startswith("rank 1 on "), err
    assert re.search(r"going on from step [45], copied in memory, with the same plan", err), err
    code, again, err = torchrun(2, *words)
    assert code == 0, err
    assert losses_of(again) == losses


def test_a_rank_that_hangs_within_a_step_is_named_with_what_it_has_not_come_to(folder: Path) -> None:
    (folder / "hung_once.py").write_text(MODEL + HUNG_ONCE)
    words = ("train", str(folder / "hung_once.py"), str(folder / "plan.yaml"), "--steps", "8", "--timeout", "6")
    done = run(sys.executable, "-m", "autopar", *words, "--keep-alive")
    assert done.returncode == 0, done.stderr
    assert list(losses_of(done.stdout, resumed=True)) == list(range(1, 9))
    first, second, *_ = done.stderr.splitlines()
    assert re.match(r"rank 1 has not come to \w+ number \d+ of ranks 0, 1 \(.*\), where rank 0 waits", first), first
    assert re.search(r"hung_once.py:\d+ in __torch_dispatch__$", second), second


def test_ray_within_torchrun_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = TrainingJob(model=str(folder / "model.py"), plan=str(folder / "plan.yaml"), steps=1)
    with pytest.raises(InvalidInput, match="RANK and WORLD_SIZE say that this process is one already"):
        launch(job, ray="auto")
