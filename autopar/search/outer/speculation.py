"""A second process that solves inner problems before the search asks for them.

    search    solves A         completes A, has B    solves D    completes B, has C ...
    helper    solves B, which is expected next       solves C    solves E

Where the search needs an answer that the helper is still computing, the search solves the job expected after it. The
search lists the jobs it expects to need, the next first (``expecting``). The helper is a fork of the search, so it has
everything that an answer depends on, and its answers equal those of the search: with the helper or without it the
search takes the same steps to the same plan.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from autopar.ir.errors import AutoparError

# What is solved, by a key that is equal for equal problems.
Job = tuple[Hashable, tuple[Any, ...]]


@dataclass(slots=True)
class Ahead:
    """Solves jobs with ``solve``, here or in the helper. Without a helper it solves only the jobs that it is asked for.

    solve_ahead: the function of the helper, if that computes more than ``solve``.
    """

    solve: Callable[..., Any]
    solve_ahead: Callable[..., Any] | None = None
    _expected: list[Callable[[], Iterable[Job]]] = field(default_factory=list)
    _answers: dict[Hashable, Any] = field(default_factory=dict)
    _asked: set[Hashable] = field(default_factory=set)
    _running: Hashable | None = None
    _helper: Connection | None = None
    _process: BaseProcess | None = None

    @contextmanager
    def help(self) -> Iterator[None]:
        """Have a helper within the context, if this process may be forked and there is a core for it."""
        if can_fork():
            self._helper, self._process = _fork(self.solve_ahead or self.solve)
        try:
            yield
        finally:
            self._stop()
            self._answers.clear()

    def _stop(self) -> None:
        if self._helper is not None and self._process is not None:
            self._helper.close()
            # At once: whoever reads what this command prints waits for all that may print to it.
            self._process.kill()
            self._process.join()
        self._helper = self._process = self._running = None

    @contextmanager
    def expecting(self, jobs: Callable[[], Iterable[Job]]) -> Iterator[None]:
        """Within the context, ``jobs`` lists the jobs likely to be needed, the next first; before those of outer
        contexts."""
        self._expected.append(jobs)
        try:
            yield
        finally:
            self._expected.remove(jobs)

    def answer(self, key: Hashable, arguments: tuple[Any, ...]) -> Any:
        """``solve(*arguments)``. Each key is asked for once."""
        self._asked.add(key)
        self._receive(wait=False)
        if self._running == key:
            other = next(self._open(), None)
            if other is not None and not self._arrived():
                self._answers[other[0]] = _attempt(self.solve, other[1])
            self._receive(wait=True)
        self._send()
        found = self._answers.pop(key, None)
        # The helper has no answer where there is none, and the reason is an error here.
        return self.solve(*arguments) if found is None else found

    def _open(self) -> Iterator[Job]:
        """Expected jobs that nobody has solved or is solving."""
        for jobs in reversed(self._expected):
            for job in jobs():
                if job[0] not in self._asked and job[0] not in self._answers and job[0] != self._running:
                    yield job

    def _arrived(self) -> bool:
        return self._helper is not None and self._helper.poll()

    def _receive(self, *, wait: bool) -> None:
        if self._running is None or not (wait or self._arrived()):
            return
        assert self._helper is not None
        try:
            self._answers[self._running] = self._helper.recv()
            self._running = None
        except (EOFError, OSError):
            self._stop()

    def _send(self) -> None:
        if self._helper is None or self._running is not None:
            return
        job = next(self._open(), None)
        if job is not None:
            try:
                self._helper.send(job[1])
                self._running = job[0]
            except OSError:
                self._stop()


def can_fork() -> bool:
    """Whether a helper may be forked, and has a core. Threads of collectives would not be there in a fork."""
    if not hasattr(os, "fork") or not hasattr(os, "sched_getaffinity"):
        return False
    return len(os.sched_getaffinity(0)) > 1 and not (dist.is_available() and dist.is_initialized())


def _fork(solve: Callable[..., Any]) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(solve, there, here), daemon=True)
    with warnings.catch_warnings():
        # Threads that torch has for tensors are no matter to a process without any.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return here, process


def _serve(solve: Callable[..., Any], jobs: Connection, other_end: Connection) -> None:
    other_end.close()
    # The search answers an interrupt with the best plan so far.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            jobs.send(_attempt(solve, jobs.recv()))
        except (EOFError, OSError):
            return


def _attempt(solve: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The answer, or None where there is none. An error that is no answer ends the helper, or the search."""
    try:
        return solve(*arguments)
    except AutoparError:
        return None
