"""Placement of the ranks of a plan on the machines of a cluster.

The ranks that share a node in the plan are started together, on one machine; they talk most. Machines with room for
several such groups take several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.errors import LaunchError
from autopar.ir.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """name: for messages. num_gpus, num_cpus: in all."""

    name: str
    num_gpus: int
    num_cpus: int

    def room(self, *, gpus: bool, cpus_per_rank: int) -> int:
        """Ranks that it can take."""
        by_cpus = self.num_cpus // cpus_per_rank
        return min(self.num_gpus, by_cpus) if gpus else by_cpus


def groups_of(plan: Plan) -> list[int]:
    """The number of ranks on each node of a plan; only the last may have fewer than the others."""
    each = min(plan.cluster.gpus_per_node, plan.num_ranks)
    full, rest = divmod(plan.num_ranks, each)
    return [each] * full + [rest] * bool(rest)


def uses_gpus(plan: Plan, machines: Sequence[Machine]) -> bool:
    """Whether ranks are GPUs: a plan for GPUs can be tried on a cluster that has none."""
    return plan.cluster.gpu != "cpu" and any(machine.num_gpus for machine in machines)


def check_room(groups: Sequence[int], machines: Sequence[Machine], *, gpus: bool, cpus_per_rank: int) -> None:
    """Raise LaunchError unless the machines, all of them free, could take the groups."""
    each, rest = groups[0], groups[-1] if groups[-1] < groups[0] else 0
    rooms = [machine.room(gpus=gpus, cpus_per_rank=cpus_per_rank) for machine in machines]
    full = sum(room // each for room in rooms)
    wanted = len(groups) - bool(rest)
    if full > wanted or (full == wanted and (not rest or any(room % each >= rest for room in rooms))):
        return
    raise LaunchError(
        f"the cluster has no room for the plan: {needs(groups, gpus=gpus, cpus_per_rank=cpus_per_rank)}.\n"
        f"  the cluster has: {has(machines)}\n"
        "  try: a plan for it (autopar search --gpus N --gpus-per-node M), or more machines"
    )


def needs(groups: Sequence[int], *, gpus: bool, cpus_per_rank: int) -> str:
    """In words, what the groups take."""

    def one(count: int) -> str:
        cpus = f"{count * cpus_per_rank} CPUs"
        return f"{count} GPUs and {cpus}" if gpus else cpus

    full = len(groups) - (groups[-1] < groups[0])
    words = f"it needs {full} × {one(groups[0])}, each on one machine"
    return words if full == len(groups) else f"{words}, and {one(groups[-1])} on one"


def has(machines: Sequence[Machine]) -> str:
    """In words, what the machines offer."""
    shown = [f"{m.name} with {m.num_gpus} GPUs and {m.num_cpus} CPUs" for m in machines[:8]]
    more = [f"{len(machines) - 8} more"] if len(machines) > 8 else []
    return ", ".join(shown + more) or "no machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands. worker: its number among those started, group by group. node: counted from 0."""

    worker: int
    node: int
    local_rank: int
    local_size: int


def places_of(groups: Sequence[int], hosts: Sequence[str]) -> list[Place]:
    """The place of each rank, in the order of ranks: machine by machine, groups in one piece.

    hosts: of each group, the machine that it came to stand on. A smaller last group stays the last.
    """
    order = list(dict.fromkeys(hosts))
    order.sort(key=lambda host: host == hosts[-1])  # the machine of the last group last
    firsts = [sum(groups[:number]) for number in range(len(groups))]
    found = []
    for node, host in enumerate(order):
        workers = [
            first + i
            for first, size, own in zip(firsts, groups, hosts, strict=True)
            if own == host
            for i in range(size)
        ]
        for local_rank, worker in enumerate(workers):
            found.append(Place(worker=worker, node=node, local_rank=local_rank, local_size=len(workers)))
    return found
