"""A second process that solves inner problems before the search asks for them.

    search    solves A         completes A, has B    solves D    completes B, has C ...
    helper    solves B, which is expected next       solves C    solves E

Where the search needs an answer that the helper is still computing, the search solves the job expected after it. The
search lists the jobs it expects to need, the next first (``expecting``). The helper is a fork of the search, so it has
everything that an answer depends on, and its answers equal those of the search: with the helper or without it the
search takes the same steps to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.helper import Helper, answer_of, spare_cores

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
    _helper: Helper | None = None

    @contextmanager
    def help(self) -> Iterator[None]:
        """Have a helper within the context, if this process may be forked and there is a core for it."""
        if spare_cores():
            self._helper = Helper(self.solve_ahead or self.solve)
        try:
            yield
        finally:
            self._stop()
            self._answers.clear()

    def _stop(self) -> None:
        if self._helper is not None:
            self._helper.stop()
        self._helper = self._running = None

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
            while not self._arrived() and (other := next(self._open(), None)) is not None:
                self._answers[other[0]] = answer_of(self.solve, other[1])
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
        return self._helper is not None and self._helper.has_answered()

    def _receive(self, *, wait: bool) -> None:
        if self._running is None or not (wait or self._arrived()):
            return
        assert self._helper is not None
        try:
            self._answers[self._running] = self._helper.receive()
            self._running = None
        except (EOFError, OSError):
            self._stop()

    def _send(self) -> None:
        if self._helper is None or self._running is not None:
            return
        job = next(self._open(), None)
        if job is not None:
            try:
                self._helper.send(*job[1])
                self._running = job[0]
            except OSError:
                self._stop()
