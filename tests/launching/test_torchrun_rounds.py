"""A host that comes back finds the store of the ranks, and the job goes on with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.launching.torchrun_rounds import endpoint


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (["torchrun", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29401"], {}, ("node1", 29401)),
        (["torchrun", "--rdzv_backend=c10d", "--rdzv_endpoint=node1", "-m", "x"], {}, ("node1", 29400)),
        (["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:5"], {}, ("::1", 5)),
        (["torchrun"], {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "10.0.0.1:77"}, ("10.0.0.1", 77)),
        (["torchrun", "--standalone"], {}, None),
        (["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], {}, None),
        (["torchrun", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=node1:2379"], {}, None),
        ([], {}, None),
    ],
)
def test_where_agents_meet(command: list[str], environment: dict[str, str], expected: tuple[str, int] | None) -> None:
    assert endpoint(environment, command) == expected


WORKER = """
import os
import sys
import time
from pathlib import Path

from autopar.launching.torchrun_rounds import announce

announce(os.environ)
name = f"{os.environ['GROUP_RANK']} of {os.environ['WORLD_SIZE']}"
with open(sys.argv[1], "a") as file:
    file.write(name + chr(10))
time.sleep(300)
"""


def test_an_agent_that_comes_back_joins_the_first(tmp_path: Path) -> None:
    """Without it both agents end after a minute (torch 2.13)."""
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = tmp_path / "lines"

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
            "--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job",
            "--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=4", "--local-addr", "localhost",
            "--monitor-interval", "0.2", "worker.py", str(lines),
        ]  # fmt: skip
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=tmp_path, stdout=quiet, stderr=quiet, start_new_session=True)

    def wait(done: Callable[[list[str]], bool]) -> None:
        until = time.monotonic() + 120
        while not done(lines.read_text().split("\n") if lines.exists() else []):
            assert time.monotonic() < until, "the agents have not met"
            assert agents[0].poll() is None, "the first agent has ended"
            time.sleep(0.1)

    agents = [start(0), start(1)]
    try:
        wait(lambda said: said.count("0 of 2") == said.count("1 of 2") == 1)
        os.killpg(agents[1].pid, signal.SIGKILL)
        agents[1].wait()
        agents.append(start(1))
        wait(lambda said: said.count("0 of 2") == said.count("1 of 2") == 2)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
