"""Two hosts of two ranks each on one machine, and how much of it others take.

The hosts are network namespaces, joined by a virtual cable whose rate ``tc`` sets. A rank may use an equal share of the
cores and no more, as if it had a device of its own. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOSTS, PER_HOST = 2, 2
RANKS = HOSTS * PER_HOST
# A token bucket sets the rate; it delays no packet by itself, which would take netem. What the bucket holds is sent at
# once after a pause: 16 kB are 1.3 ms at 100 Mbit/s.
NETWORKS = {"fast": None, "1gbit": "rate 1gbit", "100mbit": "rate 100mbit"}
CGROUP = Path("/sys/fs/cgroup/cpu/autopar-regret")
PERIOD_US, MOST_SHARES = 5000, 1 << 18
# Of the cores, for the ranks together: with less than all, none of them waits for another's time to end.
USED = 0.8


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
    """A share of the cores for each rank, before any other process, if this machine has the controller for it."""
    if not CGROUP.parent.is_dir():
        print(f"no {CGROUP.parent}: ranks share the cores as they come", file=sys.stderr)
        yield
        return
    quota = int(PERIOD_US * USED * (os.cpu_count() or 1) / RANKS)
    groups = [CGROUP / str(rank) for rank in range(RANKS)]
    for group in groups:
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    (CGROUP / "cpu.shares").write_text(str(MOST_SHARES))
    try:
        yield
    finally:
        for group in (*groups, CGROUP):
            group.rmdir()


@contextmanager
def awake() -> Iterator[None]:
    """A process on each core that runs when nothing else would."""
    spin = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def on_own_share(rank: int) -> Iterator[None]:
    """Within it this process has its rank's share of the cores; outside, what is free."""
    if not CGROUP.parent.is_dir():
        yield
        return
    (CGROUP / str(rank) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (CGROUP.parent / "cgroup.procs").write_text(str(os.getpid()))


def run_ranks(script: str, job: Path) -> Any:
    """Start ``script --worker JOB`` on every rank, and return what rank 0 wrote beside ``job``."""
    processes = []
    for rank in range(RANKS):
        host = rank // PER_HOST
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank % PER_HOST),
            "LOCAL_WORLD_SIZE": str(PER_HOST), "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": f"apv{host}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        # Not "ip netns exec", which mounts a /sys without the groups of ``shares``.
        command = ["nsenter", f"--net=/run/netns/ap{host}", sys.executable, script, "--worker", str(job)]
        processes.append(subprocess.Popen(command, env=env))
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(job.with_suffix(".done.json").read_text())


def ticks() -> list[int]:
    """Of all cores together since they started: user, nice, system, idle, waiting, interrupts of two kinds, stolen."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def stolen(before: list[int], after: list[int]) -> float:
    """Share of the time that cores wanted to run in which others had them."""
    user, nice, system, _, _, hard, soft, steal = (b - a for a, b in zip(before, after, strict=True))
    return steal / max(1, user + nice + system + hard + soft + steal)
