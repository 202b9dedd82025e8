"""From a workload and prices to the abstract instance of the inner problem.

The variables are the op clusters, in their order. The labels of a variable number the options of its cluster, the
assignments that constraints and divisibility leave. Costs are seconds of a step: those of a microbatch are multiplied
by the number of microbatches and by the repeats of the block.

    cost of a label     ops of the cluster, forward and backward; cast, gradient reduction and optimiser of the
                        parameters that it stores; memory weight times their state and the activations saved
    factors             redistributions of every transfer, forward and backward; later uses of a parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
from torch import fx

from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.memory.saved_tensors import Saved
from autopar.ir.analysis.derived_parameters import left_to_sum
from autopar.ir.analysis.matrix_products import is_product
from autopar.ir.analysis.op_clusters import OpCluster
from autopar.ir.placement import Partial
from autopar.ir.rule import Assignment
from autopar.search.assign.instance import Factor, Floats, Instance, Ints, User
from autopar.search.pricing.cluster_options import Options
from autopar.search.pricing.placement_codes import (
    FactorPattern,
    ParameterPattern,
    decode,
    decode_need,
    encode_need,
    need_code,
    rows_class,
)
from autopar.search.pricing.price_cache import FactorShape
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.allowed_choices import Allowed
from autopar.search.problem.arrivals import Transfer
from autopar.search.problem.constraints import NoOption
from autopar.search.problem.workload import ParameterGroup, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Terms that the inner objective adds to seconds of compute and redistribution.

    sync: exposed share of the gradient communication; the rest runs beside compute, which it slows down. masters: share
    that counts of the work on float32 parameters, which ZeRO divides (optimiser, casts). state, activations, working:
    seconds per byte of parameter state, of saved activations, and of the gradients of the op that has the most of them.
    rematerialise: fewer activations are saved where recomputation is cheaper, op by op.
    """

    sync: float = 1.0
    masters: float = 1.0
    state: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    rematerialise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """An instance and the options of the clusters that its labels number."""

    instance: Instance
    options: tuple[Options, ...]

    def assignments(self, labelling: tuple[int, ...]) -> tuple[Assignment, ...]:
        """Assignment of each op cluster under a labelling."""
        return tuple(own.assignment(option) for own, option in zip(self.options, labelling, strict=True))


def build(pricings: Sequence[Pricing], allowed: Allowed, weights: Weights) -> Built:
    """The instance of one configuration. Deterministic.

    With ``pricings`` of several configurations that differ only in ZeRO, one instance for all of them: each parameter
    costs as much as under the cheapest of them, so no optimum of one of them is below that of this instance.
    """
    return _Builder(pricings, allowed, weights).run()


def options_of(pricing: Pricing, group: OpCluster, allowed: Allowed) -> Options:
    """The options of a cluster that divide every factor of every member."""
    mesh, known = pricing.mesh, pricing.moves.options
    choices = tuple(allowed(group, axis) for axis in range(len(mesh)))
    forbidden = allowed.forbidden(group)
    key = (group.index, pricing.parts, choices, forbidden)
    if key not in known:
        where = {choice: pick for pick, choice in enumerate(group.choices)}
        every = list(product(*([where[choice] for choice in own] for own in choices)))
        picks = np.array(every, dtype=np.int64).reshape(len(every), len(mesh))
        picks = picks[pricing.ops.codes.allows(group, picks, mesh, pricing.parts)]
        for one in forbidden:
            picks = picks[~np.all([picks[:, axis] == where.get(choice, -1) for axis, choice in one], axis=0)]
        if not len(picks):
            what = group.leader.name if group.leader is not None else "the step inputs"
            raise NoOption(
                f"{what} cannot be divided as pinned on mesh {mesh}: its sizes do not divide"
                f"{', or what is left is forbidden' if forbidden else ''}.\n"
                f"  its choices: {dict(zip(mesh.names, choices, strict=True))}\n"
                "  try: other degrees, fewer microbatches, or other placements in autopar.constrain"
            )
        # Most numbers of microbatches leave the same options.
        same = (group.index, picks.tobytes())
        if same not in known:
            known[same] = Options.made(group, mesh, picks)
        known[key] = known[same]
    return known[key]


class _Builder:
    def __init__(self, pricings: Sequence[Pricing], allowed: Allowed, weights: Weights) -> None:
        self.pricings = pricings
        self.pricing = pricing = pricings[0]
        self.workload: Workload = pricing.workload
        self.codes = pricing.ops.codes
        self.weights = weights
        self.groups = self.workload.clusters.clusters
        self.count, self.parts = pricing.num_microbatches, pricing.parts
        self.options = tuple(options_of(pricing, group, allowed) for group in self.groups)
        self.costs = [self._seconds(own) for own in self.options]
        self.factors: list[Factor] = []
        self._classes: dict[float, float] = {}
        own = self.workload.clusters.inputs.index
        every = range(len(self.options[own]))
        self.costs[own] += [self.count * pricing.feeding_s(self.options[own].assignment(option)) for option in every]

    def run(self) -> Built:
        if self.weights.activations:
            self._add_kept()
        if self.weights.working:
            self._add_working()
        for number, group in enumerate(self.workload.parameters):
            self._add_parameter(number, group)
        for number, transfer in enumerate(self.workload.transfers):
            self._add_transfer(number, transfer)
        return Built(instance=Instance(costs=tuple(self.costs), factors=tuple(self.factors)), options=self.options)

    def _seconds(self, options: Options) -> Floats:
        """Seconds of a step of the members of a cluster, under each option."""
        found = options.memo.get(self.parts)
        if found is None:
            found = options.memo[self.parts] = self._alone(options) + self._inside(options)
        seconds: Floats = self.count * found
        return seconds

    def _alone(self, options: Options) -> Floats:
        """Without the collectives inside ops: it depends on the degrees only."""
        totals = []
        for degrees, option in zip(options.degrees, options.first.tolist(), strict=True):
            key = (options.group.index, self.parts, degrees.tobytes())
            total = self.pricing.ops.totals.get(key)
            if total is None:
                total = self.pricing.ops.totals[key] = sum(
                    self.workload.repeats[node] * self._time(node, option).total_s for node in options.group.members
                )
            totals.append(total)
        return np.array(totals)[options.of]

    def _time(self, node: fx.Node, option: int) -> OpTime:
        """One microbatch of one op alone, under an option of its cluster."""
        assignment = self.options[self.workload.cluster_of(node).index].member(node, option)
        return self.pricing.ops.time(node, assignment, self.pricing.mesh, self.parts)

    def _inside(self, options: Options) -> Floats:
        """Collectives inside ops."""
        seconds = np.zeros(len(options))
        for node in options.group.members:
            lowered = self.workload.rule(node).lowered
            if not lowered:
                continue
            for option in range(len(options)):
                assignment = options.member(node, option)
                if any(choice in lowered for choice in assignment):
                    seconds[option] += self.workload.repeats[node] * self.pricing.lowering(node, assignment).total_s
        return seconds

    def _bytes(self, tensor: Saved) -> Floats:
        """Bytes that a rank holds of a tensor for one microbatch, under each option of its op."""
        options = self.options[self.workload.cluster_of(tensor.node).index]
        mesh = self.pricing.mesh
        local = [
            tensor.local_bytes(options.member(tensor.node, option), mesh, self.parts)
            for option in options.first.tolist()
        ]
        return np.array(local)[options.of]

    def _add_working(self) -> None:
        """The peak while gradients are made, at least what the op with the largest tensors needs."""
        largest = max(
            (
                tensors
                for activations in self.workload.kept(self.pricing.memory).blocks
                for tensors in activations.backward.working()
                if tensors
            ),
            key=lambda tensors: sum(tensor.num_bytes for tensor in tensors),
            default=(),
        )
        for tensor in largest:
            self.costs[self.workload.cluster_of(tensor.node).index] += self.weights.working * self._bytes(tensor)

    def _add_kept(self) -> None:
        for node, tensors in self.workload.kept(self.pricing.memory).surely.items():
            index = self.workload.cluster_of(node).index
            price = self.weights.activations * np.sum([self._bytes(tensor) for tensor in tensors], axis=0)
            if self.weights.rematerialise:
                price = np.minimum(price, self._rematerialised(node))
            self.costs[index] += self.workload.repeats[node] * price

    def _rematerialised(self, node: fx.Node) -> Floats:
        """Least cost of an op if its block is rematerialised: its recomputation, or its saved results.

        Products are saved after their reduction; that is no less than an equal part for each rank.
        """
        options = self.options[self.workload.cluster_of(node).index]
        forward = [self._time(node, option).forward_s for option in options.first.tolist()]
        least: Floats = self.count * np.array(forward)[options.of]
        if not is_contraction(node, self.workload.rule(node)):
            return least
        kept = np.zeros(len(options))
        for tensor in self.workload.kept(self.pricing.memory).contracted[node]:
            whole = tensor.num_bytes / (self.parts if tensor.carries_batch else 1)
            divided = whole / self.pricing.mesh.size
            kept += divided if is_product(node.target) else self._bytes(tensor)
        return np.minimum(least, self.weights.activations * kept)

    def _parameter_price(self, group: ParameterGroup, uses: tuple[int, ...]) -> float:
        """Cost of all parameters of a group. uses: codes of their needs."""
        weights, found = self.weights, inf
        for pricing in self.pricings:
            price = pricing.parameter_seconds(group, uses)
            seconds = price.micro_s + weights.masters * price.masters_s
            seconds += weights.sync * price.sync_s + (1.0 - weights.sync) * price.lost_s
            found = min(found, (seconds + weights.state * price.state_bytes) / price.numel)
        return found * group.numel * len(group.names)

    def _add_parameter(self, number: int, group: ParameterGroup) -> None:
        variables = [self.workload.cluster_of(node).index for node, _ in group.uses]
        key = (number, *(self.options[variable].code for variable in variables))
        known = self.pricing.moves.known.stored
        shape = known.get(key)
        if shape is None:
            shape = known[key] = self._stored(group, variables)
        alone = np.array([self._parameter_price(group, uses) for uses in shape.states])
        self.costs[variables[0]] += alone[shape.state_of]
        for user, wanted in shape.later:
            # What a later user adds, seen pairwise: exact for two users, as tied weights are.
            cost = np.zeros((len(shape.states), len(wanted)))
            for need, use in enumerate(wanted):
                for state, uses in enumerate(shape.states):
                    cost[state, need] = max(0.0, self._parameter_price(group, (*uses, use)) - alone[state])
            self.factors.append(Factor(producer=variables[0], sources=shape.state_of, users=(user,), cost=cost))

    def _stored(self, group: ParameterGroup, variables: list[int]) -> ParameterPattern:
        needs = [self._needs(node, position) for node, position in group.uses]
        own = np.stack(
            [need for need, variable in zip(needs, variables, strict=True) if variable == variables[0]], axis=1
        )
        states, state_of = np.unique(own, axis=0, return_inverse=True)
        later = []
        for need, variable in zip(needs, variables, strict=True):
            if variable != variables[0]:
                wanted, need_of = np.unique(need, return_inverse=True)
                later.append((User(variable=variable, needs=need_of), wanted.tolist()))
        return ParameterPattern(
            states=[tuple(state) for state in states.tolist()], state_of=state_of.reshape(-1), later=later
        )

    def _needs(self, node: fx.Node, position: int) -> Ints:
        """Codes of the needs of an op's operand, under each of its options."""
        options = self.options[self.workload.cluster_of(node).index]
        return need_code(*(options.layouts(of_pick) for of_pick in self.codes.need(node, position)))

    def _add_transfer(self, number: int, transfer: Transfer) -> None:
        """Add a factor for a transfer. Its shape depends on the options of its clusters and the rows only: it is
        cached."""
        variables = self.workload.transfer_variables[number]
        rows = self._rows_class(transfer.tensor.rows_of_microbatch(self.parts))
        key = (number, rows, *(id(self.options[variable]) for variable in variables))
        shape = self.pricing.moves.shapes.get(key)
        if shape is None:
            shape = self.pricing.moves.shapes[key] = self._shape(
                transfer, self._pattern(number, transfer, variables), rows
            )
        if not shape.costs:
            return
        times = self.count * len(transfer.blocks)
        cost = times * (shape.fixed + shape.per_byte * transfer.tensor.bytes_of_microbatch(self.parts))
        for (axes, pieces), where in shape.summed.items():
            rate = min(self._sum_rate(pricing, axes) for pricing in self.pricings)
            share = len(transfer.blocks) * transfer.tensor.numel / pieces
            cost = cost + share * rate * where
        self.factors.append(Factor(producer=variables[0], sources=shape.sources, users=shape.users, cost=cost))

    def _rows_class(self, rows: float) -> float:
        found = self._classes.get(rows)
        if found is None:
            found = self._classes[rows] = rows_class(rows, self.pricing.mesh)
        return found

    def _sum_rate(self, pricing: Pricing, axes: tuple[int, ...]) -> float:
        """Seconds that an element of a gradient adds to be summed over axes, once a step."""
        # ZeRO sums over its axes whatever the gradient is, and is paid for with the parameter.
        own = tuple(axis for axis in axes if not pricing.zero or axis not in pricing.data_axes)
        if not own:
            return 0.0
        exposed, lost = self.weights.sync, pricing.moves.fabric.lost(own)
        rate = pricing.moves.sync_rate(own, 0, self.workload.precision).total_s(self.count)
        return (exposed + (1.0 - exposed) * lost) * rate

    def _shape(self, transfer: Transfer, pattern: FactorPattern, rows: float) -> FactorShape:
        moves, summed = self.pricing.moves, dict[tuple[tuple[int, ...], int], Floats]()
        if pattern.numbers is None:
            fixed, per_byte = self._passed(pattern.states, pattern.wanted, rows, summed)
        else:
            fixed, per_byte = moves.table(pattern.numbers, rows, self.pricing.shares(transfer))
        return FactorShape(sources=pattern.sources, users=pattern.users, fixed=fixed, per_byte=per_byte, summed=summed)

    def _pattern(self, number: int, transfer: Transfer, variables: Sequence[int]) -> FactorPattern:
        """Pattern of a transfer, which depends on the options of its clusters, on all meshes with so many axes."""
        moves = self.pricing.moves.known
        key = (number, *(self.options[variable].code for variable in variables))
        found = moves.patterns.get(key)
        if found is None:
            states, sources = np.unique(
                self.options[variables[0]].layouts(self.codes.tensor(transfer.tensor)), return_inverse=True
            )
            needs = [self._needs(node, position) for node, position in transfer.uses]
            wanted, need_of = np.unique(np.concatenate(needs), return_inverse=True)
            derived = transfer.tensor.node in self.workload.analysis.derived
            parts = np.split(need_of, np.cumsum([len(own) for own in needs])[:-1])
            found = moves.patterns[key] = FactorPattern(
                states=states,
                wanted=wanted,
                numbers=None if derived else moves.numbers(states, wanted, transfer.tensor.differentiable),
                sources=sources,
                users=tuple(
                    User(variable=variable, needs=part) for variable, part in zip(variables[1:], parts, strict=True)
                ),
            )
        return found

    def _passed(
        self, sources: Ints, wanted: Ints, rows: float, summed: dict[tuple[tuple[int, ...], int], Floats]
    ) -> tuple[Floats, Floats]:
        """``MeshPrices.table`` for results of derived ops, if partial sums pass wherever the result is whole and users
        give some.

        That is optimistic where other users of it give none. Enters the sums that remain into ``summed``.
        """
        num_axes = len(self.pricing.mesh)
        layouts = [decode(source, num_axes) for source in sources.tolist()]
        left = np.zeros((len(sources), len(wanted)), dtype=np.int64)
        for column, (value, grad) in enumerate(decode_need(need, num_axes) for need in wanted.tolist()):
            for row, layout in enumerate(layouts):
                whole = (axis for axis in range(num_axes) if layout[axis].is_replicate() and value[axis].is_replicate())
                axes = tuple(axis for axis in whole if grad[axis] == Partial())
                left[row, column] = encode_need(value, left_to_sum(grad, axes))
                if axes:
                    key = axes, self.pricing.pieces(layout)
                    summed.setdefault(key, np.zeros(left.shape))[row, column] = 1.0
        needs, number = np.unique(left, return_inverse=True)
        moves = self.pricing.moves
        fixed, per_byte = moves.table(moves.known.numbers(sources, needs, True), rows)
        number = number.reshape(left.shape)
        return np.take_along_axis(fixed, number, 1), np.take_along_axis(per_byte, number, 1)
