"""Prices that all configurations of a search share: of ops by the degrees of their factors, and on each mesh of
redistributions, factors of the inner problem and gradient reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.gradient_sync import SyncTime, sync_time, without_latency
from autopar.cost_model.communication.lowered_ops import lowering_time
from autopar.cost_model.communication.redistribution_table import WHOLE, LinkPrices, Shares, Times
from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.compute.expert_imbalance import Loads
from autopar.cost_model.compute.fusion import Fused, cast_before, fused_ops, merged_products
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.compute.op_time import Affine, OpTime
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.analysis.op_clusters import first_instances
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout
from autopar.ir.rule import Assignment, Choice, factors_of_choice
from autopar.search.assign.instance import Floats, Ints, User
from autopar.search.pricing.cluster_options import Codes, Options
from autopar.search.pricing.placement_codes import Moves, encode, encode_need, rows_class
from autopar.search.problem.workload import Workload

# Bytes at which affine costs are sampled.
_SAMPLE = 1e6


@dataclass
class OpPrices:
    """Seconds of ops, by the degrees of their factors: the same on every mesh. Caches its results.

    balanced: sequences that ranks share are in zigzag layout, so that causal attention is equal work for all. loads:
    tokens per expert, by layer. documents: packed into a row, if they are.
    """

    workload: Workload
    cluster: Cluster
    balanced: bool = False
    loads: Loads = ()
    documents: Documents | None = None
    codes: Codes = field(init=False)
    _costs: dict[fx.Node, OpCost] = field(default_factory=dict)
    _times: dict[tuple[object, ...], OpTime] = field(default_factory=dict)
    # Seconds of a microbatch of all members of a cluster, by its number, that of microbatches, and degrees.
    totals: dict[tuple[int, int, bytes], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codes = Codes(self.workload)

    @property
    def memory(self) -> StackMemory:
        """What the software stack of the cluster keeps in memory."""
        return self.cluster.device.stack.memory

    def cost(self, node: fx.Node) -> OpCost:
        """Roofline cost of an op on the cluster's device."""
        found = self._costs.get(node)
        if found is None:
            workload = self.workload
            found = self._costs[node] = OpCost.of(
                node,
                workload.rule(node),
                self.cluster.device,
                precision=workload.precision,
                batch_factor=workload.roles.batch.get(node),
                needs_grad=workload.analysis.differentiable,
                balanced=self.balanced,
                loads=self.loads,
                documents=self.documents,
                fused=self.fused.get(node),
                cast_before=node in self.cast_before,
            )
        return found

    @cached_property
    def fused(self) -> Mapping[fx.Node, Fused]:
        """Ops that the stack computes in one kernel with others."""
        found: dict[fx.Node, Fused] = {}
        stack = self.cluster.device.stack
        for own in self._blocks():
            if stack.fuses:
                found.update(fused_ops(own, stack.reductions))
            if stack.merges:
                found.update(merged_products(own))
        return found

    @cached_property
    def cast_before(self) -> AbstractSet[fx.Node]:
        """Products that take their input in the narrow floats that the stack has cast it to for another product."""
        stack = self.cluster.device.stack
        if not stack.shares_casts:
            return frozenset()
        return frozenset(node for own in self._blocks() for node in cast_before(own))

    def _blocks(self) -> Iterator[list[fx.Node]]:
        """The ops outside blocks, and those of the first of each kind of block."""
        repetition = self.workload.repetition
        blocks = (repetition.blocks[index].nodes for index in first_instances(repetition))
        for nodes in (repetition.prelude, *blocks):
            yield [node for node in nodes if node in self.workload.repeats]

    def time(self, node: fx.Node, assignment: Assignment, mesh: Mesh, num_microbatches: int) -> OpTime:
        """Seconds of one microbatch of an op under an assignment, without the collectives inside."""
        degrees: dict[Choice, int] = {}
        for choice, axis in zip(assignment, mesh.axes, strict=True):
            if factors_of_choice(choice):
                degrees[choice] = degrees.get(choice, 1) * axis.size
        key = (node, num_microbatches, *sorted(degrees.items()))
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self.cost(node).time(assignment, mesh, num_microbatches)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactorShape:
    """A factor of the inner problem without the bytes of its tensor; see ``instance.Factor``.

    summed: for results of derived ops, (mesh axes, pieces) -> 1 where the gradient of so large a part of the tensor is
    all-reduced over the axes once a step, with the gradients of parameters, 0 elsewhere.
    """

    sources: Ints
    users: tuple[User, ...]
    fixed: Floats
    per_byte: Floats
    summed: Mapping[tuple[tuple[int, ...], int], Floats] = field(default_factory=dict)

    @property
    def costs(self) -> bool:
        """Whether any entry is nonzero."""
        return bool(self.summed or self.fixed.any() or self.per_byte.any())


class ParameterSeconds(NamedTuple):
    """Seconds of a step for a parameter of ``numel`` elements, and the bytes of its state on a rank.

    micro_s: in microbatches, without its casts. masters_s: casts and the optimiser. sync_s: communication of ZeRO and
    of its gradient, before any overlap; lost_s: what compute loses if all of it runs beside.
    """

    micro_s: float
    masters_s: float
    sync_s: float
    lost_s: float
    state_bytes: float
    numel: int


@dataclass(slots=True)
class MeshPrices:
    """Seconds of communication on a mesh, affine in the bytes; independent of the names of its axes.

    options: of each cluster, in the inner problems so far. shapes: factors of those. parameters: by their properties.
    evaluated: results that ``evaluate`` has computed, by their keys.
    """

    fabric: Fabric
    known: Moves
    options: dict[tuple[object, ...], Options] = field(default_factory=dict)
    shapes: dict[tuple[object, ...], FactorShape] = field(default_factory=dict)
    parameters: dict[tuple[object, ...], ParameterSeconds] = field(default_factory=dict)
    evaluated: dict[str, dict[Any, Any]] = field(default_factory=dict)
    links: LinkPrices = field(init=False)
    _noise_free: MeshPrices | None = None
    _times: dict[float, Times] = field(default_factory=dict)
    _lowerings: dict[tuple[fx.Node, Assignment, int], OpTime] = field(default_factory=dict)
    _rates: dict[tuple[object, ...], SyncTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = LinkPrices.of(self.fabric)

    @property
    def mesh(self) -> Mesh:
        """The mesh, with the names of its first configuration."""
        return self.fabric.mesh

    @property
    def noise_free(self) -> MeshPrices:
        """The prices without straggler delays."""
        if self._noise_free is None:
            cluster = self.fabric.cluster
            noise_free = replace(cluster, device=replace(cluster.device, jitter_s=0.0))
            self._noise_free = MeshPrices(Fabric(noise_free, self.mesh), self.known)
        return self._noise_free

    def move(
        self,
        source: Layout,
        value: Layout,
        grad: Layout,
        differentiable: bool,
        rows: float = inf,
        shares: Shares = WHOLE,
    ) -> Affine:
        """Redistribution of a tensor, by the bytes of its microbatch (all ranks of the stage together).

        rows: size of dimension 0 of the microbatch. shares: of its bytes that a gather moves.
        """
        codes = np.array([encode(source)]), np.array([encode_need(value, grad)])
        number = self.known.numbers(*codes, differentiable)
        return self._at(rows_class(rows, self.mesh)).at(int(number[0, 0]), shares)

    def table(self, numbers: Ints, rows: float, shares: Shares = WHOLE) -> tuple[Floats, Floats]:
        """Fixed seconds and seconds per byte, both directions together, of redistributions by ``Moves.numbers``.

        rows: a ``rows_class``. shares: of the bytes that a gather moves.
        """
        times = self._at(rows)
        fixed = times.forward_fixed[numbers] + times.backward_fixed[numbers]
        forward, backward = times.per_byte(numbers, shares)
        return fixed, forward + backward

    def _at(self, rows: float) -> Times:
        """Seconds of all redistributions that are numbered so far."""
        found = self._times.get(rows)
        done = 0 if found is None else len(found.forward_fixed)
        if found is None or done < len(self.known):
            more = self.known.since(done).times(self.links, rows)
            found = self._times[rows] = more if found is None else found.followed_by(more)
        return found

    def lowering(self, node: fx.Node, assignment: Assignment, ops: OpPrices, num_microbatches: int) -> OpTime:
        """Collectives inside a lowered op."""
        key = (node, assignment, num_microbatches)
        found = self._lowerings.get(key)
        if found is None:
            found = self._lowerings[key] = lowering_time(
                node,
                ops.workload.rule(node),
                assignment,
                self.fabric,
                batch_factor=ops.workload.roles.batch.get(node),
                num_microbatches=num_microbatches,
                precision=ops.workload.precision,
                balanced=ops.balanced,
                loads=ops.loads,
                compute=ops.time(node, assignment, self.mesh, num_microbatches),
            )
        return found

    def sync_rate(
        self, axes: tuple[int, ...], zero: int, precision: str, *, trains: bool = True, gathered: int | None = None
    ) -> SyncTime:
        """Gradient synchronisation over ``axes`` jointly, per element and without latency. trains: has a gradient.
        gathered: bytes of an element that is gathered, if not those of compute."""
        key = (axes, zero, precision, trains, gathered)
        found = self._rates.get(key)
        if found is None:
            sampled = without_latency(
                lambda times: sync_time(
                    self.fabric,
                    times * _SAMPLE,
                    axes,
                    zero=zero,
                    precision=precision,
                    trained=float(trains),
                    gathered=None if gathered is None else gathered * times * _SAMPLE,
                )
            )
            found = self._rates[key] = sampled * (1 / _SAMPLE)
        return found
