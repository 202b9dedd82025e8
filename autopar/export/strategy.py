"""The role of each mesh axis of a plan, in the words of other systems: data, tensor, context, expert parallelism.

A plan says which factor of which op is on which axis. What that amounts to is read off the ops that do the work:

    op                    factor                  what it amounts to
    linear, convolution   n k, o c g              tensor parallelism
                          d0 d1 .., b, m          data parallelism on an axis that divides the step inputs, else context
    attention             b                       likewise
                          h g                     tensor parallelism; with the sequence outside, context (Ulysses)
                          s, s&t                  context parallelism: gathered keys, a ring
    mixture of experts    experts, d0&experts     expert parallelism, beside what the other ops do on the axis
                          f                       tensor parallelism inside an expert

An axis is what most of these ops do on it, in all their repeats; ops that do otherwise are ``exceptions``, for targets
whose pattern is fixed. An axis without work on it is ``idle``: its ranks repeat each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from autopar.ir.errors import InexpressiblePlan
from autopar.ir.expert_axes import expert_axes
from autopar.ir.plan import BlockPlan, Plan
from autopar.ir.rule import factors_of_choice
from autopar.ir.rules.moe import EXPERTS
from autopar.search.problem.constraints import role_of_axis

Role = Literal["data", "tensor", "context", "idle"]
Attention = Literal["", "ring", "gathered", "heads"]

_LINEAR = frozenset({"linear", "columns_linear", "addmm", "mm"})
_ATTENTION = frozenset({"attention", "scaled_dot_product_attention"})
_WIDTHS = frozenset({"n", "k", "o", "c", "g", "f", "v"})
_LEAD = re.compile(r"d\d+|b|m")
# Products of many pairs of matrices, and the factor that counts the pairs.
_STACKED = frozenset({"bmm", "baddbmm", "matmul"})
_STACK = re.compile(r"b\d+")
_REPEATED_KEY = re.compile(r":\d+$")


def op_of(key: str) -> str:
    """``linear`` of the op key ``self_attn.q_proj/linear:2``."""
    return _REPEATED_KEY.sub("", key.rpartition("/")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """One mesh axis. experts: whether experts are divided over it, "copied" if each rank has all their tokens.

    attention: how a context axis divides attention. expert_width: whether experts are divided inside.
    """

    name: str
    size: int
    role: Role
    experts: Literal["", "dispatched", "copied"] = ""
    attention: Attention = ""
    expert_width: bool = False


@dataclass(frozen=True)
class Strategy:
    """A plan by the degrees of each kind of parallelism.

    kept_sets: names of what its blocks keep that are levels here (``Plan.in_levels``).
    """

    plan: Plan
    kept_sets: tuple[str, ...] = ()

    @cached_property
    def axes(self) -> tuple[AxisUse, ...]:
        """The use of each axis of the stage mesh, outermost first."""
        return tuple(_axis_use(self.plan, name) for name in self.plan.mesh)

    def of_role(self, role: Role) -> tuple[AxisUse, ...]:
        """Axes of more than one rank with this role."""
        return tuple(axis for axis in self.axes if axis.role == role and axis.size > 1)

    def degree(self, role: Role) -> int:
        """Ranks along all axes with this role."""
        return prod(axis.size for axis in self.of_role(role))

    @property
    def data(self) -> int:
        """Ranks of a stage with rows of their own."""
        return self.degree("data")

    @property
    def tensor(self) -> int:
        """Degree of tensor parallelism."""
        return self.degree("tensor")

    @property
    def context(self) -> int:
        """Degree of context parallelism."""
        return self.degree("context")

    @property
    def idle(self) -> int:
        """Ranks along axes that divide nothing."""
        return self.degree("idle")

    @property
    def experts(self) -> int:
        """Ranks over which experts are divided; they are among the other ranks of the stage."""
        return prod(axis.size for axis in self.axes if axis.experts)

    @property
    def expert_tensor(self) -> int:
        """Ranks over which each expert is divided."""
        return prod(axis.size for axis in self.axes if axis.expert_width)

    @property
    def pipeline(self) -> int:
        """Ranks along the pipeline."""
        return self.plan.num_pipeline_ranks

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.plan.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.plan.batch.num_microbatches

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch on one data rank. Raises InexpressiblePlan if it is not a whole number."""
        size, rest = divmod(self.plan.batch.global_size, self.num_microbatches * self.data)
        if rest:
            raise InexpressiblePlan(
                f"{self.plan.batch.global_size} samples do not divide into {self.num_microbatches} microbatches on "
                f"{self.data} data ranks ({', '.join(axis.name for axis in self.of_role('data'))}).\n"
                f"  try: batch.global_size of {(size + 1) * self.num_microbatches * self.data}"
            )
        return size

    @cached_property
    def has_experts(self) -> bool:
        """Whether the plan places a mixture of experts."""
        return any(op_of(key) == "moe" for block in self.plan.blocks for key in block.ops)

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether what is between the products is divided on a tensor axis, by rows (the sequence)."""
        names = {axis.name for axis in self.of_role("tensor")}
        return any(
            axis in names and _is_lead(choice)
            for block in self.plan.blocks
            for key, axes in block.ops.items()
            if kind_of(op_of(key)) == ""
            for axis, choice in axes.items()
        )

    @property
    def zero_axes(self) -> tuple[AxisUse, ...]:
        """Axes that ZeRO shards over, if the plan has ZeRO: those given, or all on which parameters are whole."""
        if not self.plan.zero:
            return ()
        given = self.plan.shard_axes
        return tuple(
            axis
            for axis in self.axes
            if axis.size > 1 and (axis.role in ("data", "context") if given is None else axis.name in given)
        )

    @property
    def sharded(self) -> int:
        """Data ranks that ZeRO shards over; the others hold copies."""
        return prod(axis.size for axis in self.zero_axes if axis.role == "data")

    @property
    def replicated(self) -> int:
        """Data ranks with the same shard under hybrid sharding; all of them without ZeRO."""
        return self.data // self.sharded

    @property
    def zero_stages(self) -> frozenset[int]:
        """ZeRO stages of the kinds of block."""
        return frozenset(self.plan.zero_of(kind) for kind in range(len(self.plan.blocks)))

    @cached_property
    def exceptions(self) -> tuple[str, ...]:
        """Ops that do otherwise than their axis, in words."""
        found = []
        for block, key, axis in _worked(self.plan):
            use = next(use for use in self.axes if use.name == axis)
            role = _role(self.plan, block, key, axis)
            heads = use.role == "context" and role == "heads"
            fits = role == use.role or heads or (role == "heads" and use.role == "tensor")
            if role != "experts" and not fits and use.role != "idle":
                found.append(f"{block.name} {key}: {block.ops[key].get(axis, 'repeated')} on {axis} ({use.role})")
        return tuple(found)

    def in_words(self) -> str:
        """The degrees on one line."""
        parts = [f"pp {self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"{axis.name} {axis.size} ({self._use(axis)})" for axis in self.axes if axis.size > 1]
        return ", ".join(parts) or "one rank"

    @staticmethod
    def _use(axis: AxisUse) -> str:
        words = [axis.role, *([f"experts {axis.experts}"] if axis.experts else [])]
        return ", ".join(words)


def kind_of(op: str) -> str:
    """``linear``, ``attention`` or ``moe`` for ops that do a model's work; "" for the others."""
    if op in _LINEAR or op.startswith("conv"):
        return "linear"
    if op in _ATTENTION:
        return "attention"
    return "moe" if op == "moe" else ""


def _is_lead(choice: str) -> bool:
    return any(_LEAD.fullmatch(factor) for factor in factors_of_choice(choice))


def _worked(plan: Plan) -> Iterator[tuple[BlockPlan, str, str]]:
    """(block, key, axis) of every op that does work, on every axis of more than one rank."""
    for block in plan.blocks:
        for key in block.ops:
            if kind_of(op_of(key)):
                yield from ((block, key, axis) for axis, size in plan.mesh.items() if size > 1)


def _role(plan: Plan, block: BlockPlan, key: str, axis: str) -> str:
    """What one op does on one axis: a role, "heads" of an attention, or "experts"."""
    choice = block.ops[key].get(axis)
    factors = factors_of_choice(choice)
    kind = kind_of(op_of(key))
    if not factors:
        return "idle"
    if EXPERTS in factors:
        return "experts"
    if kind == "attention":
        if "h" in factors or "g" in factors:
            return "heads"
        if "s" in factors:
            return "context"
    if any(factor in _WIDTHS for factor in factors) and kind != "attention":
        return "tensor"
    if axis in plan.inputs or "b" in factors or (choice == "d0" and _divides_batch(plan, axis)):
        return "data"
    # The batch can be divided on several axes, for an op by one factor; another factor of its rows is the sequence.
    others = {block.ops[key].get(other) for other in plan.inputs}
    return "data" if choice in others else "context"


def _divides_batch(plan: Plan, axis: str) -> bool:
    """Whether an axis that does not divide the step inputs divides the batch of an attention."""
    return any(
        kind_of(op_of(key)) == "attention" and axes.get(axis) == "b"
        for block in plan.blocks
        for key, axes in block.ops.items()
    )


def _axis_use(plan: Plan, name: str) -> AxisUse:
    votes: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    spread = expert_axes(plan)
    experts: Literal["", "dispatched", "copied"] = ""
    if name in spread:
        experts = "dispatched" if spread[name] else "copied"
    width = False
    for block, key, axis in _worked(plan):
        if axis != name:
            continue
        choice, op = block.ops[key].get(axis), op_of(key)
        role = _role(plan, block, key, axis)
        if role != "experts":
            votes[role] += block.repeats
        if op == "moe" and "f" in factors_of_choice(choice):
            width = True
        if kind_of(op) == "attention" and choice is not None:
            attention[_attention(choice)] += block.repeats
    role = _winner(votes, divides_inputs=name in plan.inputs)
    if not experts and role_of_axis(name) == "ep" and _divides_stacks(plan, name):
        experts = "dispatched" if role == "data" else "copied"
    return AxisUse(
        name=name,
        size=plan.mesh[name],
        role=role,
        experts=experts if plan.mesh[name] > 1 else "",
        attention=attention.most_common(1)[0][0] if role == "context" and attention else "",  # type: ignore[arg-type]
        expert_width=width and plan.mesh[name] > 1,
    )


def _divides_stacks(plan: Plan, axis: str) -> bool:
    """Whether an axis divides stacks of matrices, which are experts on an axis for experts."""
    return any(
        op_of(key) in _STACKED and _STACK.fullmatch(axes.get(axis) or "")
        for block in plan.blocks
        for key, axes in block.ops.items()
    )


def _attention(choice: str) -> Attention:
    factors = factors_of_choice(choice)
    if "t" in factors:
        return "ring"
    return "gathered" if "s" in factors else "heads"


def _winner(votes: Counter[str], *, divides_inputs: bool) -> Role:
    """The role of an axis. Heads count for tensor parallelism where products are divided by width, else for context."""
    heads = votes.pop("heads", 0)
    votes.pop("idle", None)
    if heads:
        votes["context" if votes["context"] > votes["tensor"] else "tensor"] += heads
    if not +votes:
        return "data" if divides_inputs else "idle"
    order: tuple[Role, ...] = ("data", "tensor", "context") if divides_inputs else ("tensor", "context", "data")
    return max(order, key=lambda role: votes[role])
