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
from typing import cast

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
# A placement as a number; that of a shard is its dimension. Placements compare slowly.
_REPLICATE, _PARTIAL = -1, -2


def _held(placement: Placement) -> int:
    if placement.is_shard():
        return cast("Shard", placement).dim
    return _PARTIAL if placement.is_partial() else _REPLICATE


@lru_cache(maxsize=1 << 18)
def redistribute(source: Layout, value: Layout, grad: Layout) -> tuple[Step, ...]:
    """Steps that turn a tensor in layout ``source`` into ``value`` for a consumer whose gradient has layout ``grad``.

    Each step's backward undoes it for the gradient, so running the steps backwards takes a gradient in
    ``grad`` to ``dual(source)``. The first step acts on the produced tensor.
    """
    current, goals = [_held(p) for p in source], [_held(p) for p in value]
    summed = [p.is_partial() for p in grad]
    leaving: dict[int, list[int]] = {}
    entering: dict[int, list[int]] = {}
    for dim in {dim for dim in (*current, *goals) if dim >= 0}:
        before = [axis for axis, held in enumerate(current) if held == dim]
        after = [axis for axis, goal in enumerate(goals) if goal == dim]
        kept = 0
        while kept < min(len(before), len(after)) and before[kept] == after[kept]:
            kept += 1
        leaving[dim], entering[dim] = before[kept:], after[kept:]

    steps: list[Step] = []

    def local_or_moving() -> bool:
        """One step that does not make the tensor larger, if there is one."""
        for axis, (held, goal) in enumerate(zip(current, goals, strict=True)):
            if goal < 0 or leaving[goal] or entering[goal][:1] != [axis]:
                continue  # the axis cannot start to shard the dimension now
            if held == _PARTIAL:
                steps.append(Step(axis, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, None, goal))
            elif held == _REPLICATE:
                steps.append(Step(axis, Collective.SPLIT, Collective.ALL_GATHER, None, goal))
            elif leaving[held][-1:] == [axis]:
                leaving[held].pop()
                steps.append(Step(axis, Collective.ALL_TO_ALL, Collective.ALL_TO_ALL, held, goal))
            else:
                continue
            entering[goal].remove(axis)
            current[axis] = goal
            return True
        return False

    def reducing() -> bool:
        for axis, (held, goal) in enumerate(zip(current, goals, strict=True)):
            if held == _PARTIAL != goal:
                both = goal == _REPLICATE and summed[axis]
                steps.append(Step(axis, Collective.ALL_REDUCE, Collective.ALL_REDUCE if both else _NONE))
                current[axis] = _REPLICATE
                return True
        return False

    def gathering(*, only_if_final: bool) -> bool:
        for axis, (held, goal) in enumerate(zip(current, goals, strict=True)):
            if held < 0 or leaving[held][-1:] != [axis] or (only_if_final and goal >= 0):
                continue
            back = Collective.REDUCE_SCATTER if goal == _REPLICATE and summed[axis] else Collective.SPLIT
            leaving[held].pop()
            steps.append(Step(axis, Collective.ALL_GATHER, back, held, None))
            current[axis] = _REPLICATE
            return True
        return False

    while (
        (any(entering.values()) and local_or_moving())
        or (_PARTIAL in current and reducing())
        or (any(leaving.values()) and (gathering(only_if_final=True) or gathering(only_if_final=False)))
    ):
        pass

    deferred = [
        Step(axis, _NONE, Collective.ALL_REDUCE)
        for axis, placement in enumerate(source)
        if summed[axis] and goals[axis] == _REPLICATE and placement.is_replicate()
    ]
    if deferred:
        steps[_smallest_position(steps) : _smallest_position(steps)] = deferred
    for axis, (held, goal) in enumerate(zip(current, goals, strict=True)):
        if goal == _PARTIAL != held:
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


def gathers_only(source: Layout, value: Layout, grad: Layout) -> bool:
    """Whether forward has all-gathers, and nothing else."""
    made = {step.forward for step in redistribute(source, value, grad)} - {_NONE}
    return made == {Collective.ALL_GATHER}


def reduces_or_all_to_alls(source: Layout, value: Layout, grad: Layout) -> bool:
    """Whether forward has a reduction or an all-to-all, whose result is no larger than its operand."""
    made = {step.forward for step in redistribute(source, value, grad)}
    return not made.isdisjoint((Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL))
