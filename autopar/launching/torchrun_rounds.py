"""Rounds of torchrun's rendezvous: a host that comes back is told where the store of the ranks is.

Agents of torchrun meet in rounds, another one each time that one of them comes. The agent of the first host has a store
for the ranks, and writes its address for the others in the first round alone: torch 2.13 remembers that it has. In the
next round the agent that has come waits for the address for a minute; then both of them end, and the job with them. The
address stays what it is, so the first supervisor writes it for the rounds to come.

    torch.rendezvous.RUN.ROUND/MASTER_ADDR, MASTER_PORT        in the store at --rdzv-endpoint
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from autopar.runtime.stores import DistError, PrefixStore, TCPStore

# More than hosts come back while a job runs; each takes two short messages to a store on this host.
_ROUNDS = 256
_PATIENCE = timedelta(seconds=10)
_DEFAULT_PORT = 29400


def announce(environment: Mapping[str, str]) -> None:
    """Write the address of the ranks' store for the rounds to come, if this is on the host of the agent that has it."""
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("GROUP_RANK") == "0"
    found = endpoint(environment, _command(os.getppid())) if shares else None
    if found is None:
        return
    with suppress(DistError):  # it is not there: no host can come back
        store = TCPStore(*found, is_master=False, timeout=_PATIENCE)
        for number in range(1, _ROUNDS):
            own = PrefixStore(f"torch.rendezvous.{environment['TORCHELASTIC_RUN_ID']}.{number}", store)
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                own.set(name, environment[name])


def endpoint(environment: Mapping[str, str], command: Sequence[str]) -> tuple[str, int] | None:
    """Where agents meet, of an agent that was started by ``command``; None if not at a c10d store of a known port."""
    options = {name: _option(environment, command, name) for name in ("rdzv-backend", "rdzv-endpoint")}
    host, _, port = options["rdzv-endpoint"].rpartition(":")
    if not host:
        host, port = port, str(_DEFAULT_PORT)
    if options["rdzv-backend"] != "c10d" or not host or not port.isdecimal() or port == "0":
        return None
    return host.strip("[]"), int(port)


def _option(environment: Mapping[str, str], command: Sequence[str], name: str) -> str:
    """Of torchrun: on its command line, else from its environment."""
    spelt = (f"--{name}", f"--{name.replace('-', '_')}")
    for word, after in zip(command, (*command[1:], ""), strict=False):
        key, _, value = word.partition("=")
        if key in spelt:
            return value or after
    return environment.get(f"PET_{name.upper().replace('-', '_')}", "")


def _command(pid: int) -> list[str]:
    """The command line of a process; [] where the system does not say."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
