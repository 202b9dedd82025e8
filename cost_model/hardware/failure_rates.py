"""How often parts of a cluster fail, and how long it takes to notice, to start again and to repair.

The rates are those of Llama 3's pre-training: 419 unexpected interruptions in 54 days on 16,384 H100 (Dubey et al.,
"The Llama 3 Herd of Models", 2024, section 3.3.4 and table 5). Hours of all GPUs, or of all nodes, over the number of
interruptions of a kind are the mean hours between failures of one of them. Where a cluster file says other figures,
those count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost_model.hardware.catalogue_entry import Assumed, Published

HOUR_S = 3600.0

_LLAMA3 = "Dubey et al. 2024 (arXiv 2407.21783), table 5"
_GPUS, _GPUS_PER_NODE, _DAYS = 16_384, 8, 54
_GPU_HOURS = _GPUS * _DAYS * 24.0
_NODE_HOURS = _GPU_HOURS / _GPUS_PER_NODE

# Component -> interruptions of that table, by what the run loses: a process, a GPU, a node, or what is behind a switch.
INTERRUPTIONS: dict[str, dict[str, int]] = {
    "process": {"software bug": 54, "NCCL watchdog timeout": 7, "dependency": 2},
    "gpu": {
        "faulty GPU": 148,
        "GPU HBM3 memory": 72,
        "GPU SRAM": 19,
        "GPU system processor": 17,
        "silent data corruption": 6,
        "GPU thermal interface and sensor": 6,
    },
    "host": {
        "host maintenance, unplanned": 32,
        "NIC": 7,
        "SSD": 3,
        "power supply": 3,
        "server chassis": 2,
        "IO expansion board": 2,
        "CPU": 2,
        "system memory": 2,
    },
    "network": {"switch or cable": 35},
}

# Planned interruptions of the same 54 days: firmware, configuration, data. Of the whole job, whatever its size.
PLANNED_INTERRUPTIONS, OBSERVED_DAYS = 47, _DAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """One kind of failure.

    of: what fails: each GPU, each node, or the job as a whole. mean_hours: between failures of one of those; inf for
    never. lost_nodes: nodes that are out of service until they are repaired; 0 where the process alone ends and starts
    again in its place. announced: whether the job is told before, so that it ends with a step and loses no work.
    """

    name: str
    of: Literal["gpu", "node", "job"]
    mean_hours: float
    lost_nodes: int
    announced: bool = False

    def rate_per_s(self, num_gpus: int, num_nodes: int) -> float:
        """Failures a second of a job on so many devices."""
        count = {"gpu": num_gpus, "node": num_nodes, "job": 1}[self.of]
        return count / (self.mean_hours * HOUR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What a job on a cluster loses by failures.

    repair_hours: mean time until a lost node serves again. detection_s: from a failure until all ranks have ended.
    restart_s: until processes, process groups and the program are there again. save_s: by which a checkpoint that is
    written beside training delays it, besides the copy to host memory. replan_s: to find a plan for fewer ranks.
    """

    kinds: tuple[FailureKind, ...]
    repair_hours: float
    detection_s: float
    restart_s: float
    save_s: float
    replan_s: float

    def with_mean_hours(self, name: str, hours: float) -> Reliability:
        """The same, with other mean hours between failures of one kind."""
        kinds = (replace(kind, mean_hours=hours) if kind.name == name else kind for kind in self.kinds)
        return replace(self, kinds=tuple(kinds))


def _mean_hours(kind: str, hours: float) -> Published:
    count = sum(INTERRUPTIONS[kind].values())
    return Published(hours / count, f"{_LLAMA3}: {count} interruptions in {hours:,.0f} hours")


# Nodes that one failure of the network takes out: of two in a rack, behind one top-of-rack switch (Dubey et al. 2024,
# section 3.3.1). A cable takes one; both are counted, as the table does not tell them apart.
NODES_BEHIND_SWITCH = Published(2, "Dubey et al. 2024, section 3.3.1: racks of 16 GPUs in two servers, one switch")

REPAIR_HOURS = Published(
    72.0, "the lower end of 3 to 5 days until failed hardware is replaced (Arfeen et al. 2025, arXiv 2504.06095)"
)
DETECTION_S = Assumed(
    15.0,
    "5 s until supervisors have told all ranks (a guess, not measured), and 600 s, PyTorch's limit of a NCCL "
    "collective (pytorch/pytorch, pull request 110947), for the 7 of 419 interruptions that hang",
)
RESTART_S = Assumed(
    120.0,
    "a guess, not measured: 30 s for the process groups of 10,000 GPUs (recalled: MegaScale, NSDI 2024), the rest for "
    "processes, CUDA contexts, capture (6 s of Llama 3.1 405B), partition and the first step",
)
SAVE_S = Published(
    6.3, "pytorch.org/blog/reducing-checkpointing-times: training stands still so long for a checkpoint of 7B"
)
REPLAN_S = Assumed(
    15.0, "capture and search of Llama 3.1 405B on 16,384 GPUs, 6 and 9 s on one core; none if searched ahead"
)

OBSERVED = Reliability(
    kinds=(
        FailureKind(name="process", of="gpu", mean_hours=_mean_hours("process", _GPU_HOURS).value, lost_nodes=0),
        FailureKind(name="gpu", of="gpu", mean_hours=_mean_hours("gpu", _GPU_HOURS).value, lost_nodes=1),
        FailureKind(name="host", of="node", mean_hours=_mean_hours("host", _NODE_HOURS).value, lost_nodes=1),
        FailureKind(
            name="network",
            of="node",
            mean_hours=_mean_hours("network", _NODE_HOURS).value,
            lost_nodes=int(NODES_BEHIND_SWITCH.value),
        ),
    ),
    repair_hours=REPAIR_HOURS.value,
    detection_s=DETECTION_S.value,
    restart_s=RESTART_S.value,
    save_s=SAVE_S.value,
    replan_s=REPLAN_S.value,
)

# Bytes a second of storage for each GPU, where a cluster file does not say how fast its storage is.
STORAGE_PER_GPU = Published(2e12 / _GPUS, "Dubey et al. 2024, section 3.3.1: 2 TB/s sustained, for 16,384 GPUs")
