"""One worker of a host supervises, the others end when it does, and without importing torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.launching.supervised import SupervisorPlace
from autopar.supervision.local_workers import awaited, is_to_wait

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
WAITS = """
import sys
from autopar.supervision.local_workers import wait_for_supervisor
print("waits", "torch" in sys.modules, flush=True)
wait_for_supervisor()
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The two other workers of a host, started."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))
    workers = [start() for _ in range(2)]
    yield workers
    for worker in workers:
        worker.kill()
        worker.communicate()


def start() -> subprocess.Popen[str]:
    worker = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline().split() == ["waits", "False"]
    return worker


def test_of_torchrun_one_worker_a_host_supervises() -> None:
    assert is_to_wait(TORCHRUN)
    assert not is_to_wait(TORCHRUN | {"LOCAL_RANK": "0"})
    assert not is_to_wait({})
    assert not is_to_wait({"RANK": "1", "WORLD_SIZE": "2"})


def test_a_supervisor_has_the_ranks_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert SupervisorPlace.of(os.environ) == SupervisorPlace(index=0, count=1, slots=None, workers=0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert SupervisorPlace.of(os.environ) == SupervisorPlace(index=5, count=8, slots=1, workers=0)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert SupervisorPlace.of(os.environ) == SupervisorPlace(index=1, count=2, slots=4, workers=3)


def test_workers_end_well_when_the_supervisor_has(host: list[subprocess.Popen[str]]) -> None:
    with awaited(len(host)) as tell_workers:
        time.sleep(0.5)
        assert [worker.poll() for worker in host] == [None, None]
        tell_workers()
    assert [worker.wait(10) for worker in host] == [0, 0]


def test_a_worker_that_comes_late_hears_it_too(host: list[subprocess.Popen[str]]) -> None:
    with awaited(len(host) + 1) as tell_workers:
        host.append(start())
        tell_workers()
    assert [worker.wait(10) for worker in host] == [0, 0, 0]


def test_workers_leave_the_end_of_a_supervisor_that_fails_to_the_launcher(host: list[subprocess.Popen[str]]) -> None:
    with awaited(len(host)):
        time.sleep(0.5)
    time.sleep(0.5)
    assert [worker.poll() for worker in host] == [None, None]
    for worker in host:
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(10) for worker in host] == [143, 143]


def test_a_notice_is_the_supervisors_which_may_be_saving(host: list[subprocess.Popen[str]]) -> None:
    with awaited(len(host)):
        time.sleep(0.5)
        for worker in host:
            worker.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        assert [worker.poll() for worker in host] == [None, None]
    assert [worker.wait(10) for worker in host] == [138, 138]


def test_without_a_supervisor_a_worker_leaves_when_it_is_asked(host: list[subprocess.Popen[str]]) -> None:
    host[0].send_signal(signal.SIGTERM)
    assert host[0].wait(10) == 143


def test_what_a_killed_supervisor_has_left_is_in_nobodys_way(host: list[subprocess.Popen[str]]) -> None:
    code = (
        "import os, signal, time\nfrom autopar.supervision.local_workers import awaited\n"
        "with awaited(2):\n    time.sleep(2)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    host += [start(), start()]
    with awaited(2) as tell_workers:
        tell_workers()
    assert [worker.wait(10) for worker in host[2:]] == [0, 0]
