"""A process that solves ahead changes nothing but the time that a search takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from autopar.helper import spare_cores
from autopar.ir.errors import InfeasiblePlan
from autopar.search.outer.best_first import Outer
from autopar.search.outer.speculation import Ahead, Job
from tests.search.test_outer import outer_of

pytestmark = pytest.mark.skipif(not spare_cores(), reason="one core, or processes cannot be forked here")


def _square(number: int) -> int:
    if number < 0:
        raise InfeasiblePlan("negative")
    return number * number


def _process(number: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def _killed(here: int) -> int:
    if os.getpid() != here:
        os._exit(1)
    return here


def _broken(here: int) -> int:
    if os.getpid() != here:
        raise RuntimeError("in the helper")
    return here


def _ill(number: int) -> int:
    raise RuntimeError("ill")


def _jobs(*numbers: int) -> list[Job]:
    return [(("square", number), (number,)) for number in numbers]


def test_answers_are_those_of_one_process() -> None:
    solver = Ahead(_square)
    with solver.help(), solver.expecting(lambda: _jobs(*range(20))):
        assert [solver.answer(*job) for job in _jobs(*range(20))] == [n * n for n in range(20)]
        assert solver.answer(*_jobs(30)[0]) == 900


def test_both_processes_work() -> None:
    solver = Ahead(_process)
    with solver.help(), solver.expecting(lambda: _jobs(*range(12))):
        found = [solver.answer(*job) for job in _jobs(*range(12))]
    assert len(set(found)) == 2
    assert 3 <= found.count(os.getpid()) <= 9


def test_what_has_no_answer_is_an_error_here() -> None:
    solver = Ahead(_square)
    with solver.help(), solver.expecting(lambda: _jobs(1, -1, 2)):
        assert solver.answer(*_jobs(1)[0]) == 1
        with pytest.raises(InfeasiblePlan, match="negative"):
            solver.answer(*_jobs(-1)[0])
        assert solver.answer(*_jobs(2)[0]) == 4


@pytest.mark.parametrize("solve", [_killed, _broken])
def test_a_helper_that_dies_is_not_missed(solve: Callable[[int], int]) -> None:
    solver = Ahead(solve)
    here = os.getpid()
    jobs: list[Job] = [(number, (here,)) for number in range(4)]
    with solver.help(), solver.expecting(lambda: jobs):
        assert [solver.answer(*job) for job in jobs] == [here] * 4


def test_what_is_solved_here_outlives_the_helper() -> None:
    calls = []

    def solve(here: int, number: int) -> int:
        if os.getpid() != here:
            time.sleep(0.2)
            os._exit(1)
        calls.append(number)
        return number

    solver = Ahead(solve)
    jobs: list[Job] = [(number, (os.getpid(), number)) for number in range(4)]
    with solver.help(), solver.expecting(lambda: jobs):
        assert [solver.answer(*job) for job in jobs] == [0, 1, 2, 3]
    # While the helper is at 1, 2 is solved here, and not again when the helper has died.
    assert sorted(calls) == [0, 1, 2, 3]


def test_an_error_that_nobody_expected_is_not_hidden() -> None:
    solver = Ahead(_ill)
    with solver.help(), solver.expecting(lambda: _jobs(1, 2)), pytest.raises(RuntimeError, match="ill"):
        solver.answer(*_jobs(1)[0])


@pytest.mark.parametrize("room", [1.2, 8.0])
def test_the_search_takes_the_same_steps(room: float) -> None:
    def steps(outer: Outer) -> tuple[object, ...]:
        best = outer.run()
        assert best is not None
        work = outer.solver.num_solved, outer.solver.work, outer.num_skipped
        return best.configuration, best.assignment, best.stages, best.step_time_s, outer.bound, work

    alone, helped = (outer_of((1024, 4096, 1024, 4096, 1024), 64, 16, room / 8, 8) for _ in range(2))
    with helped.solver.ahead.help():
        found = steps(helped)
    assert found == steps(alone)
