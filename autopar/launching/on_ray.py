"""The ranks of a plan as actors of a Ray cluster.

    losses = autopar.run_on_ray(train, "plan.yaml", config, address="auto")    # train(config) on every rank

Every node of the plan is a bundle of one placement group, so its ranks come to one machine. Each rank is an actor, in
whose process ``function`` finds the environment that torchrun would set and has joined the process group.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from autopar.ir.errors import AutoparError, InvalidInput, LaunchError
from autopar.ir.plan import Plan
from autopar.launching.placement import Machine, check_room, groups_of, has, needs, places_of, uses_gpus
from autopar.launching.ray_rank import Outcome, RayRank
from autopar.runtime.environment import Environment

T = TypeVar("T")

LOCAL = "local"
# Once a rank has failed the others get so long to fail by themselves, so that all that is known is said.
_GRACE_S = 2.0
_POLL_S = 0.2
_START_S = 120.0
_CONNECT_S = 10.0


def run_on_ray(
    function: Callable[..., T],
    plan: Plan | str | Path,
    *arguments: Any,
    address: str | None = None,
    environment: Environment | None = None,
    cpus_per_rank: int = 1,
    wait_s: float = 30.0,
) -> list[T]:
    """``function(*arguments)`` on every rank of ``plan``; the results by rank.

    function, arguments, results: what Ray can send. Ranks share no memory with the caller.
    address: of the cluster, "auto" for the one that runs on this machine, "local" for a new one here. None: the one
        that ``ray.init`` has connected to, or as ``ray.init()`` finds it.
    environment: network, debugging and time limits. cpus_per_rank: CPUs of Ray, and threads unless OMP_NUM_THREADS is
        set. wait_s: how long to wait for room that others take.

    Ranks use GPUs if the plan is for GPUs and the cluster has any. An AutoparError of a rank is raised here, once; of
    any other failure, a LaunchError with what the rank said. The other ranks are stopped, and what Ray had set aside is
    given back. Raises LaunchError if the cluster has no room.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    with connected(address, plan.num_ranks * cpus_per_rank) as ray:
        return run_ranks(
            ray,
            function,
            plan,
            arguments,
            environment=Environment() if environment is None else environment,
            cpus_per_rank=cpus_per_rank,
            wait_s=wait_s,
        )


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """The module ``ray``, connected; as it was afterwards. cpus: that a new local cluster pretends to have."""
    try:
        import ray
    except ImportError as error:
        raise LaunchError("Ray is not installed.\n  try: pip install 'autopar[ray]'") from error
    if ray.is_initialized():
        if address is not None:
            raise InvalidInput(f"address={address!r}: ray.init has connected already.\n  try: address=None")
        yield ray
        return
    try:
        _answers_at(address)
        if address == LOCAL:
            ray.init(address=LOCAL, num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False)
        else:
            ray.init(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"no Ray cluster answers at {address or 'the default address'}: {error}\n"
            "  try: `ray start --head` on one machine and `ray start --address HOST:PORT` on the others, or local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _answers_at(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray itself would try for minutes, and then end the process."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def run_ranks(
    ray: Any,
    function: Callable[..., T],
    plan: Plan,
    arguments: Sequence[Any],
    *,
    environment: Environment,
    cpus_per_rank: int = 1,
    wait_s: float = 30.0,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[T]:
    """``run_on_ray`` on a connection that there is. meanwhile: called every now and then until the ranks are done."""
    groups, machines = groups_of(plan), machines_of(ray)
    gpus = uses_gpus(plan, machines)
    check_room(groups, machines, gpus=gpus, cpus_per_rank=cpus_per_rank)
    actors: list[Any] = []
    with reserved(ray, groups, machines, gpus=gpus, cpus_per_rank=cpus_per_rank, wait_s=wait_s) as bundles:
        try:
            for group, size in enumerate(groups):
                actor = ray.remote(RayRank).options(**in_bundle(bundles, group, gpus=gpus, cpus=cpus_per_rank))
                actors += [actor.remote() for _ in range(size)]
            ranks = _ordered(ray, actors, groups, environment, gpus=gpus, cpus_per_rank=cpus_per_rank)
            pending = [actor.run.remote(function, tuple(arguments), environment) for actor in ranks]
            return _results(ray, pending, meanwhile)
        finally:
            for actor in actors:
                ray.kill(actor)


def machines_of(ray: Any) -> list[Machine]:
    """Those of the cluster that are there."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
            found.append(Machine(name=node["NodeManagerAddress"], num_gpus=gpus, num_cpus=cpus))
    return found


@contextmanager
def reserved(
    ray: Any, groups: Sequence[int], machines: Sequence[Machine], *, gpus: bool, cpus_per_rank: int, wait_s: float
) -> Iterator[Any]:
    """A placement group with a bundle for each group of ranks; given back afterwards."""
    from ray.util import placement_group, remove_placement_group

    bundles = [{"CPU": size * cpus_per_rank} | ({"GPU": size} if gpus else {}) for size in groups]
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=wait_s):
            raise LaunchError(
                f"the cluster had no room for the plan within {wait_s:g} s; others use it.\n"
                f"  expected: {needs(groups, gpus=gpus, cpus_per_rank=cpus_per_rank)}\n"
                f"  the cluster has, in all: {has(machines)}\n"
                "  try: again when `ray status` shows room, or wait_s=..."
            )
        yield group
    finally:
        remove_placement_group(group)


def in_bundle(bundles: Any, group: int, *, gpus: bool, cpus: int) -> dict[str, Any]:
    """Options of an actor for one rank of a group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(placement_group=bundles, placement_group_bundle_index=group)
    return {"num_cpus": cpus, "num_gpus": int(gpus), "scheduling_strategy": place}


def _ordered(
    ray: Any, actors: list[Any], groups: list[int], environment: Environment, *, gpus: bool, cpus_per_rank: int
) -> list[Any]:
    """The actors by rank, each with its environment set."""
    found = answers_of(ray, [actor.place.remote() for actor in actors])
    firsts = [sum(groups[:number]) for number in range(len(groups))]
    places = places_of(groups, [found[first].host for first in firsts])
    visible: dict[int, list[str]] = {}
    for place in places:
        visible.setdefault(place.node, []).extend(found[place.worker].gpus)
    ranks = [actors[place.worker] for place in places]
    threads = os.environ.get("OMP_NUM_THREADS", str(cpus_per_rank))
    for rank, place in enumerate(places):
        variables = {
            "RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_size, "GROUP_RANK": place.node, "OMP_NUM_THREADS": threads,
            # Ray shows each actor its own GPU; NCCL connects those of a machine faster if all of them see all.
            "CUDA_VISIBLE_DEVICES": ",".join(visible[place.node]) if gpus else "",
        }  # fmt: skip
        ranks[rank].prepare.remote({name: str(value) for name, value in variables.items()})
    ((address, port),) = answers_of(ray, [ranks[0].serve.remote(len(ranks), environment.interface)])
    meeting = {
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        # The store at this address is there, held by the actor of rank 0: no rank is to make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    for actor in ranks:
        actor.prepare.remote(meeting)
    return ranks


def answers_of(ray: Any, asked: list[Any]) -> list[Any]:
    """What actors that are being started answer. Raises AutoparError."""
    try:
        found: list[Any] = ray.get(asked, timeout=_START_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AutoparError):
            raise error.cause from None
        raise LaunchError(f"Ray could not start the ranks: {error}") from error
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray could not start the ranks: {error}") from error
    return found


def _results(ray: Any, pending: list[Any], meanwhile: Callable[[], object]) -> list[Any]:
    """What the ranks return, by rank. Raises what a rank raised as soon as one has."""
    outcomes: dict[int, Outcome] = {}
    rank_of = {reference: rank for rank, reference in enumerate(pending)}
    deadline = float("inf")
    while len(outcomes) < len(pending) and time.monotonic() < deadline:
        left = [reference for reference in pending if rank_of[reference] not in outcomes]
        for reference in ray.wait(left, num_returns=1, timeout=_POLL_S)[0]:
            try:
                outcome = ray.get(reference)
            except ray.exceptions.RayError as error:
                outcome = Outcome(died=str(error))
            outcomes[rank_of[reference]] = outcome
            if not outcome.well:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        meanwhile()
    failed = {rank: outcome for rank, outcome in sorted(outcomes.items()) if not outcome.well}
    if failed:
        raise _failure(failed, len(pending))
    return [outcomes[rank].value for rank in range(len(pending))]


def _failure(failed: dict[int, Outcome], num_ranks: int) -> AutoparError:
    """One error for all: what is known to all ranks as it is, else with the rank that it is about."""
    errors = {rank: outcome.error for rank, outcome in failed.items() if outcome.error is not None}
    for rank, error in errors.items():
        return error if rank == 0 else type(error)(f"on rank {rank}: {error}")
    # A rank that died, rather than those that miss it.
    rank, outcome = min(failed.items(), key=lambda item: (item[1].died is None, item[1].ended_s, item[0]))
    return LaunchError(f"rank {rank} of {num_ranks} failed:\n{(outcome.died or outcome.trace).strip()}")
