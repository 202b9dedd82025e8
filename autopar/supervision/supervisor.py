"""A supervisor starts the ranks of its host, watches them, and starts them again, with all others, after a failure.

    round 1   meet: facts -> decision     ranks run: generation 1      rank 3 is killed: stop, all ranks are ended
    round 2   meet: copies of step 41     ranks run: generation 2      ...                                   done

Ranks are forked, so that a start takes no imports. Nothing of a failed generation is kept but the copies of its state:
whatever the failure was, what comes after it is a start like any other.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.ir.errors import LaunchError
from autopar.ir.plan import Plan
from autopar.runtime.checkpoint.folder import newest_step
from autopar.runtime.copies.copier import CopyPlaces
from autopar.runtime.copies.places import copies_in
from autopar.runtime.stores import DistError
from autopar.supervision.decision import Decision, Facts, decide, next_generation
from autopar.supervision.fewer import FewerRanks
from autopar.supervision.goodput_meter import GoodputMeter
from autopar.supervision.hosts import claim, copies_folder, host_name, identity_of
from autopar.supervision.local_ranks import LocalRanks
from autopar.supervision.progress import Progress
from autopar.supervision.rank_exit import RankExit
from autopar.supervision.rendezvous import POLL_S, Rendezvous
from autopar.supervision.store import Address
from autopar.supervision.stragglers import Straggler, Stragglers
from autopar.supervision.who_waits import WhoWaits
from autopar.training.job import OpenedJob
from autopar.training.notice import LEFT, SAME_NOTICE_S
from autopar.training.place import Place
from autopar.training.rank import BAD_INPUT, DIFFERS, LOST_OTHERS, run_place
from autopar.training.warm import Warm
from autopar.units import seconds

# What others know, after a failure: they have ranks to end first.
_FACTS_S = 20.0
# Ranks that fail because another one has: how long to wait for the supervisor that knows of that.
_CONSEQUENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """slots: ranks that this supervisor can run. threads: that each computes with. failures: in a row without a step in
    between, after which the job ends. say: takes a line for the user."""

    slots: int
    threads: int
    failures: int
    say: Callable[[str], object]


class Supervisor:
    """One of the supervisors of a job."""

    def __init__(self, opened: OpenedJob, address: Address, rendezvous: Rendezvous, given: Supervision) -> None:
        self._opened, self._address, self._rendezvous, self._given = opened, address, rendezvous, given
        self.host = host_name()
        own = opened.job.job
        self.folder = copies_folder(rendezvous.job if own is None else identity_of(Path(own)))
        claim(self.folder, lasting=own is not None)
        timeout = opened.job.environment.timeout_s
        self._ranks = LocalRanks(self.host, None if timeout is None else 1.5 * timeout)
        self._fewer, self._warm = FewerRanks(opened), Warm(opened)
        self._before: dict[int, tuple[int, ...]] = {}
        self._asked, self._asked_at = 0, 0.0
        self._places = list(range(given.slots))
        self._named: set[tuple[str, int]] = set()

    def run(self) -> int:
        """Until the job is done or cannot go on; the exit code. Raises AutoparError if it cannot."""
        for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(one, self._notice)
        self._rendezvous.beat()
        number = self._rendezvous.open_round(f"{_CONTINUES} supervisor {self._rendezvous.index} was started again")
        in_a_row, safe, cause = 0, -1, ""
        before: Decision | None = None
        meter = GoodputMeter()
        try:
            while True:
                decision = self._rendezvous.meet(number, self._facts(), partial(self._decide, number), _FACTS_S)
                if decision is None:  # this one was taken for lost: it comes to the next round
                    self._wait_for_stop(number)
                    number += 1
                    continue
                if self._rendezvous.leads:
                    self._tell(decision, before, cause)
                before = decision
                if self._asked:  # before there are ranks that could save anything
                    self._rendezvous.stop(number, f"{_FINAL}-{128 + self._asked} was asked to leave")
                    return 128 + self._asked
                self._start(decision)
                meter.decided()
                found = self._watch(number, decision)
                stands, stopped = self._ranks.last_progress(), time.monotonic()
                self._ranks.end()
                share = decision.world_size / self._opened.plan.num_ranks
                meter.ran(stands, stopped, share, done=found == 0)
                if isinstance(found, int):
                    if self._rendezvous.leads:
                        self._given.say(str(meter))
                    if found == 0 or self._opened.job.job is None:
                        shutil.rmtree(self.folder, ignore_errors=True)
                    return found
                self._before = decision.ranks
                self._leave_out(number, decision)
                now = max((copy.step for copy in copies_in(self.folder)), default=0)
                in_a_row = in_a_row + 1 if now <= safe else 1
                cause, safe = found, now
                if in_a_row > self._given.failures:
                    self._given.say(f"{cause}\n  it is the failure number {in_a_row} without a step in between")
                    return 1
                number += 1
        except DistError as error:
            raise LaunchError(
                f"the store that supervisors meet at is gone: {str(error).splitlines()[0]}\n"
                "  expected: the host of the first supervisor; the same command goes on from the copies that are left"
            ) from error
        finally:
            self._ranks.end()
            self._fewer.stop()
            self._rendezvous.close()

    def _facts(self) -> Facts:
        copies = tuple(
            (copy.step, copy.generation, copy.rank, copy.world_size, copy.rest) for copy in copies_in(self.folder)
        )
        return Facts(
            index=self._rendezvous.index,
            host=self.host,
            slots=len(self._places),
            copies=copies,
            on_disk=None if self._opened.job.job is None else newest_step(Path(self._opened.job.job)),
        )

    def _decide(self, number: int, facts: Sequence[Facts]) -> Decision:
        wanted = self._opened.plan.num_ranks, self._opened.plan.to_yaml()
        generation = next_generation(facts, number, self._rendezvous.generation_before(number))
        return decide(facts, generation, wanted, self._before, self._fewer.plan)

    def _start(self, decision: Decision) -> None:
        own = decision.ranks[self._rendezvous.index]
        size = len(own)

        def body(rank: int, place: int, progress: Progress) -> int:
            torch.set_num_threads(self._given.threads)
            # Under torchrun there are other supervisors on this host, whose ranks have devices of their own.
            first, all_here = (int(os.environ.get(f"LOCAL_{name}", "0")) for name in ("RANK", "WORLD_SIZE"))
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(decision.world_size),
                LOCAL_RANK=str(first + self._places[place]),
                LOCAL_WORLD_SIZE=str(max(size, all_here)),
            )
            return run_place(
                self._opened,
                Place(
                    rank=rank,
                    world_size=decision.world_size,
                    store=(self._address.host, self._address.port),
                    prefix=f"autopar/{self._rendezvous.job}/g{decision.generation}",
                    plan=decision.plan,
                    copies=CopyPlaces(self.folder, self.host, decision.generation),
                    source=(decision.source.kind, decision.source.step, decision.source.generation),
                    progress=progress,
                ),
                self._warm,
            )

        if not torch.cuda.device_count():  # a backward in this process would keep forks from running any on a GPU
            self._warm.prepare(decision.plan)

        self._ranks.start(own, body)
        if self._rendezvous.leads:
            slots = self._given.slots if self._rendezvous.size > 1 else 0
            fewer = [1] if self._opened.job.exclude_stragglers else []
            self._fewer.ahead(decision.world_size - less for less in dict.fromkeys([*fewer, slots]) if less)

    def _watch(self, number: int, decision: Decision) -> int | str:
        """The exit code, once the job is over, or the cause of a failure after which it goes on."""
        rendezvous, finished = self._rendezvous, not self._ranks.running
        members = sum(bool(ranks) for ranks in decision.ranks.values())
        stragglers = Stragglers(
            rendezvous.store, number, rendezvous.index, decision, self._ranks, _that_do_the_same(decision)
        )
        waits = WhoWaits(rendezvous.store, number, rendezvous.index, decision, self._ranks)
        consequence: tuple[float, RankExit] | None = None
        while True:
            rendezvous.look()
            if (cause := rendezvous.stopped(number)) is not None:
                return _verdict(cause)
            waits.look()
            ended = self._ranks.ended()
            for ending in ended:
                if ending.code == 0:
                    continue
                if ending.code == LOST_OTHERS:
                    consequence = consequence or (time.monotonic(), ending)
                    continue
                rendezvous.stop(number, f"{self._kind(ending)} {_cause(ending, waits)}")
            if consequence is not None and time.monotonic() - consequence[0] > _CONSEQUENCE_S:
                rendezvous.stop(number, f"{_CONTINUES} {_cause(consequence[1], waits)}")
            if not finished and not self._ranks.running and consequence is None:
                finished = True
                if all(ending.code == 0 for ending in ended):
                    rendezvous.done(number)
            if finished and rendezvous.num_done(number) == members:
                return 0
            if rendezvous.leads and (lost := set(decision.ranks) - set(rendezvous.there)):
                rendezvous.stop(number, f"{_CONTINUES} no word from supervisor {', '.join(map(str, sorted(lost)))}")
            if rendezvous.leads and set(rendezvous.there) - set(decision.ranks):
                rendezvous.stop(number, f"{_CONTINUES} supervisors have come back")
            for one in stragglers.look():
                self._found(one, number, decision)
            self._fewer.collect()
            time.sleep(POLL_S)

    def _kind(self, ending: RankExit) -> str:
        """Whether the job goes on after the end of a rank, and with which exit code if it does not."""
        early = ending.code in LEFT and bool(self._asked)  # asked to leave before it listened
        own = ending.left and ending.code in (DIFFERS, BAD_INPUT, *LEFT)
        return f"{_FINAL}-{ending.code}" if own or early else _CONTINUES

    def _found(self, one: Straggler, number: int, decision: Decision) -> None:
        """Name a slow rank, once, or go on without it."""
        new = (one.host, one.rank) not in self._named
        self._named.add((one.host, one.rank))
        if not self._opened.job.exclude_stragglers:
            if new:
                self._given.say(str(one))
        elif self._rendezvous.stopped(number) is not None:
            return
        elif decision.spare or self._fewer.plan(decision.world_size - 1) is not None:
            self._rendezvous.exclude(number, one.index, one.rank)
            self._rendezvous.stop(number, f"{_CONTINUES} {one}: it is excluded")
        elif new:
            self._given.say(f"{one}\n  it is not excluded, since there is no plan for fewer ranks")

    def _leave_out(self, number: int, decision: Decision) -> None:
        rank = self._rendezvous.excluded(number)
        if rank is not None:
            self._places.pop(decision.ranks[self._rendezvous.index].index(rank))

    def _wait_for_stop(self, number: int) -> None:
        while self._rendezvous.stopped(number) is None:
            self._rendezvous.look()
            time.sleep(POLL_S)

    def _notice(self, number: int, frame: Any) -> None:
        """The first signal is passed on, and ranks save and leave; the second ends everything."""
        again = self._asked and time.monotonic() - self._asked_at > SAME_NOTICE_S
        if again or number == signal.SIGINT:
            self._ranks.end()
            os._exit(128 + number)
        if not self._asked:
            self._asked, self._asked_at = number, time.monotonic()
            self._ranks.signal(number)

    def _tell(self, decision: Decision, before: Decision | None, cause: str) -> None:
        """Why, and how it goes on: the first that a user reads of it."""
        gone = {} if before is None else {i: ranks for i, ranks in before.ranks.items() if i not in decision.ranks}
        if before is not None and gone:
            hosts = ", ".join(dict.fromkeys(before.hosts[index] for index in gone))
            ranks = ", ".join(str(rank) for own in gone.values() for rank in own)
            cause = f"{hosts} does not answer, which has rank {ranks}"
        source = {
            "start": "from the start",
            "copies": f"from step {decision.source.step}, copied in memory",
            "disk": f"from step {decision.source.step}, the checkpoint",
        }[decision.source.kind]
        if not cause and decision.source.kind == "start":
            return
        searched_s = self._fewer.searched_s
        when = f"searched for in {seconds(searched_s)}" if searched_s else "searched ahead"
        plan = "the same plan" if decision.same_plan else f"a plan for {decision.world_size} ranks, {when}"
        self._given.say(f"{cause + chr(10) if cause else ''}  going on {source}, with {plan}")


_CONTINUES, _FINAL = "continues", "final"


def _cause(ending: RankExit, waits: WhoWaits) -> str:
    """Who has not come, where that is why a rank has ended; else the end of the rank."""
    told = waits.told() if ending.in_vain else ""
    return f"{told}\n  {ending}" if told else str(ending)


def _that_do_the_same(decision: Decision) -> list[list[int]]:
    """Ranks whose own seconds can be compared: those of one stage; on GPUs, which all make the same products, all."""
    ranks = range(decision.world_size)
    stages = 1 if torch.cuda.device_count() else Plan.from_yaml(decision.plan).num_pipeline_ranks
    size = decision.world_size // stages
    return [list(ranks[first : first + size]) for first in range(0, decision.world_size, size)]


def _verdict(cause: str) -> int | str:
    kind, _, text = cause.partition(" ")
    return text if kind == _CONTINUES else int(kind.partition("-")[2])
