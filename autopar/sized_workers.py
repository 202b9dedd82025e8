"""Searches at several sizes, shared out to this process and forks of it.

    this process   512, 32768   256, 32768   512, 16384   512, 12288 ...
    a fork         512, 1024    256, 1024    512, 8192    256, 8192  ...

A size is searched for once those are known that it begins with, by a worker that has searched at its length before, or
else by whoever is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from typing import Any

from autopar.helper import Helper
from autopar.ir.plan import Plan
from autopar.sized_captures import Size
from autopar.sized_searches import Found, SizedSearches

# A fork, or this process.
_Worker = Helper | None


class Workers:
    """This process and forks of it, which have what ``searches`` has until now."""

    def __init__(self, searches: SizedSearches, num_forks: int) -> None:
        self._searches = searches
        # What a fork does is not shown: it shares the terminal.
        unseen = replace(searches, progress=lambda doing, share=None: None)
        self._forks = [Helper(lambda name, *arguments: (getattr(unseen, name)(*arguments),)) for _ in range(num_forks)]
        self._owners: dict[int | None, _Worker] = {}

    def stop(self) -> None:
        """End the forks."""
        for fork in self._forks:
            fork.stop()

    def nearby(self, begins_with: Mapping[Size, Sequence[Size]], found: Mapping[Size, Found]) -> dict[Size, Found]:
        """``found``, and the best plan for every size of ``begins_with``, searched from the plans for those that it
        lists: the best few of two, the best one of more. The first sizes are searched for first."""
        jobs = _Jobs(depends_on=begins_with, found=dict(found), length_of=lambda size: size[1], owners=self._owners)

        def known(size: Size) -> tuple[Any, ...]:
            others = begins_with[size]
            most = None if len(others) < 3 else 1
            return size, tuple(known for other in others for known in jobs.found[other].known[:most])

        self._run("nearby", jobs, known)
        return jobs.found

    def times_s(self, plans: Sequence[Plan], lengths: Sequence[int | None]) -> dict[int | None, list[float]]:
        """By length, the seconds of a step of each plan; infinite where it does not fit."""
        depends_on = dict.fromkeys(lengths, ())
        jobs = _Jobs(depends_on=depends_on, found={}, length_of=lambda length: length, owners=self._owners, strict=True)
        self._run("times_s", jobs, lambda length: (plans, length))
        return jobs.found

    def captured(self) -> list[tuple[float, int]]:
        """Of each fork that there still is, the seconds spent on captures and how often the model was traced."""
        answers = (_asked(fork, "captured") for fork in self._forks)
        return [answer[0] for answer in answers if answer is not None]

    def _run(self, name: str, jobs: _Jobs, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
        """Run every job. This process runs those that a fork fails at, and raises their errors."""

        def beside(fork: Helper) -> None:
            while (job := jobs.take(fork)) is not None:
                answer = None
                try:
                    answer = _asked(fork, name, *arguments(job[0]))
                finally:
                    if answer is None:
                        jobs.give_up(job[0], fork)
                if answer is None:
                    return
                jobs.note(job[0], answer[0])

        for fork in self._forks:
            Thread(target=beside, args=(fork,), daemon=True).start()
        try:
            while (job := jobs.take(None)) is not None:
                jobs.note(job[0], getattr(self._searches, name)(*arguments(job[0])))
        finally:
            jobs.end()


@dataclass(kw_only=True)
class _Jobs:
    """Jobs of one kind, for threads that each have a worker.

    depends_on: by job, those whose results have to be there before. found: the results. owners: by length, the worker
    that was first to run a job of it. strict: only the owner runs a job.
    """

    depends_on: Mapping[Any, Sequence[Any]]
    found: dict[Any, Any]
    length_of: Callable[[Any], int | None]
    owners: dict[int | None, _Worker]
    strict: bool = False
    _changed: Condition = field(default_factory=Condition)

    def __post_init__(self) -> None:
        self._open = dict.fromkeys(self.depends_on)
        self._num = len(self.found) + len(self._open)

    def take(self, worker: _Worker) -> tuple[Any] | None:
        """A job, as soon as there is one for this worker; None if all are done."""
        with self._changed:
            while len(self.found) < self._num:
                ready = [job for job in self._open if all(other in self.found for other in self.depends_on[job])]
                best = min(ready, key=lambda job: self._rank(job, worker), default=None)
                if ready and not (self.strict and self._rank(best, worker) == 2):
                    del self._open[best]
                    self.owners.setdefault(self.length_of(best), worker)
                    return (best,)
                self._changed.wait()
        return None

    def _rank(self, job: Any, worker: _Worker) -> int:
        length = self.length_of(job)
        if length not in self.owners:
            return 1
        return 0 if self.owners[length] is worker else 2

    def note(self, job: Any, result: Any) -> None:
        """Note the result of a job."""
        with self._changed:
            self.found[job] = result
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait for a job any more."""
        with self._changed:
            self._num = 0
            self._changed.notify_all()

    def give_up(self, job: Any, worker: _Worker) -> None:
        """Leave a job, and the lengths that this worker owns, to this process."""
        with self._changed:
            self._open[job] = None
            self.owners.update({length: None for length, own in self.owners.items() if own is worker})
            self._changed.notify_all()


def _asked(fork: Helper, name: str, *arguments: Any) -> tuple[Any] | None:
    """The answer of a fork; None where it has failed or has ended."""
    try:
        fork.send(name, *arguments)
        answer: tuple[Any] | None = fork.receive()
    except (EOFError, OSError):
        return None
    return answer
