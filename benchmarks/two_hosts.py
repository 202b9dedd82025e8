"""Two hosts of two ranks each on one machine, and how much of it others take.

The hosts are network namespaces, joined by a virtual cable whose rate ``tc`` sets. A rank has an equal share of a core,
no less and no more, as if it had a device of its own. Needs root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOSTS, PER_HOST = 2, 2
RANKS = HOSTS * PER_HOST
# A token bucket sets the rate; it delays no packet by itself, which would take netem. What the bucket holds is sent at
# once after a pause: 16 kB are 1.3 ms at 100 Mbit/s.
NETWORKS = {"fast": None, "1gbit": "rate 1gbit", "100mbit": "rate 100mbit"}
CGROUP = Path("/sys/fs/cgroup/cpu/autopar-regret")
MOST_SHARES = 1 << 18
# Runs when the rank of its group does not.
STAND_IN = """
import os, signal
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    pass
"""
# Wakes every so many seconds, whereupon the core is the other group's turn: by itself it goes from one to the other
# at every tick of 4 ms, for which a message would have to wait.
TURN_S = 350e-6
TAKE_TURNS = """
import os, sys, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    time.sleep(float(sys.argv[1]))
"""
# Of memory that is given back and asked for again every page has to be cleared: a quarter of ZeRO-2's time on a core.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


def sh(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=not check)


@contextmanager
def hosts(network: str | None) -> Iterator[None]:
    """Two namespaces, ap0 at 10.88.0.1 and ap1 at 10.88.0.2. network: the rate of the cable each way."""
    try:
        sh("ip", "link", "del", "apv0", check=False)
        for number in range(HOSTS):
            sh("ip", "netns", "del", f"ap{number}", check=False)
            sh("ip", "netns", "add", f"ap{number}")
        sh("ip", "link", "add", "apv0", "type", "veth", "peer", "name", "apv1")
        for number in range(HOSTS):
            here = ("ip", "-n", f"ap{number}")
            sh("ip", "link", "set", f"apv{number}", "netns", f"ap{number}")
            sh(*here, "addr", "add", f"10.88.0.{number + 1}/24", "dev", f"apv{number}")
            sh(*here, "link", "set", f"apv{number}", "up")
            sh(*here, "link", "set", "lo", "up")
            if network:
                setting = (*network.split(), "burst", "16kb", "latency", "400ms")
                where = ("dev", f"apv{number}", "root", "tbf")
                sh("ip", "netns", "exec", f"ap{number}", "tc", "qdisc", "add", *where, *setting)
        yield
    finally:
        for number in range(HOSTS):
            sh("ip", "netns", "del", f"ap{number}", check=False)


@contextmanager
def shares() -> Iterator[None]:
    """A group for each rank, if this machine has the controller for it, that has its share of one core at all times.

    A limit to what a rank may use would not do: it lets a rank run faster after every pause. So a stand-in runs
    whenever the rank waits, and who shares the core with it never has more than their part.
    """
    if not CGROUP.parent.is_dir():
        print(f"no {CGROUP.parent}: ranks share the cores as they come", file=sys.stderr)
        yield
        return
    groups = [CGROUP / str(rank) for rank in range(RANKS)]
    for group in groups:
        group.mkdir(parents=True, exist_ok=True)
    (CGROUP / "cpu.shares").write_text(str(MOST_SHARES))
    started = []
    try:
        for rank, group in enumerate(groups):
            started.append(_on_core(_core(rank), sys.executable, "-c", STAND_IN))
            (group / "cgroup.procs").write_text(str(started[-1].pid))
        cores = range(os.cpu_count() or 1)
        started += [_on_core(core, sys.executable, "-c", TAKE_TURNS, str(TURN_S)) for core in cores]
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        for group in (*groups, CGROUP):
            group.rmdir()


def _on_core(core: int, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["taskset", "-c", str(core), *command], env=env)


def _core(rank: int) -> int:
    return rank % (os.cpu_count() or 1)


@contextmanager
def on_own_share(rank: int) -> Iterator[None]:
    """Within it this process has its rank's share of a core; outside, what is free."""
    if not CGROUP.parent.is_dir():
        yield
        return
    own = CGROUP / str(rank) / "cgroup.procs"
    stand_in = int(own.read_text())
    own.write_text(str(os.getpid()))
    os.kill(stand_in, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(stand_in, signal.SIGSTOP)
        (CGROUP.parent / "cgroup.procs").write_text(str(os.getpid()))


def run_ranks(script: str, job: Path, *, in_turns: bool = False) -> Any:
    """Start ``script --worker JOB`` on every rank, and return what rank 0 wrote beside ``job``.

    in_turns: hosts have ranks 0 and 2, and 1 and 3, so that the stages of a pipeline are on one host, and the axes
    inside a stage go over both.
    """
    processes = []
    for rank in range(RANKS):
        host, place = (rank % HOSTS, rank // HOSTS) if in_turns else divmod(rank, PER_HOST)
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(PER_HOST), "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": f"apv{host}", "OMP_NUM_THREADS": "1", **ALLOCATOR,
        }  # fmt: skip
        # Not "ip netns exec", which mounts a /sys without the groups of ``shares``.
        inside = ("nsenter", f"--net=/run/netns/ap{host}")
        processes.append(_on_core(_core(rank), *inside, sys.executable, script, "--worker", str(job), env=env))
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(job.with_suffix(".done.json").read_text())


def timed_step(parallel: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], losses: list[float]) -> float:
    """Seconds of a training step of all ranks; its loss is added to ``losses``."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = parallel.step(**inputs)
    optimizer.step()
    dist.barrier()
    took = time.perf_counter() - start
    losses.append(loss.item())
    return took


def seconds_in_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round but the first one, which warms up; every second round runs backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            took = steps[name]()
            if number:
                seconds[name].append(took)
        if dist.get_rank() == 0:
            print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def ticks() -> list[int]:
    """Of all cores together since they started: user, nice, system, idle, waiting, interrupts of two kinds, stolen."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def stolen(before: list[int], after: list[int]) -> float:
    """Share of the time that cores wanted to run in which others had them."""
    user, nice, system, _, _, hard, soft, steal = (b - a for a, b in zip(before, after, strict=True))
    return steal / max(1, user + nice + system + hard + soft + steal)
