"""How a tensor moves from the layout it is produced in to the layout a consumer needs.

The consumer states two layouts: of the value, and of the gradient it sends back. Along one mesh axis:

    produced   needed value / gradient     forward           backward
    R          R / R                       -                 -
    R          R / P                       -                 all_reduce
    R          S / S                       split             all_gather
    S          R / R                       all_gather        split
    S          R / P                       all_gather        reduce_scatter
    S(i)       S(j) / S(j)                 all_to_all        all_to_all
    P          R / R                       all_reduce        -
    P          R / P                       all_reduce        all_reduce
    P          S / S                       reduce_scatter    all_gather
    P          P / R                       -                 -
    R          P / R                       divide            -

Over several axes the order matters: when two axes shard one dimension the inner one has to leave it
first and to enter it last, so that pieces stay contiguous and in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard


class Collective(Enum):
    """The collective of one direction of a step along its mesh axis."""

    NONE = "none"
    SPLIT = "split"
    DIVIDE = "divide"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"

    @property
    def communicates(self) -> bool:
        """Whether ranks send anything: not for a local slice or scale."""
        return self not in (Collective.NONE, Collective.SPLIT, Collective.DIVIDE)


@dataclass(frozen=True, slots=True)
class Step:
    """One differentiable move along mesh axis number ``axis``.

    ``gather_dim`` is the tensor dimension that the axis shards before the step, ``shard_dim`` the one
    it shards after it (None where it shards none).
    """

    axis: int
    forward: Collective
    backward: Collective
    gather_dim: int | None = None
    shard_dim: int | None = None


_NONE = Collective.NONE


@lru_cache(maxsize=1 << 18)
def redistribute(source: Layout, value: Layout, grad: Layout) -> tuple[Step, ...]:
    """Steps that turn a tensor in layout ``source`` into ``value`` for a consumer whose gradient has layout ``grad``.

    Each step's backward undoes it for the gradient, so running the steps backwards takes a gradient in
    ``grad`` to ``dual(source)``. The first step acts on the produced tensor.
    """
    current: list[Placement] = list(source)
    shards = [p.dim if isinstance(p, Shard) else None for p in source]
    goals = [p.dim if isinstance(p, Shard) else None for p in value]
    leaving: dict[int, list[int]] = {}
    entering: dict[int, list[int]] = {}
    for dim in {dim for dim in (*shards, *goals) if dim is not None}:
        before = [axis for axis, held in enumerate(shards) if held == dim]
        after = [axis for axis, goal in enumerate(goals) if goal == dim]
        kept = 0
        while kept < min(len(before), len(after)) and before[kept] == after[kept]:
            kept += 1
        leaving[dim], entering[dim] = before[kept:], after[kept:]

    steps: list[Step] = []

    def can_enter(axis: int) -> int | None:
        """The dimension that ``axis`` may start to shard now, if any."""
        goal = goals[axis]
        return goal if goal is not None and not leaving[goal] and entering[goal][:1] == [axis] else None

    def enter(axis: int, dim: int) -> None:
        entering[dim].remove(axis)
        current[axis] = Shard(dim)

    def local_or_moving() -> bool:
        """One step that does not make the tensor larger, if there is one."""
        for axis, placement in enumerate(current):
            dim = can_enter(axis)
            if dim is None:
                continue
            if placement.is_partial():
                steps.append(Step(axis, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, None, dim))
            elif placement.is_replicate():
                steps.append(Step(axis, Collective.SPLIT, Collective.ALL_GATHER, None, dim))
            elif isinstance(placement, Shard) and leaving[placement.dim][-1:] == [axis]:
                leaving[placement.dim].pop()
                steps.append(Step(axis, Collective.ALL_TO_ALL, Collective.ALL_TO_ALL, placement.dim, dim))
            else:
                continue
            enter(axis, dim)
            return True
        return False

    def reducing() -> bool:
        for axis, placement in enumerate(current):
            if placement.is_partial() and not value[axis].is_partial():
                both = value[axis].is_replicate() and grad[axis].is_partial()
                steps.append(Step(axis, Collective.ALL_REDUCE, Collective.ALL_REDUCE if both else _NONE))
                current[axis] = Replicate()
                return True
        return False

    def gathering(*, only_if_final: bool) -> bool:
        for axis, placement in enumerate(current):
            if not isinstance(placement, Shard) or leaving[placement.dim][-1:] != [axis]:
                continue
            final = not isinstance(value[axis], Shard)
            if only_if_final and not final:
                continue
            partial_grad = value[axis].is_replicate() and grad[axis].is_partial()
            back = Collective.REDUCE_SCATTER if partial_grad else Collective.SPLIT
            leaving[placement.dim].pop()
            steps.append(Step(axis, Collective.ALL_GATHER, back, placement.dim, None))
            current[axis] = Replicate()
            return True
        return False

    while local_or_moving() or reducing() or gathering(only_if_final=True) or gathering(only_if_final=False):
        pass

    deferred = [
        Step(axis, _NONE, Collective.ALL_REDUCE)
        for axis, placement in enumerate(source)
        if placement.is_replicate() and value[axis].is_replicate() and grad[axis].is_partial()
    ]
    if deferred:
        steps[_smallest_position(steps) : _smallest_position(steps)] = deferred
    for axis, placement in enumerate(current):
        if value[axis].is_partial() and not placement.is_partial():
            steps.append(Step(axis, Collective.DIVIDE, _NONE))
    return tuple(steps)


def _smallest_position(steps: list[Step]) -> int:
    """Where in ``steps`` the tensor is smallest: after what shrinks it, before the first gather that follows."""
    position = 0
    for number, step in enumerate(steps):
        if step.forward in (Collective.SPLIT, Collective.REDUCE_SCATTER):
            position = number + 1
    return position


def grad_of_use(value: Placement, *, sharded_elsewhere: bool) -> Placement:
    """Gradient placement of an operand used in placement ``value`` on an axis.

    ``sharded_elsewhere``: the axis shards a factor of the op that this operand lacks, so that each rank
    sees only its part of the uses and its gradient is a summand.
    """
    if value.is_partial():
        return Replicate()
    if value.is_replicate() and sharded_elsewhere:
        return Partial()
    return value


def reduces_or_all_to_alls(source: Layout, value: Layout, grad: Layout) -> bool:
    """Whether forward has a reduction or an all-to-all, whose result is no larger than its operand."""
    made = {step.forward for step in redistribute(source, value, grad)}
    return not made.isdisjoint((Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL))
