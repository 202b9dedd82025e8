"""The README's example trains to the same losses however its ranks are started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.launching.hosts import ADDRESSES, obstacle, two_hosts
from tests.launching.plans import ROOT, environ, run

pytestmark = pytest.mark.slow
PYTHON, TORCHRUN = (sys.executable, "-m"), (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``autopar train`` of examples/gpt.py under a plan for two nodes of two ranks."""
    plan = str(tmp_path_factory.mktemp("plan") / "plan.yaml")
    model = str(ROOT / "examples" / "gpt.py")
    cluster = ("--gpus", "4", "--gpu", "cpu", "--gpus-per-node", "2")
    done = run(*PYTHON, "autopar", "search", model, *cluster, "--pp", "2", "--dp", "2", "-o", plan)
    assert done.returncode == 0, done.stderr
    return ["autopar", "train", model, plan, "--steps", "5", "--data", "stdlib", "--json"]


@pytest.fixture(scope="module")
def alone(command: list[str]) -> list[float]:
    found = losses(run(*PYTHON, *command, "--compare-single"))
    assert len(found) == 5 and found[-1] < found[0]
    return found


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    assert found["num_ranks"] == 4 and found["tokens_per_s"] > 0 and found.get("agrees", True)
    own: list[float] = found["losses"]
    return own


def test_under_torchrun(command: list[str], alone: list[float]) -> None:
    done = run(*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", *command)
    assert losses(done) == pytest.approx(alone, rel=1e-6)


def test_under_torchrun_on_two_hosts(command: list[str], alone: list[float]) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    with two_hosts() as hosts:
        started = [
            subprocess.Popen(
                [*host, *TORCHRUN, *_of_two(node), "-m", *command, "--network-interface", "eth0", "--timeout", "1800"],
                env=environ(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for node, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            outputs = [process.communicate() for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], [err for _, err in outputs]
    assert outputs[1][0] == ""
    first = subprocess.CompletedProcess([], 0, *outputs[0])
    assert losses(first) == pytest.approx(alone, rel=1e-6)


def _of_two(node: int) -> Sequence[str]:
    meeting = ("--master-addr", ADDRESSES[0], "--master-port", "29600")
    return ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", *meeting)


def test_on_ray(command: list[str], alone: list[float]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    assert losses(run(*PYTHON, *command, "--ray", "local")) == pytest.approx(alone, rel=1e-6)


def test_a_cluster_that_is_not_there_is_named(command: list[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        done = run(*PYTHON, *command, "--ray", address)
    assert done.returncode == 2
    assert f"LaunchError: no Ray cluster answers at {address}" in done.stderr
