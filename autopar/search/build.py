"""From a folded model and prices to the abstract instance of the inner problem.

Units are clusters, in their order. The options of a unit are the assignments that constraints and divisibility
leave. Everything is priced per step: what happens each microbatch is multiplied by their number, and by the
repeats of its block.

    cost of an option   ops of the cluster, forward and backward; cast, gradient sum and optimiser of the
                        parameters stored by it; price of memory times their state and the activations kept
    flows               redistributions of every transfer, forward and backward; later uses of a parameter
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np
from torch import fx

from autopar.cost_model.activations import Saved
from autopar.ir.clusters import BATCH, Cluster
from autopar.ir.placement import Layout, replicated
from autopar.ir.rule import Assignment, Choice, factors_of_choice
from autopar.search.constraints import NoOption
from autopar.search.instance import Flow, Instance, Ints, User
from autopar.search.pricing import FlowShape, Pricing
from autopar.search.workload import ParameterGroup, Tensor, Transfer, Workload

_Item = TypeVar("_Item", bound=Hashable)

# The choices that a cluster may make along a mesh axis (by position).
Allowed = Callable[[Cluster, int], tuple[Choice, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the inner objective adds to seconds of compute and redistribution.

    sync: share of the gradient communication that is not hidden behind compute. masters: share that counts of the
    work on float32 parameters, which ZeRO divides (optimiser, casts). state, activations, working: seconds per byte
    held for parameters, for what backward needs, and for the gradients of the op that has the most of them.
    """

    sync: float = 1.0
    masters: float = 1.0
    state: float = 0.0
    activations: float = 0.0
    working: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """An instance and the assignments its options stand for: options[unit][option]."""

    instance: Instance
    options: tuple[tuple[Assignment, ...], ...]

    def assignments(self, selection: tuple[int, ...]) -> tuple[Assignment, ...]:
        """Assignment of the leader of each cluster."""
        return tuple(own[option] for own, option in zip(self.options, selection, strict=True))


def build(pricing: Pricing, allowed: Allowed, weights: Weights) -> Built:
    """The instance of one configuration. Deterministic."""
    return _Builder(pricing, allowed, weights).run()


def options_of(pricing: Pricing, group: Cluster, allowed: Allowed) -> tuple[Assignment, ...]:
    """Assignments of a cluster's leader in which every factor of every member divides."""
    choices = [allowed(group, axis) for axis in range(len(pricing.mesh))]
    kept = [joint for joint in product(*choices) if _divides(pricing, group, joint)]
    if not kept:
        what = group.leader.name if group.leader is not None else "the step inputs"
        raise NoOption(
            f"{what} cannot be divided as pinned on mesh {pricing.mesh}: its sizes do not divide.\n"
            f"  its choices: {dict(zip(pricing.mesh.names, choices, strict=True))}\n"
            "  try: other degrees, fewer microbatches, or other placements in autopar.constrain"
        )
    return tuple(kept)


def _divides(pricing: Pricing, group: Cluster, joint: Assignment) -> bool:
    mesh, load = pricing.mesh, pricing.workload
    for member in group.members:
        rule, batch = load.rule(member), load.roles.batch.get(member)
        left: dict[str, int] = {}
        for choice, axis in zip(joint, mesh.axes, strict=True):
            for factor in factors_of_choice(group.follow[choice][member]):
                size = left.get(factor)
                if size is None:
                    size = rule.sizes[factor]
                    if factor == batch:
                        size //= pricing.num_microbatches
                if size % axis.size:
                    return False
                left[factor] = size // axis.size
    if group.leader is None:
        rows = load.captured.batch_size // pricing.num_microbatches
        for choice, axis in zip(joint, mesh.axes, strict=True):
            if choice == BATCH:
                if rows % axis.size:
                    return False
                rows //= axis.size
    return True


class _Builder:
    def __init__(self, pricing: Pricing, allowed: Allowed, weights: Weights) -> None:
        self.pricing = pricing
        self.load: Workload = pricing.workload
        self.weights = weights
        self.groups = self.load.clusters.clusters
        self.options = tuple(options_of(pricing, group, allowed) for group in self.groups)
        self.count = pricing.num_microbatches
        self.members: dict[fx.Node, tuple[Assignment, ...]] = {
            member: tuple(group.assignment(member, joint) for joint in own)
            for group, own in zip(self.groups, self.options, strict=True)
            for member in group.members
        }
        self.costs = [np.zeros(len(own)) for own in self.options]
        self.flows: list[Flow] = []

    def run(self) -> Built:
        kept = self._kept() if self.weights.activations else {}
        if self.weights.working:
            self._add_working()
        for node, repeats in self.load.repeats.items():
            self._add_op(node, repeats, kept)
        for group in self.load.parameters:
            self._add_parameter(group)
        for number, transfer in enumerate(self.load.transfers):
            self._add_transfer(number, transfer)
        return Built(instance=Instance(costs=tuple(self.costs), flows=tuple(self.flows)), options=self.options)

    def _add_op(self, node: fx.Node, repeats: int, kept: Mapping[fx.Node, list[Saved]]) -> None:
        unit = self.load.cluster_of(node).index
        cost = self.costs[unit]
        factor = self.count * repeats
        for option, assignment in enumerate(self.members[node]):
            cost[option] += factor * self.pricing.op(node, assignment).total_s
        for tensor in kept.get(node, ()):
            price = self.weights.activations * repeats
            for option, assignment in enumerate(self.members[node]):
                cost[option] += price * tensor.local_bytes(assignment, self.pricing.mesh, self.count)

    def _add_working(self) -> None:
        """The peak while gradients are made, taken to be that of the op with the largest tensors."""
        largest = max(
            (tensors for activations in self.load.activations for tensors in activations.working if tensors),
            key=lambda tensors: sum(tensor.num_bytes for tensor in tensors),
            default=(),
        )
        for tensor in largest:
            cost = self.costs[self.load.cluster_of(tensor.node).index]
            for option, assignment in enumerate(self.members[tensor.node]):
                cost[option] += self.weights.working * tensor.local_bytes(assignment, self.pricing.mesh, self.count)

    def _kept(self) -> dict[fx.Node, list[Saved]]:
        """Saved tensors by the first op that keeps them."""
        found: dict[fx.Node, list[Saved]] = {}
        for activations in self.load.activations:
            seen = set()
            for tensor in (*activations.saved, *activations.extra):
                if tensor.storage not in seen:
                    seen.add(tensor.storage)
                    found.setdefault(tensor.node, []).append(tensor)
        return found

    def _parameter_price(self, group: ParameterGroup, uses: list[tuple[Layout, Layout]]) -> float:
        price = self.pricing.parameter(group.numel, group.requires_grad, uses)
        sync = self.pricing.sync(price)
        masters = self.count * price.cast_s + self.pricing.optimiser_s(price)
        seconds = self.count * (price.micro.total_s - price.cast_s) + self.weights.masters * masters
        seconds += self.weights.sync * sync.total_s(self.count)
        return (seconds + self.weights.state * self.pricing.state(price).total) * len(group.names)

    def _add_parameter(self, group: ParameterGroup) -> None:
        needs = [self._needs(node, position) for node, position in group.uses]
        first = self.load.cluster_of(group.uses[0][0]).index
        units = [self.load.cluster_of(node).index for node, _ in group.uses]
        own = [need for need, unit in zip(needs, units, strict=True) if unit == first]
        alone = [
            self._parameter_price(group, [need[option] for need in own]) for option in range(len(self.options[first]))
        ]
        self.costs[first] += alone
        for need, unit in zip(needs, units, strict=True):
            if unit == first:
                continue
            # What a later user adds, seen pairwise: exact for two users, as tied weights are.
            sources, source_of = _index(list(zip(*own, strict=True)))
            wanted, need_of = _index(need)
            cost = np.zeros((len(sources), len(wanted)))
            for state, uses in enumerate(sources):
                base = self._parameter_price(group, list(uses))
                for number, use in enumerate(wanted):
                    cost[state, number] = max(0.0, self._parameter_price(group, [*uses, use]) - base)
            self.flows.append(
                Flow(producer=first, sources=source_of, users=(User(unit=unit, needs=need_of),), cost=cost)
            )

    def _needs(self, node: fx.Node, position: int) -> list[tuple[Layout, Layout]]:
        rule = self.load.rule(node)
        return [rule.operand_layout(position, assignment) for assignment in self.members[node]]

    def _producer(self, tensor: Tensor) -> int:
        """Unit that decides how a tensor is produced."""
        return self.load.cluster_of(tensor.node).index

    def _sources(self, tensor: Tensor) -> list[Layout]:
        """Layout of a tensor under each option of its producer."""
        node = tensor.node
        if node in self.members:
            rule = self.load.rule(node)
            return [rule.result_layout(tensor.result, assignment) for assignment in self.members[node]]
        own = self.options[self.load.clusters.inputs.index]
        if node in self.load.clusters.input_dims:
            place = self.load.clusters.input_placement
            return [tuple(place(node, choice) for choice in joint) for joint in own]
        return [replicated(self.pricing.mesh)] * len(own)

    def _add_transfer(self, number: int, transfer: Transfer) -> None:
        """A flow for a transfer. Its shape depends on the mesh, the options of its units and the rows only: kept."""
        units = [self._producer(transfer.tensor), *(self.load.cluster_of(node).index for node, _ in transfer.uses)]
        rows = transfer.tensor.rows_of_microbatch(self.count)
        key = (number, rows, *(self.options[unit] for unit in units))
        shape = self.pricing.moves.shapes.get(key)
        if shape is None:
            shape = self.pricing.moves.shapes[key] = self._shape(transfer, units, rows)
        if not shape.moves:
            return
        factor = self.count * len(transfer.blocks)
        cost = factor * (shape.fixed + shape.per_byte * transfer.tensor.bytes_of_microbatch(self.count))
        self.flows.append(Flow(producer=units[0], sources=shape.sources, users=shape.users, cost=cost))

    def _shape(self, transfer: Transfer, units: list[int], rows: float) -> FlowShape:
        sources, source_of = _index(self._sources(transfer.tensor))
        needs = [self._needs(node, position) for node, position in transfer.uses]
        wanted, need_of = _index([need for own in needs for need in own])
        fixed, per_byte = self.pricing.moves.table(sources, wanted, transfer.tensor.differentiable, rows)
        users, begin = [], 0
        for unit, own in zip(units[1:], needs, strict=True):
            users.append(User(unit=unit, needs=need_of[begin : begin + len(own)]))
            begin += len(own)
        return FlowShape(sources=source_of, users=tuple(users), fixed=fixed, per_byte=per_byte)


def _index(items: Sequence[_Item]) -> tuple[list[_Item], Ints]:
    """Distinct items in order of appearance, and the number of each item among them."""
    number: dict[_Item, int] = {}
    positions = [number.setdefault(item, len(number)) for item in items]
    return list(number), np.array(positions, dtype=np.int64)
