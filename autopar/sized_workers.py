"""Workers for searches at several sizes: this process, and forks of it that have lengths of their own.

worker.ask("in_full", size)    a fork begins at once, this process when it is asked for its answers
worker.answers()               in the order in which they were asked for
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.helper import Helper
from autopar.sized_searches import SizedSearches


class Worker:
    """Whoever runs searches: this process, or a fork of it with searches of its own.

    Jobs are asked for by name, and answered in order. A fork that ends or fails is replaced by this process, where an
    error is raised.
    """

    def __init__(self, searches: SizedSearches, *, fork: bool) -> None:
        # What a fork does is not shown: it shares the terminal.
        self._searches = replace(searches, progress=_unseen) if fork else searches
        self._asked: list[tuple[str, tuple[Any, ...]]] = []
        self._helper = Helper(self._work) if fork else None

    @property
    def is_fork(self) -> bool:
        """Whether a fork does the work, and not this process."""
        return self._helper is not None

    def ask(self, name: str, *arguments: Any) -> None:
        """Have the method ``name`` of the searches called."""
        self._asked.append((name, arguments))
        if self._helper is not None:
            try:
                self._helper.send(name, arguments)
            except OSError:
                self.stop()

    def answers(self) -> list[Any]:
        """The answers to all that was asked since the last call."""
        asked, self._asked = self._asked, []
        return [self._answer(name, arguments) for name, arguments in asked]

    def stop(self) -> None:
        """End the fork, if this is one."""
        if self._helper is not None:
            self._helper.stop()
        self._helper = None

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self._helper is not None:
            try:
                found = self._helper.receive()
            except (EOFError, OSError):
                found = None
            if found is not None:
                return found[0]
            self.stop()
        return self._work(name, arguments)[0]

    def _work(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any]:
        return (getattr(self._searches, name)(*arguments),)


def _unseen(doing: str, share: float | None = None) -> None:
    """Progress that nobody sees."""
