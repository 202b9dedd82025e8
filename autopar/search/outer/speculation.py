"""A second process that solves inner problems before the search asks for them.

    search    solves A         completes A, has B    solves D    completes B, has C ...
    helper    solves B, which is expected next       solves C    solves E

Where the search needs an answer that the helper is still computing, the search solves the job expected after it. The
search lists the jobs it expects to need, the next first (``expecting``). The helper is a fork of the search, so it has
everything that an answer depends on, and its answers equal those of the search: with the helper or without it the
search takes the same steps to the same plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.helper import Helper, answer_of, spare_cores

# Jobs that the helper has at once, so that it need not wait for the next one. Chosen: with 1 a search of Llama 3 8B
# takes 0.05 s longer, with 3 or 4 as long.
_AHEAD = 2

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
    _running: deque[Hashable] = field(default_factory=deque)
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
        self._helper = None
        self._running.clear()

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
        self._receive()
        while key in self._running:
            if not self._arrived() and (other := next(self._open(), None)) is not None:
                self._answers[other[0]] = answer_of(self.solve, other[1])
            else:
                self._receive(wait=True)
        self._send()
        found = self._answers.pop(key, None)
        # The helper has no answer where there is none, and the reason is an error here.
        return self.solve(*arguments) if found is None else found

    def _open(self) -> Iterator[Job]:
        """Expected jobs that nobody has solved or is solving."""
        for jobs in reversed(self._expected):
            for job in jobs():
                if job[0] not in self._asked and job[0] not in (*self._answers, *self._running):
                    yield job

    def _arrived(self) -> bool:
        return self._helper is not None and self._helper.has_answered()

    def _receive(self, *, wait: bool = False) -> None:
        """Take the answers that have arrived. wait: for one of them."""
        while self._helper is not None and self._running and (wait or self._arrived()):
            wait = False
            try:
                self._answers[self._running[0]] = self._helper.receive()
                self._running.popleft()
            except (EOFError, OSError):
                self._stop()

    def _send(self) -> None:
        while self._helper is not None and len(self._running) < _AHEAD:
            job = next(self._open(), None)
            if job is None:
                return
            try:
                self._helper.send(*job[1])
                self._running.append(job[0])
            except OSError:
                self._stop()
