"""The role of a choice of an op (data, sequence, expert or tensor parallelism), and which axes admit it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from torch import fx

from autopar.ir.analysis.matrix_factors import factors_of_matrices
from autopar.ir.analysis.op_clusters import BATCH, OpCluster
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.attention import QUERIES, is_attention
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Choice, factors_of_choice
from autopar.ir.rules.moe import EXPERTS
from autopar.search.problem.annotation_limits import agrees
from autopar.search.problem.constraints import Constraints, NoOption, role_of_axis
from autopar.search.problem.forbidden_placements import forbidden_choices
from autopar.search.problem.workload import Workload

# What people call what an axis is for.
PURPOSES = {"dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}

# Share of the model's floating point operations from which an op, in all its repeats, counts as part of its work.
# Chosen: the router of a mixture of experts, which no axis need divide, has less (of Mixtral 8x7B 8 in 100,000).
HEAVY = 1e-3


def role_of(workload: Workload, node: fx.Node, choice: Choice) -> str:
    """ "dp", "cp", "ep" or "tp"; "" for replicated ops and partial sums passed on.

    Rows that are not of the batch are a sequence, also where no step input says so (patches of an image, frames): those
    of an op that reads a matrix, and the queries of an attention. Dividing them leaves the matrix whole.
    """
    factors = factors_of_choice(choice)
    if not factors:
        return ""
    if EXPERTS in factors:
        return "ep"
    if workload.roles.batch.get(node) in factors:
        return "dp"
    if any(f in workload.roles.sequence.get(node, ()) for f in factors):
        return "cp"
    of_matrices = factors_of_matrices(workload.analysis, node)
    rows = not of_matrices.intersection(factors) if of_matrices else is_attention(node) and QUERIES in factors
    return "cp" if rows else "tp"


def divides_experts_axes(batch: int, mesh: Mesh, constraints: Constraints) -> bool:
    """Whether the axes for experts can divide the batch too, in as many microbatches as are asked for."""
    ranks = prod(axis.size for axis in mesh.axes if role_of_axis(axis.name) in ("dp", "ep"))
    return batch % (ranks * (constraints.num_microbatches or 1)) == 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of a cluster's leader. stores: of the parameters that members read, "whole", "sharded" or "partial"."""

    role: str
    others: frozenset[str]
    experts: bool
    stores: str


@dataclass(frozen=True, slots=True)
class Choices:
    """Properties of the choices of a model's clusters, on any mesh; cached."""

    workload: Workload
    known: dict[tuple[int, Choice], _Choice] = field(default_factory=dict)

    def of(self, group: OpCluster, choice: Choice) -> _Choice:
        """Properties of one choice of a cluster."""
        key = (group.index, choice)
        if key not in self.known:
            assert group.leader is not None
            factors = factors_of_choice(choice)
            # Roles of the factors that share an axis with experts: of tokens that are dispatched.
            others = {role_of(self.workload, group.leader, factor) for factor in factors} - {"ep"}
            self.known[key] = _Choice(
                role=role_of(self.workload, group.leader, choice),
                others=frozenset(others),
                experts=not self.workload.expert_factors.get(group.leader, frozenset()).isdisjoint(factors),
                stores=self._stores(group, choice),
            )
        return self.known[key]

    def _stores(self, group: OpCluster, choice: Choice) -> str:
        parameters = self.workload.captured.parameters
        stores = "whole"
        for member in group.members:
            for position, operand in enumerate(tensor_operands(member)):
                if operand.op == "placeholder" and operand.name in parameters:
                    value, _ = self.workload.rule(member).operand(position, group.follow[choice][member])
                    if value.is_partial():
                        return "partial"
                    if not value.is_replicate():
                        stores = "sharded"
        return stores


class Allowed(Protocol):
    """The choices that each cluster may make on each axis of a mesh, and those on several axes at once that it may
    not."""

    def __call__(self, group: OpCluster, axis: int) -> tuple[Choice, ...]: ...

    def forbidden(self, group: OpCluster) -> tuple[tuple[tuple[int, Choice], ...], ...]:
        """Joint choices on mesh axes, by position, that the leader of ``group`` may not make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The choices that each cluster may make on each axis of a mesh.

    data_axes: axes that ZeRO is to shard over: no parameter may be sharded on them, but for experts. An axis for
    experts then divides the step inputs.
    batch_axes: if given, exactly these axes divide the step inputs. batch_size: samples of a step, None if it is the
    captured batch.
    """

    choices: Choices
    mesh: Mesh
    constraints: Constraints
    data_axes: tuple[int, ...] = ()
    batch_axes: tuple[int, ...] | None = None
    batch_size: int | None = None
    known: dict[tuple[int, int], tuple[Choice, ...]] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        """The workload that the rules are for."""
        return self.choices.workload

    def __call__(self, group: OpCluster, axis: int) -> tuple[Choice, ...]:
        key = (group.index, axis)
        if key not in self.known:
            self.known[key] = self._find(group, axis)
        return self.known[key]

    def forbidden(self, group: OpCluster) -> tuple[tuple[tuple[int, Choice], ...], ...]:
        """Joint choices on mesh axes, by position, that the leader may not make."""
        if not self.constraints.forbidden:
            return ()
        return forbidden_choices(self.workload, self.constraints.forbidden, group, self.mesh.names)

    def refusal(self, group: OpCluster, axis: int, choice: Choice) -> str:
        """Why the ops of a cluster may not make a choice on an axis, where they make none on others; "" if they may."""
        assert group.leader is not None
        name, size = self.mesh.names[axis], self.mesh.axes[axis].size
        known = self.choices.of(group, choice)
        if not self._may(group, axis, choice):
            return f"that is {PURPOSES[known.role]} parallelism, which the axis is not for"
        if not self._stores(group, axis, choice):
            return "ZeRO shards its parameter there" if known.stores == "sharded" else "its parameter would be a sum"
        if not self._agrees(group, name, choice):
            return "autopar.constrain fixes what it is there"
        if not group.allows(tuple(choice if a == axis else None for a in range(len(self.mesh))), self.mesh):
            return f"not every op of it divides by {size}"
        return ""

    def _find(self, group: OpCluster, axis: int) -> tuple[Choice, ...]:
        name = self.mesh.names[axis]
        if group.leader is None:
            if self.batch_axes is not None:
                return (BATCH,) if axis in self.batch_axes else (None,)
            if role_of_axis(name) == "dp" or (role_of_axis(name) == "ep" and axis in self.data_axes):
                return (BATCH,)
            return (None, BATCH) if self.constraints.may(name, "dp") else (None,)
        allowed = [c for c in group.choices if self._may(group, axis, c) and self._stores(group, axis, c)]
        agreed = [c for c in allowed if self._agrees(group, name, c)]
        if not agreed:
            raise NoOption(
                f"no way to compute {group.leader.name} ({group.leader.meta.get('source', 'no source line')}) on mesh "
                f"axis {name!r} agrees with what autopar.constrain fixes there.\n  its choices: "
                f"{', '.join(map(str, allowed))}\n  try: another dimension, or leave the axis out of the placements"
            )
        return tuple(self._put_to_use(group, axis, agreed))

    def _agrees(self, group: OpCluster, name: str, choice: Choice) -> bool:
        return all(agrees(self.workload, self.constraints, m, group.follow[choice][m], name) for m in group.members)

    def _put_to_use(self, group: OpCluster, axis: int, allowed: list[Choice]) -> list[Choice]:
        """A pinned axis is there to be used: what can divide the model's work on it has to.

        A heavy op takes a factor of the axis' role where one divides (an attention may take heads for the sequence),
        and on an axis for experts, if it has none, the batch; with sequence parallelism asked for, the ops between
        them are divided too, by the sequence or what the tensors around them are divided by. The rest, and what does
        not divide, may still be repeated.
        """
        assert group.leader is not None
        wanted_role = role_of_axis(self.mesh.names[axis])
        has_experts = group.leader in self.workload.expert_factors
        if has_experts and wanted_role in self.constraints.experts_within:
            return self._spread(group, axis, allowed)
        if self.forbidden(group):
            return allowed  # what is left when its usual choice is ruled out is the question
        flops = self.workload.rule(group.leader).flops * self.workload.repeats.get(group.leader, 1)
        heavy = flops >= HEAVY * self.workload.forward_flops
        between = wanted_role == "tp" and not heavy and self.constraints.sequence_parallel
        wanted = wanted_role if heavy or between else ""
        if wanted == "ep" and not has_experts:
            batch = self.batch_size or self.workload.captured.batch_size
            wanted = "dp" if divides_experts_axes(batch, self.mesh, self.constraints) else ""
        roles = {wanted}
        if between:
            roles = {"tp", "cp"}
        elif wanted == wanted_role == "cp" and is_attention(group.leader):
            roles = {"cp", "tp"}
        elif has_experts and wanted in ("cp", "tp"):
            roles = {"cp", "ep", wanted}
        used = [c for c in allowed if wanted and self._plays(group, axis, c) in roles]
        return self._dividing(group, axis, used) or allowed

    def _spread(self, group: OpCluster, axis: int, allowed: list[Choice]) -> list[Choice]:
        """The choices that spread experts over an axis. Raises NoOption where there is none."""
        found = self._dividing(group, axis, [c for c in allowed if self.choices.of(group, c).experts])
        if not found:
            assert group.leader is not None
            raise NoOption(
                f"the experts of {group.leader.name} ({group.leader.meta.get('source', 'no source line')}) cannot be "
                f"spread over mesh axis {self.mesh.names[axis]!r} of {self.mesh.sizes[axis]} ranks.\n"
                f"  its choices there: {', '.join(str(c or '*') for c in allowed)}\n"
                "  try: a smaller --ep, or no --expert-capacity, which counts tokens in the order of the sequence"
            )
        return found

    def _dividing(self, group: OpCluster, axis: int, choices: list[Choice]) -> list[Choice]:
        """Those of the choices that divide the sizes of all members, where they make none on other axes."""
        alone = (tuple(c if a == axis else None for a in range(len(self.mesh))) for c in choices)
        return [c for c, joint in zip(choices, alone, strict=True) if group.allows(joint, self.mesh)]

    def _plays(self, group: OpCluster, axis: int, choice: Choice) -> str:
        """The role of a choice on an axis: matrices of a stack are experts on one for experts, else of a tensor."""
        known = self.choices.of(group, choice)
        return "ep" if known.experts and role_of_axis(self.mesh.names[axis]) == "ep" else known.role

    def _may(self, group: OpCluster, axis: int, choice: Choice) -> bool:
        assert group.leader is not None
        known = self.choices.of(group, choice)
        role, name = self._plays(group, axis, choice), self.mesh.names[axis]
        if role == "ep" and self.constraints.may(name, role):
            return role_of_axis(name) == "ep" or all(self.constraints.may(name, r) for r in known.others)
        if not role or self.constraints.may(name, role):
            return True
        if role_of_axis(name) != "cp":
            return False
        # Tokens of pieces of a sequence may travel to experts, and an attention may have heads for the sequence.
        if role == "ep":
            return known.others == {"cp"} and self.constraints.may_spread_over("cp")
        return role == "tp" and is_attention(group.leader)

    def _stores(self, group: OpCluster, axis: int, choice: Choice) -> bool:
        """A parameter cannot be stored as partial sums, nor sharded on a data axis."""
        known = self.choices.of(group, choice)
        if known.stores != "sharded" or axis not in self.data_axes:
            return known.stores != "partial"
        if role_of_axis(self.mesh.names[axis]) == "ep":
            return known.experts and (self.batch_axes is None or axis in self.batch_axes)
        return known.experts


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The choices that any of several rules for a mesh allows; the rules differ in the axes that ZeRO takes."""

    rules: tuple[Rules, ...]
    known: dict[tuple[int, int], tuple[Choice, ...]] = field(default_factory=dict)

    def __call__(self, group: OpCluster, axis: int) -> tuple[Choice, ...]:
        key = (group.index, axis)
        if key not in self.known:
            found: dict[Choice, None] = {}
            refusal: NoOption | None = None
            for rules in self.rules:
                try:
                    found.update(dict.fromkeys(rules(group, axis)))
                except NoOption as error:
                    refusal = error
            if refusal is not None and not found:
                raise refusal
            self.known[key] = tuple(found)
        return self.known[key]

    def forbidden(self, group: OpCluster) -> tuple[tuple[tuple[int, Choice], ...], ...]:
        """Joint choices on mesh axes, by position, that the leader may not make; alike in all configurations."""
        return self.rules[0].forbidden(group)
