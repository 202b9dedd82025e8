"""Two hosts made of one: network namespaces joined by a virtual cable, each with an interface eth0."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.89.0.1", "10.89.0.2")


def obstacle() -> str | None:
    """Why this machine cannot make them, if so."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "ip and nsenter are not installed"
    name = f"autopar-probe-{os.getpid()}"
    made = subprocess.run(("ip", "netns", "add", name), capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(("ip", "netns", "del", name), check=True)
    return None


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, ...]]]:
    """For each host, the words before a command that is to run on it."""
    names = [f"autopar-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
        yield [("nsenter", f"--net=/run/netns/{name}") for name in names]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)
