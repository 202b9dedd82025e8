"""Seconds that protection and recovery take, from bytes of state and the bandwidths of the cluster.

checkpoint    training stands still while the state is copied to host memory (bytes of a rank / PCI Express) and
              the write is prepared; the write itself runs beside it (bytes of the model / storage)
replica       a rank's state goes to its host and on to its partner's, in chunks, so the slower link decides; that a
              partner may have a part of it itself, and is not sent that, is left out. It runs beside the next
              steps, which change no state until they end: they are slower meanwhile, and
              wait for what is not through when the next copy is due
recovery      from replicas: the way back; from disk: every rank reads its state, which all share the storage for
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from autopar.cost_model.communication.collectives import lost_beside
from autopar.cost_model.goodput.job import Job, Policy
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.failure_rates import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionCosts:
    """Seconds of a job on a cluster; a measurement may stand for any of them.

    checkpoint_stall_s: by which a checkpoint delays training; write_s: from then until it is complete. copy_s: of one
    copy of all ranks' state to their partners; overlaps: whether it runs beside training, which then loses ``lost`` of
    each of its seconds. fetch_s, read_s: to load
    state from partners and from disk. detection_s, restart_s, replan_s, repair_s: as of ``Reliability``.
    """

    checkpoint_stall_s: float
    write_s: float
    copy_s: float
    overlaps: bool
    lost: float
    fetch_s: float
    read_s: float
    detection_s: float
    restart_s: float
    replan_s: float
    repair_s: float

    @staticmethod
    def of(job: Job, cluster: Cluster) -> ProtectionCosts:
        """What the cost model predicts."""
        known, host = cluster.reliability, cluster.device.host
        storage = cluster.storage_bandwidth
        to_host = 0.0 if cluster.device.is_cpu else host.copy_seconds(job.state_bytes)
        way = max(to_host, job.state_bytes / cluster.inter_node.ring_bandwidth(2))
        return ProtectionCosts(
            checkpoint_stall_s=known.save_s + to_host,
            write_s=job.checkpoint_bytes / storage,
            copy_s=way,
            overlaps=not cluster.device.is_cpu,
            lost=lost_beside(job.state_bytes / way, cluster.device) if way else 0.0,
            fetch_s=way,
            read_s=job.state_bytes * job.num_gpus / storage,
            detection_s=known.detection_s,
            restart_s=known.restart_s,
            replan_s=known.replan_s,
            repair_s=known.repair_hours * 3600.0,
        )

    def replica_stall_s(self, between_s: float) -> float:
        """Seconds by which a copy delays the ``between_s`` seconds of training until the next."""
        hidden = min(self.copy_s, between_s) if self.overlaps else 0.0
        return self.copy_s - hidden + self.lost * hidden

    def load_s(self, *, from_disk: bool) -> float:
        """Seconds until every rank has its state again."""
        return self.read_s if from_disk else self.fetch_s

    def planned_restart_s(self, policy: Policy) -> float:
        """Seconds from the end of a step until the job trains again, where nothing has failed. Without copies on other
        hosts the state is written to disk and read again."""
        if policy.replica_steps is not None:
            return self.restart_s + self.fetch_s
        return self.write_s + self.restart_s + self.read_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A kind of failure of one job. rate_per_s: of the whole job."""

    kind: FailureKind
    rate_per_s: float

    @property
    def lost_nodes(self) -> int:
        """Nodes that are out of service after it."""
        return self.kind.lost_nodes


def hazards_of(job: Job, cluster: Cluster) -> tuple[Hazard, ...]:
    """The failures of a job that happen at all."""
    found = (
        Hazard(kind=kind, rate_per_s=kind.rate_per_s(job.num_gpus, job.num_nodes))
        for kind in cluster.reliability.kinds
        if kind.mean_hours < inf
    )
    return tuple(hazard for hazard in found if hazard.rate_per_s > 0)
