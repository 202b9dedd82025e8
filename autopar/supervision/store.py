"""The store that supervisors and ranks meet at: that of the agent of torchrun, or one in a process of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported by name

_PATIENCE = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Address:
    """Of a store."""

    host: str
    port: int

    def connect(self, timeout: timedelta = _PATIENCE) -> TCPStore:
        """A client of it."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timeout)


class OwnStore:
    """A store on this host, in a process that ends with this one: a server has threads, and a supervisor forks."""

    def __init__(self) -> None:
        context = get_context("fork")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, os.getpid()), daemon=True)
        self._process.start()
        there.close()
        self.address = Address("127.0.0.1", here.recv())

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def of_torchrun() -> Address:
    """Where torchrun, or whatever sets the same environment, has ranks meet."""
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def serves_itself() -> bool:
    """Whether torchrun's agent has the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serve(pipe: Any, parent: int) -> None:
    from autopar.supervision.local_ranks import die_with

    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.close()
    while True:
        signal.pause()
