"""Share of a model's work that a mesh axis divides; the ops that every rank of the axis computes whole, and why.

Tensor parallelism can degenerate: a layer whose factors do not divide, or whose op no rule takes apart, is computed by
every rank of the axis; one that is divided along the sequence alone keeps its matrices whole on all of them. The plan
is still right, so somebody has to say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.scans import is_scan
from autopar.ir.analysis.matrix_factors import factors_of_matrices
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.assign import assignment_of, spread
from autopar.ir.plan import Plan
from autopar.ir.rule import factors_of_choice
from autopar.ir.rules import known_rule
from autopar.ir.rules.call import call_of
from autopar.search.predict.communications import name_of
from autopar.search.problem.allowed_choices import Choices, Rules
from autopar.search.problem.constraints import role_of_axis
from autopar.search.problem.constraints_of_plan import constraints_like, mesh_like
from autopar.search.problem.workload import Workload

# An axis that divides less of its work than this is worth a line. Chosen. It changes what is said, and no plan.
ENOUGH = 0.95
# Forward, and the gradients of both operands of a product.
_PASSES = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOp:
    """An op that every rank of an axis repeats.

    name: ``BLOCK/OP`` as in the plan. repeats: blocks that have it. flops: of a step, all of them together. reason: why
    no factor of it is on the axis.
    """

    name: str
    repeats: int
    flops: float
    reason: str

    def __str__(self) -> str:
        times = f" × {self.repeats}" if self.repeats > 1 else ""
        return f"{self.name}{times} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedFlops:
    """The work of an axis: floating point operations of a step in products (linear layers, attention, convolutions).

    divided, total: over the whole batch, all ranks together. whole: the ops that are not divided, the heaviest first.
    """

    axis: str
    size: int
    divided: float
    total: float
    whole: tuple[WholeOp, ...]

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 for a model without products."""
        return self.divided / self.total if self.total else 1.0

    @property
    def is_degenerate(self) -> bool:
        """Whether the axis divides less than ``ENOUGH`` of its work."""
        return self.share < ENOUGH


def divided_flops(captured: CapturedModel, plan: Plan, axis: str, *, workload: Workload | None = None) -> DividedFlops:
    """FLOPs of ``captured`` that ``axis`` of ``plan`` divides.

    On an axis for experts (``ep``) that is the work of the experts; on any other, of all products. An op counts as
    divided if a factor of it is on the axis. On an axis for experts these are its experts; on one for tensors
    (``tp``), the factors of its matrix, if the op reads a parameter that is one. workload: the analysis of
    ``captured``, if it is there already. Raises KeyError for an axis that the plan does not have.
    """
    workload = workload or Workload.for_plan(captured, plan)
    mesh = mesh_like(plan)
    place = list(plan.mesh).index(axis) if axis in plan.mesh else _unknown(axis, plan)
    rules = Rules(choices=Choices(workload), mesh=mesh, constraints=constraints_like(plan))
    role = role_of_axis(axis)
    divided = total = 0.0
    whole: list[WholeOp] = []
    for node, assignment in spread(workload.analysis, assignment_of(workload.analysis, plan)).items():
        if not _multiplies(workload, node) or (role == "ep" and node not in workload.expert_factors):
            continue
        flops, wanted = _PASSES * workload.rule(node).flops * workload.repeats[node], _wanted(workload, node, role)
        total += flops
        if not wanted.isdisjoint(factors_of_choice(assignment[place])):
            divided += flops
        else:
            reason = _reason(rules, node, place, wanted)
            whole.append(
                WholeOp(name=name_of(workload, node), repeats=workload.repeats[node], flops=flops, reason=reason)
            )
    whole.sort(key=lambda op: -op.flops)
    return DividedFlops(axis=axis, size=plan.mesh[axis], divided=divided, total=total, whole=tuple(whole))


def divided_by_axes(captured: CapturedModel, plan: Plan, *, workload: Workload | None = None) -> list[DividedFlops]:
    """``divided_flops`` of every axis of ``plan`` for tensors or experts that has several ranks."""
    workload = workload or Workload.for_plan(captured, plan)
    axes = [name for name, size in plan.mesh.items() if size > 1 and role_of_axis(name) in ("tp", "ep")]
    return [divided_flops(captured, plan, axis, workload=workload) for axis in axes]


def _unknown(axis: str, plan: Plan) -> int:
    raise KeyError(f"the plan has no mesh axis {axis!r}, but {', '.join(plan.mesh) or 'none'}")


def _multiplies(workload: Workload, node: fx.Node) -> bool:
    """Whether an op counts as work: a product, a scan, or an op that is only known by what it costs."""
    rule = workload.rule(node)
    return bool(rule.flops) and (is_contraction(node, rule) or is_scan(node) or known_rule(call_of(node)) is None)


def _wanted(workload: Workload, node: fx.Node, role: str) -> frozenset[str]:
    """The factors of an op that an axis of a role is there to divide."""
    if role == "ep":
        return workload.expert_factors[node]
    return (factors_of_matrices(workload.analysis, node) if role == "tp" else frozenset()) or frozenset(
        workload.rule(node).sizes
    )


def _reason(rules: Rules, node: fx.Node, place: int, wanted: frozenset[str]) -> str:
    """Why none of the ``wanted`` factors of an op is on an axis."""
    workload, group, size = rules.workload, rules.workload.cluster_of(node), rules.mesh.sizes[place]
    rule = workload.rule(node)
    if known_rule(call_of(node)) is None:
        return "no rule says how to divide it"
    if group.leader is None:
        return "it is computed ahead of all blocks"
    batch = workload.roles.batch.get(node)
    factors = {
        choice: own
        for choice in group.choices
        if (own := wanted.intersection(factors_of_choice(group.follow[choice][node])) - {batch})
    }
    if not factors:
        return "nothing but rows of the batch divides it" if batch is not None else "nothing divides it"
    if not all(rules.refusal(group, place, choice) for choice in factors):
        return "dividing it takes longer"
    odd = {name: rule.sizes[name] for own in factors.values() for name in sorted(own) if rule.sizes[name] % size}
    if odd:
        return f"{', '.join(f'{name} {length}' for name, length in odd.items())} not divisible by {size}"
    return rules.refusal(group, place, next(iter(factors)))
