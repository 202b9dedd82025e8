"""A process beside this one that works on what it is sent: a fork, so it has everything that this process has.

helper = Helper(work)       here: send(a) -> ... own work ... -> receive()
                            helper:          work(a) ------------^
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError


class Helper:
    """A fork of this process that answers with ``work`` of the arguments that it is sent, in their order."""

    # Of this process.
    num_running = 0

    def __init__(self, work: Callable[..., Any]) -> None:
        context = get_context("fork")
        self._connection, there = context.Pipe()
        self._process: BaseProcess | None = context.Process(
            target=_serve, args=(work, there, self._connection), daemon=True
        )
        with warnings.catch_warnings():
            # Threads that torch has for tensors are no matter to a process without any.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        there.close()
        Helper.num_running += 1

    @property
    def pid(self) -> int | None:
        """Of its process; None once it is stopped."""
        return self._process.pid if self._process is not None else None

    def send(self, *arguments: Any) -> None:
        """Have it work on ``arguments``. Raises OSError where it has ended."""
        self._connection.send(arguments)

    def has_answered(self) -> bool:
        """Whether ``receive`` has not to wait."""
        return self._connection.poll()

    def receive(self) -> Any:
        """The oldest answer not received yet; None where the work raised AutoparError. Raises EOFError or OSError where
        it has ended."""
        return self._connection.recv()

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._connection.close()
            # Killed, as whoever reads what this command prints waits for all that may print to it; the next helper, or
            # the end of this process, reaps it. To give its memory back takes a kernel 13 ms, on that helper's core.
            self._process.kill()
            self._process = None
            Helper.num_running -= 1


def spare_cores() -> int:
    """How many helpers may be forked for which there is a core. Threads of collectives would not be there in a fork."""
    if not hasattr(os, "fork") or not hasattr(os, "sched_getaffinity") or current_process().daemon:
        return 0
    if dist.is_available() and dist.is_initialized():
        return 0
    return max(0, len(os.sched_getaffinity(0)) - 1 - Helper.num_running)


def answer_of(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The answer, or None where there is none. An error that is no answer is raised."""
    try:
        return work(*arguments)
    except AutoparError:
        return None


def _serve(work: Callable[..., Any], jobs: Connection, other_end: Connection) -> None:
    other_end.close()
    # A fork has none of the threads that torch has started, and would wait for them.
    torch.set_num_threads(1)
    # The process that asks answers an interrupt with what it has so far.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            jobs.send(answer_of(work, jobs.recv()))
        except (EOFError, OSError):
            return
