"""The store that supervisors and ranks meet at: that of the agent of torchrun, or one in a process of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from autopar.ir.errors import LaunchError
from autopar.ir.fork import fork
from autopar.runtime.stores import TCPStore
from autopar.supervision.forked import die_with

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

    def __init__(self, port: int = 0) -> None:
        """port: 0 for any that is free."""
        reader, writer = os.pipe()
        parent = os.getpid()
        self._pid = fork()
        if self._pid == 0:
            os.close(reader)
            _serve(writer, parent, port)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        if not said:
            raise LaunchError(f"no store can be opened at port {port} of this host.\n  try: another --master-port")
        self.address = Address("127.0.0.1", int(said))

    def stop(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def of_torchrun() -> Address:
    """Where torchrun, or whatever sets the same environment, has ranks meet."""
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _serve(pipe: int, parent: int, port: int) -> NoReturn:
    die_with(parent, "autopar store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        os.write(pipe, str(store.port).encode())
        os.close(pipe)
        while True:
            signal.pause()
    finally:
        os._exit(1)
