"""A run over days, failure by failure.

What the closed form expects, this counts: steps are whole, a failure takes the nodes that it hits, copies and
checkpoints can be used when they are complete, a failure in a recovery begins it anew, and where a second one takes the
partner of a rank whose state is being recovered, the checkpoint alone is left. Failures are drawn from their rates, or
given, as of a run that was measured.

    run  --failure-->  detection  ->  (wait for a node | plan for fewer ranks)  ->  restart and load  -->  run
    run  --node back-->  plan for more ranks, restart and load  -->  run
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random

from autopar.cost_model.goodput.job import Job, Policy
from autopar.cost_model.goodput.protection_costs import Hazard, ProtectionCosts
from autopar.ir.goodput import TimeParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure: seconds from the start of the run, the first node that it hits, and of how many it takes the state;
    lost_nodes are out of service for repair_s. announced: as of ``FailureKind``."""

    at_s: float
    node: int
    lost_nodes: int
    repair_s: float = 0.0
    announced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run. seconds: by part. steps: that lasted. recoveries: starts after a failure; from_disk: those of
    them with the state of a checkpoint. replans: changes of the number of ranks."""

    seconds: TimeParts
    steps: int
    failures: int
    recoveries: int
    from_disk: int
    replans: int


def drawn_faults(
    job: Job, costs: ProtectionCosts, hazards: Sequence[Hazard], *, days: float, seed: int
) -> Iterator[Fault]:
    """Failures in order of time, at random by their rates; repair times are exponential."""
    random = Random(seed)
    rates = [hazard.rate_per_s for hazard in hazards]
    now = 0.0
    while hazards:
        now += random.expovariate(sum(rates))
        if now >= days * 86400:
            return
        (hazard,) = random.choices(hazards, rates)
        # Nodes that fail together stand side by side, from a multiple of their number on.
        size = max(1, hazard.lost_nodes)
        yield Fault(
            at_s=now,
            node=random.randrange(max(1, job.num_nodes // size)) * size,
            lost_nodes=hazard.lost_nodes,
            repair_s=random.expovariate(1 / costs.repair_s) if hazard.lost_nodes and costs.repair_s else 0.0,
            announced=hazard.kind.announced,
        )


def simulate_run(
    job: Job, policy: Policy, costs: ProtectionCosts, faults: Iterable[Fault], *, days: float
) -> Simulated:
    """The run of ``days`` under these failures."""
    return _Run(job, policy, costs, deque(faults), days * 86400).result()


@dataclass(slots=True)
class _Lasting:
    """Steps ``first`` to ``last`` (not included) that were done at one speed, and could still be lost."""

    first: int
    last: int
    step_s: float


@dataclass(slots=True)
class _Run:
    job: Job
    policy: Policy
    costs: ProtectionCosts
    faults: deque[Fault]
    end_s: float
    now: float = 0.0
    step: int = 0
    on_disk: int = 0
    done: deque[_Lasting] = field(default_factory=deque)
    repairs: list[tuple[float, int]] = field(default_factory=list)
    out: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def result(self) -> Simulated:
        """Everything until the end."""
        while self.now < self.end_s:
            fault = self._train()
            if fault is not None:
                self._recover(fault)
        for piece in self.done:
            self._account(piece)
        return Simulated(
            seconds=TimeParts(**self.seconds),
            steps=self.step,
            **{name: self.counts.get(name, 0) for name in ("failures", "recoveries", "from_disk", "replans")},
        )

    def _level(self) -> int:
        return self.job.level(self.out - self.policy.spare_nodes)

    def _speed(self) -> float:
        level = self._level()
        return self.job.speed(level) if self.policy.replans or not level else 0.0

    def _spend(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _stalls(self, first: int, last: int, step_s: float) -> tuple[float, float]:
        """Seconds of checkpoints and of copies after steps first + 1 to last."""
        copies = 0.0
        if (every := self.policy.replica_steps) is not None:
            copies = (last // every - first // every) * self.costs.replica_stall_s(every * step_s)
        saves = last // self.policy.checkpoint_steps - first // self.policy.checkpoint_steps
        return saves * self.costs.checkpoint_stall_s, copies

    def _account(self, piece: _Lasting) -> None:
        """Steps that last: to training, and what they took beyond that."""
        count = piece.last - piece.first
        saving, copying = self._stalls(piece.first, piece.last, piece.step_s)
        self._spend("training", count * self.job.step_time_s)
        self._spend("degraded", count * (piece.step_s - self.job.step_time_s))
        self._spend("checkpoint", saving)
        self._spend("replicas", copying)

    def _length(self, piece: _Lasting) -> float:
        return (piece.last - piece.first) * piece.step_s + sum(self._stalls(piece.first, piece.last, piece.step_s))

    def _steps_until(self, seconds: float, step_s: float) -> int:
        """Whole steps, with what follows them, in so many seconds from now on."""
        low, high = 0, int(seconds / step_s) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._length(_Lasting(self.step, self.step + middle, step_s)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _train(self) -> Fault | None:
        """Run until the next failure, which is returned, or the end, or until nodes enough are back for more ranks."""
        self._serve()
        start, step_s = self.now, self.job.step_time_s / self._speed()
        failing_s = self.faults[0].at_s if self.faults else inf
        self.now = max(start, min(failing_s, self._back_s(), self.end_s))
        whole = _Lasting(self.step, self.step + self._steps_until(self.now - start, step_s), step_s)
        if self.now < failing_s:
            self._keep(whole, start, saved=True)
            self._start_again()
            return None
        fault = self._next()
        if fault.announced:
            self._keep(whole, start, saved=True)
        elif self.policy.needs_disk(fault.lost_nodes):
            self._keep(whole, start)
            self._roll_back()
        else:
            assert self.policy.replica_steps is not None, "else the state is on disk alone"
            copied = self._newest(whole, self.policy.replica_steps, self.costs.copy_s, self.now - start)
            self._keep(_Lasting(whole.first, copied, step_s), start)
        return fault

    def _newest(self, piece: _Lasting, every: int, latency_s: float, seconds: float) -> int:
        """The step of the newest snapshot, one after ``every`` steps, that can be used after so many seconds; the first
        of the piece if none of its own can."""
        last = piece.last // every * every
        while last > piece.first:
            followed = sum(self._stalls(last - 1, last, piece.step_s))
            if self._length(_Lasting(piece.first, last, piece.step_s)) - followed + latency_s <= seconds:
                return last
            last -= every
        return piece.first

    def _keep(self, piece: _Lasting, start: float, *, saved: bool = False) -> None:
        """Steps that are left of the time from ``start`` on. saved: all of them; else those up to the last checkpoint
        that is complete by now."""
        self._spend("lost_work", self.now - start - self._length(piece))
        self.step = piece.last
        self.done.append(piece)
        on_disk = piece.last
        if not saved:
            on_disk = self._newest(piece, self.policy.checkpoint_steps, self.costs.write_s, self.now - start)
        if on_disk == piece.first:
            return
        self.on_disk = on_disk
        while self.done and self.done[0].first < on_disk:
            oldest = self.done.popleft()
            self._account(_Lasting(oldest.first, min(oldest.last, on_disk), oldest.step_s))
            if oldest.last > on_disk:
                self.done.appendleft(_Lasting(on_disk, oldest.last, oldest.step_s))

    def _roll_back(self) -> None:
        """To the checkpoint on disk."""
        for piece in self.done:
            self._spend("lost_work", self._length(piece))
        self.done.clear()
        self.step = self.on_disk

    def _next(self) -> Fault:
        """The failure that comes now, and what it takes out of service."""
        fault = self.faults.popleft()
        self._count("failures")
        if fault.lost_nodes and fault.repair_s:
            self.out += fault.lost_nodes
            heappush(self.repairs, (fault.at_s + fault.repair_s, fault.lost_nodes))
        return fault

    def _serve(self) -> None:
        """Nodes whose repair has ended by now."""
        while self.repairs and self.repairs[0][0] <= self.now:
            self.out -= heappop(self.repairs)[1]

    def _back_s(self) -> float:
        """When the job can run on more ranks than now."""
        out, level = self.out, self._level()
        for at, nodes in sorted(self.repairs):
            out -= nodes
            if self.job.level(out - self.policy.spare_nodes) < level:
                return at
        return inf

    def _recover(self, fault: Fault) -> None:
        """From a failure until the job trains again."""
        hit, level = [fault], self._level_before(fault)
        while self.now < self.end_s:
            struck = None if hit[-1].announced else self._pass("detection", self.costs.detection_s)
            if struck is None:
                self._wait()
            if struck is None and self._level() != level:
                struck = self._pass("replanning", self.costs.replan_s)
                if struck is None:
                    level = self._level()
                    self._count("replans")
            if struck is None:
                struck = self._restart(hit)
            if struck is None:
                return
            hit.append(struck)

    def _restart(self, hit: Sequence[Fault]) -> Fault | None:
        """Start again after these failures, with the state that they left. A failure meanwhile is returned."""
        from_disk = self._is_on_disk_alone(hit)
        if from_disk:
            self._roll_back()
        if all(fault.announced for fault in hit):
            struck = self._pass("restart", self.costs.planned_restart_s(self.policy))
        else:
            struck = self._pass("restart", self.costs.restart_s + self.costs.load_s(from_disk=from_disk))
        if struck is None:
            self._count("recoveries")
            if from_disk:
                self._count("from_disk")
        return struck

    def _level_before(self, fault: Fault) -> int:
        """Data-parallel groups that were missing before a failure."""
        out = self.out - (fault.lost_nodes if fault.repair_s else 0)
        return self.job.level(out - self.policy.spare_nodes)

    def _is_on_disk_alone(self, hit: Sequence[Fault]) -> bool:
        """Whether one of the failures took a rank and its partner, or two together did."""
        unannounced = [fault for fault in hit if not fault.announced]
        if any(self.policy.needs_disk(fault.lost_nodes) for fault in unannounced):
            return True
        lost = {fault.node + n for fault in unannounced for n in range(fault.lost_nodes)}
        return any((node + self.policy.partner_distance) % self.job.num_nodes in lost for node in lost)

    def _start_again(self) -> None:
        """On more ranks, at the end of a step."""
        if self.now >= self.end_s:
            return
        self._serve()
        struck = self._pass("replanning", self.costs.replan_s + self.costs.planned_restart_s(self.policy))
        self._count("replans")
        if struck is not None:
            self._recover(struck)

    def _pass(self, part: str, seconds: float) -> Fault | None:
        """Spend so much time, unless a failure comes, which is returned."""
        until = min(self.now + seconds, self.end_s)
        if self.faults and self.faults[0].at_s < until:
            self._spend(part, max(0.0, self.faults[0].at_s - self.now))
            self.now = max(self.now, self.faults[0].at_s)
            self._serve()
            return self._next()
        self._spend(part, until - self.now)
        self.now = until
        self._serve()
        return None

    def _wait(self) -> None:
        """Until there are nodes enough; more may fail meanwhile."""
        while not self._speed() and self.now < self.end_s:
            repaired = self.repairs[0][0] if self.repairs else inf
            failing = self.faults[0].at_s if self.faults else inf
            until = min(max(self.now, min(repaired, failing)), self.end_s)
            self._spend("waiting", until - self.now)
            self.now = until
            if failing <= repaired and failing < self.end_s:
                self._next()
            self._serve()
