"""``autopar train --ray ADDRESS --keep-alive``: a supervisor for each rank, in an actor; this process minds the actors.

What happens to ranks, supervisors settle among themselves, as they do under torchrun; they go on without those that
are lost. This process asks Ray for another actor in the place of one that has ended. Once Ray has room, its supervisor
comes back to the others, and all of them go on with the plan that the job was started with.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.errors import LaunchError
from autopar.launching.on_ray import answers_of, connected, in_bundle, machines_of, reserved
from autopar.launching.placement import check_room, groups_of, places_of, uses_gpus
from autopar.launching.ray_supervisor import CoordinatorActor, SupervisorActor
from autopar.training.job import TrainingJob
from autopar.training.notice import SIGNALS

_POLL_S = 0.2
_WAIT_S = 30.0
# Once the job is over: for supervisors that have not heard of it, or wait for an actor.
_GRACE_S = 10.0
# A supervisor that ends earlier has not come to supervise anything.
_BRIEF_S = 60.0


def supervise_on_ray(job: TrainingJob, address: str, *, cpus_per_rank: int = 1) -> int:
    """Train on the cluster at ``address`` until the job is done; the exit code. Every machine reads model, plan, data
    and checkpoints at the same paths. Raises AutoparError if the job cannot start, or nobody is left to go on with it.
    """
    job = job.with_absolute_paths()
    plan = job.opened().plan
    with connected(address, plan.num_ranks * cpus_per_rank) as ray:
        groups, machines = groups_of(plan), machines_of(ray)
        gpus = uses_gpus(plan, machines)
        check_room(groups, machines, gpus=gpus, cpus_per_rank=cpus_per_rank)
        with reserved(ray, groups, machines, gpus=gpus, cpus_per_rank=cpus_per_rank, wait_s=_WAIT_S) as bundles:
            options = [
                in_bundle(bundles, group, gpus=gpus, cpus=cpus_per_rank)
                for group, size in enumerate(groups)
                for _ in range(size)
            ]
            actors = _SupervisorActors(
                ray, job, [{**one, "max_concurrency": 2} for one in options], groups, cpus_per_rank
            )
            try:
                with _notices(actors.asked):
                    return actors.run()
            finally:
                actors.end()


@dataclass(slots=True)
class _Member:
    """Of a supervisor. options: of its actor. host: None until the actor has a place. failures: in a row."""

    options: dict[str, Any]
    actor: Any
    host: Any
    address: str | None = None
    code: Any = None
    since: float = field(default_factory=time.monotonic)
    failures: int = 0


class _SupervisorActors:
    """The actors of a job."""

    def __init__(
        self, ray: Any, job: TrainingJob, options: list[dict[str, Any]], groups: list[int], cpus_per_rank: int
    ) -> None:
        self._ray, self._job = ray, job
        self.asked: list[int] = []
        """Signals to pass on to all supervisors."""
        self._threads = os.environ.get("OMP_NUM_THREADS", str(cpus_per_rank))
        self._coordinator = _here(ray, CoordinatorActor)
        members = [self._new_member(one) for one in options]
        hosts = answers_of(ray, [member.host for member in members])
        for member, (_, address) in zip(members, hosts, strict=True):
            member.address = address
        firsts = [sum(groups[:number]) for number in range(len(groups))]
        places = places_of(groups, [hosts[first][0] for first in firsts])
        self._members = [members[place.worker] for place in places]
        ((self._address, self._port),) = answers_of(ray, [self._coordinator.serve.remote(job.environment.interface)])

    def run(self) -> int:
        """The exit code of the supervisors, once all have ended that are there."""
        for index in range(len(self._members)):
            self._supervise(index)
        codes: list[int] = []
        deadline = alone_since = float("inf")
        while True:
            self._show()
            while self.asked:
                number = self.asked.pop(0)
                for member in self._members:
                    member.actor.signal.remote(number)
            for index, outcome in self._ended():
                if isinstance(outcome, int) and outcome >= 0:
                    codes.append(outcome)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                elif not codes:
                    self._replace(index, outcome)
            waiting = [member for member in self._members if member.code is not None]
            if codes and (not waiting or time.monotonic() > deadline):
                self._show()
                return min(codes)  # 0 if any has seen the end of the job
            there = any(member.address is not None for member in waiting)
            alone_since = float("inf") if there else min(alone_since, time.monotonic())
            if not codes and time.monotonic() - alone_since > (_WAIT_S if waiting else 0.0):
                self._show()
                raise LaunchError(
                    f"no supervisor is left, and the cluster has had no room for another in {_WAIT_S:.0f} s.\n"
                    "  try: the same command, which goes on from what --job has saved"
                )

    def end(self) -> None:
        """End all actors."""
        for actor in (*(member.actor for member in self._members), self._coordinator):
            self._ray.kill(actor)

    def _new_member(self, options: dict[str, Any]) -> _Member:
        actor = self._ray.remote(SupervisorActor).options(**options).remote()
        return _Member(options, actor, actor.host.remote())

    def _supervise(self, index: int) -> None:
        variables = {
            "RANK": index, "WORLD_SIZE": len(self._members), "MASTER_ADDR": self._address, "MASTER_PORT": self._port,
            # Ray shows each actor its own GPU.
            "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": self._threads,
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        member = self._members[index]
        member.code = member.actor.supervise.remote(
            self._job.to_json(), {name: str(value) for name, value in variables.items()}, self._coordinator
        )

    def _ended(self) -> Iterator[tuple[int, int | str]]:
        """The supervisors that have ended since the last call: with an exit code, or why there is none."""
        ray = self._ray
        pending = {member.code: index for index, member in enumerate(self._members) if member.code is not None}
        unplaced = {member.host: member for member in self._members if member.address is None}
        if unplaced:
            for reference in ray.wait(list(unplaced), num_returns=len(unplaced), timeout=0)[0]:
                try:
                    unplaced[reference].address = ray.get(reference)[1]
                    unplaced[reference].since = time.monotonic()
                except ray.exceptions.RayError:
                    continue  # its supervisor says so too
        if not pending:
            time.sleep(_POLL_S)
            return
        for reference in ray.wait(list(pending), num_returns=1, timeout=_POLL_S)[0]:
            self._members[pending[reference]].code = None
            try:
                yield pending[reference], ray.get(reference)
            except ray.exceptions.RayError as error:
                yield pending[reference], (str(error).strip().splitlines() or [type(error).__name__])[0]

    def _replace(self, index: int, outcome: int | str) -> None:
        member = self._members[index]
        why = f"was killed by {signal.Signals(-outcome).name}" if isinstance(outcome, int) else f"is lost: {outcome}"
        brief = time.monotonic() - member.since < _BRIEF_S
        failures = member.failures + 1 if brief else 1
        further = failures <= self._job.failures
        self._show()
        _say(
            f"the supervisor of rank {index} on {member.address or 'no machine'} {why}\n"
            + (
                "  it comes back when the cluster has room"
                if further
                else f"  it is left out after {failures} failures"
            )
        )
        self._ray.kill(member.actor)
        member.address = None
        if further:
            self._members[index] = self._new_member(member.options)
            self._members[index].failures = failures
            self._supervise(index)

    def _show(self) -> None:
        for name, line in self._ray.get(self._coordinator.take.remote()):
            print(line, file=sys.stdout if name == "out" else sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _here(ray: Any, kind: type) -> Any:
    """An actor on this machine, or on that of the server of a client of Ray: without it the job ends anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=here).remote()


@contextmanager
def _notices(asked: list[int]) -> Iterator[None]:
    """Signals that say that the job is to end soon are put down; the supervisors know what to do."""
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
