"""Records of what ops exchange: redistributions between them, and collectives inside lowered ones.

Moves that several users share are there once, a backward only where a gradient comes back. A block whose activations
are computed again in its backward runs the collectives again that no kept tensor stands behind: all of them at level
``full``, gathers alone at the levels between, and none after the last op that keeps something, where the second run
stops. Where the plan lists what is kept, ``recomputed`` says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.analysis.narrow_activations import reads_narrow, takes_narrow_gradient
from autopar.ir.graph import op_nodes, source, tensor_operands
from autopar.ir.lowered.inside import LocalSizes, Phase
from autopar.ir.lowered.table import INSIDE
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.recomputed import Recomputed
from autopar.ir.placed.records import PIPELINE_AXIS, Cause, Record
from autopar.ir.placed.uses import Move, Use
from autopar.ir.placed.zero_units import zero_units
from autopar.ir.precision import itemsize_of
from autopar.ir.redistribution import Collective
from autopar.ir.rules.saved import saved_for_backward


def op_communication(placed: PlacedModel, num_microbatches: int) -> tuple[Record, ...]:
    """Every collective of a step of ``num_microbatches`` between ops and inside them."""
    return tuple(_Sweep(placed, num_microbatches).records())


@dataclass(slots=True)
class _Moved:
    """What is known of a move. differentiable: a gradient comes back. first: number of the first op that reads it.

    stages: that read it. uses: through it, with the op and the position of its operand, None of a buffer.
    """

    differentiable: bool
    first: int
    stages: set[int]
    uses: list[tuple[Use, fx.Node | None, int]] = field(default_factory=list)

    @property
    def is_narrow(self) -> bool:
        """Whether products by tensor alone read what it makes (``passes.narrow_gathers``)."""
        return all(
            user is not None and reads_narrow(user, position) and is_last(use) and not (use.back or use.share)
            for use, user, position in self.uses
        )

    @property
    def is_narrow_backward(self) -> bool:
        """Whether a product by tensor alone reads the gradient that it takes back, if nothing else has a gradient of
        what it moves."""
        return all(takes_narrow_gradient(use.tensor) and is_last(use) and not use.into for use, _, _ in self.uses)


def is_last(use: Use) -> bool:
    """Whether a use has one move, which is of rows of a microbatch."""
    return len(use.moves) == 1 and not use.total


class _Sweep:
    """Over the ops that a training step runs, in order."""

    def __init__(self, placed: PlacedModel, num_microbatches: int) -> None:
        self.placed, self.num_microbatches = placed, num_microbatches
        self.operands = Operands(placed=placed, results="loss")
        runs = computed(placed.captured)
        self.ops = [node for node in op_nodes(placed.captured.graph) if node in runs]
        # Operands of ops that are gathered in 8 bits; of a gradient no position.
        self.gathered: set[tuple[fx.Node | None, int | None]] = set()

    @cached_property
    def last_kept(self) -> dict[int, int]:
        """Block -> number of its last op that keeps a tensor for backward."""
        flows = self.operands.flow.__contains__
        found = {}
        for number, node in enumerate(self.ops):
            kept = saved_for_backward(node, flows)
            if kept.operands or kept.results or kept.extra_bytes:
                found[self.placed.analysis.block_of(node)] = number
        return found

    @cached_property
    def recomputed(self) -> Recomputed:
        """What runs again in blocks that keep what the plan lists."""
        return Recomputed(self.operands)

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Parameters that are gathered in 8 bits."""
        return frozenset().union(*(unit.narrow for unit in zero_units(self.placed)))

    @cached_property
    def stages(self) -> dict[fx.Node, set[int]]:
        """Op -> the stages that run it: its own, or of the prelude every one that needs it."""
        found: dict[fx.Node, set[int]] = {node: set() for node in self.ops}
        block_of, plan = self.placed.analysis.block_of, self.placed.plan
        for node in reversed(self.ops):
            if block_of(node) != PRELUDE:
                found[node] = {plan.stage_of(block_of(node))}
            for operand in tensor_operands(node):
                if (maker := source(operand)[0]) in found:
                    found[maker] |= found[node]
        return found

    def records(self) -> Iterator[Record]:
        """Redistributions first, then what is inside of ops."""
        moves, firsts = dict[Move, _Moved](), dict[fx.Node, set[Move | None]]()
        for number, user in enumerate(self.ops):
            for position in range(len(tensor_operands(user))):
                use = self.operands.of(user, position)
                for move in use.moves:
                    known = moves.setdefault(move, _Moved(differentiable=False, first=number, stages=set()))
                    known.stages |= self.stages[user]
                    # A gradient comes back through any user that has one.
                    known.differentiable |= user in self.operands.flow and use.tensor in self.operands.flow
                    known.uses.append((use, user, position))
                firsts.setdefault(use.tensor, set()).add(use.moves[0] if use.moves else None)
        for use in self._updates():
            for move in use.moves:
                stages = {0} if move.block == PRELUDE else set()
                known = moves.setdefault(move, _Moved(differentiable=False, first=len(self.ops), stages=stages))
                known.uses.append((use, None, 0))
            firsts.setdefault(use.tensor, set()).add(use.moves[0] if use.moves else None)
        for move, known in moves.items():
            yield from self._of_move(move, known, is_only=len(firsts[move.tensor]) == 1)
        for number, node in enumerate(self.ops):
            yield from self._inside(node, number)
        yield from self._buffers()

    def _buffers(self) -> Iterator[Record]:
        """New values of buffers that several stages have: the one that computes a value hands it to the others."""
        placed, rank_of = self.placed, self.placed.plan.pipelining.rank_of
        readers: dict[str, set[int]] = {}
        for node in self.ops:
            for operand in tensor_operands(node):
                readers.setdefault(operand.name, set()).update(self.stages[node])
        histories = Counter[int]()
        for name, buffer in placed.captured.buffers.items():
            histories.update(readers.get(name, ()) if buffer.history else ())
            if buffer.updated_by is None:
                continue
            new = placed.analysis.names[buffer.updated_by]
            block = placed.analysis.block_of(new)
            stages = readers.get(name, set()) | {0 if block == PRELUDE else placed.plan.stage_of(block)}
            if len(set(map(rank_of, stages))) > 1:
                value = placed.analysis.names[name].meta["val"]
                yield Record(
                    cause="buffer",
                    of=buffer.name,
                    kind="broadcast",
                    phase="forward",
                    axes=(PIPELINE_AXIS,),
                    payload_bytes=float(value.numel() * value.dtype.itemsize),
                    times=1,
                    stages=tuple(sorted(stages)),
                )

        every = tuple(axis.name for axis in placed.mesh.axes if axis.size > 1)
        for stage, count in sorted(histories.items()) if every else ():
            # Once a step, a float32 for the input, the weight and the gradient of each product.
            yield Record(
                cause="buffer",
                of="histories of maxima",
                kind="all_reduce",
                phase="forward",
                axes=every,
                payload_bytes=12.0 * count,
                times=1,
                stages=(stage,),
            )

    def _updates(self) -> Iterator[Use]:
        """Uses of the new values of buffers."""
        for buffer in self.placed.captured.buffers.values():
            if buffer.updated_by is not None:
                yield self.operands.update_of(self.placed.analysis.names[buffer.updated_by])

    def _of_move(self, move: Move, known: _Moved, *, is_only: bool) -> Iterator[Record]:
        """is_only: every use of the tensor is through this move."""
        placed, over_time = self.placed, self.placed.over_time(move.tensor)
        numel = max(prod(placed.local_shape(move.tensor, layout, over_time)) for layout in (move.before, move.after))
        itemsize = itemsize_of(move.tensor.meta["val"].dtype, placed.plan.precision)
        name, axes = move.tensor.name, (placed.mesh.names[move.step.axis],)
        forward, backward = move.step.forward, move.step.backward

        gathers = forward is Collective.ALL_GATHER
        narrow = gathers and known.is_narrow
        narrow_back = forward is Collective.REDUCE_SCATTER and is_only and known.is_narrow_backward
        # Whether it is in 8 bits, and whether ranks agree on the maximum before it.
        made: list[tuple[Collective, Phase, bool, bool]] = []
        if forward.communicates:
            made.append((forward, "forward", narrow, narrow))
            if self._runs_again(move, move.block, known.first, gathers=gathers):
                # Between the levels a maximum is kept, as sums are.
                again = narrow and self._runs_again(move, move.block, known.first, gathers=False)
                made.append((forward, "backward", narrow, again))
        if backward.communicates and known.differentiable:
            made.append((backward, "backward", narrow_back, narrow_back))
        stages = known.stages if move.block == PRELUDE else {placed.plan.stage_of(move.block)}
        if narrow:
            self.gathered.update((user, position) for _, user, position in known.uses)
        if narrow_back:
            self.gathered.add((move.tensor, None))
        cut = move.before if narrow else move.after
        for kind, phase, eight, agrees in made:
            payload = float(numel * (1 if eight else itemsize))
            yield from self._records("redistribution", name, kind.value, phase, axes, payload, stages)
            for axis, own in zip(placed.mesh.axes, cut, strict=True):
                if agrees and axis.size > 1 and not own.is_replicate():
                    yield from self._records("redistribution", name, "all_reduce", phase, (axis.name,), 4.0, stages)

    def _inside(self, node: fx.Node, number: int) -> Iterator[Record]:
        placed = self.placed
        lowering, rule = placed.lowering(node), placed.analysis.rule(node)
        if lowering not in INSIDE:
            return
        flow, operands = self.operands.flow, tensor_operands(node)
        sizes = LocalSizes(
            assignment=placed.layouts.assignments[node],
            mesh=placed.mesh,
            itemsize=lambda dtype: itemsize_of(dtype, placed.plan.precision),
            batch=placed.analysis.roles.batch.get(node),
            num_microbatches=placed.num_microbatches,
            zigzag_ranks=placed.zigzag_ranks,
            by_documents=placed.zigzag is not None and placed.zigzag.documents is not None,
            flows=lambda position: node in flow and operands[position] in flow,
            gathered=lambda position: operands[position].name in self.narrow or (node, position) in self.gathered,
            gathers_gradient=(node, None) in self.gathered,
        )
        block = placed.analysis.block_of(node)
        again = self._runs_again(node, block, number, gathers=False)
        for one in INSIDE[lowering](node, rule, sizes):
            axes = tuple(axis for axis in one.axes if sizes.size(axis) > 1)
            if not axes or (one.phase == "backward" and node not in flow):
                continue
            repeated = again and one.phase == "forward" and not one.once
            phases: tuple[Phase, ...] = (one.phase, "backward") if repeated else (one.phase,)
            for phase in phases:
                yield from self._records(
                    "op", node.name, one.kind, phase, axes, one.payload_bytes, self.stages[node], one.dispatch
                )

    def _runs_again(self, what: Move | fx.Node, block: int, number: int, *, gathers: bool) -> bool:
        """Whether the second run of a block has a collective, of a move or inside an op, that stands before op
        ``number``. gathers: it is one."""
        level = "none" if block == PRELUDE else self.placed.remat_of(block)
        if level == "listed":
            return self.recomputed.communicates(block, what)
        return (level == "full" or (gathers and level != "none")) and number <= self.last_kept.get(block, -1)

    def _records(
        self,
        cause: Cause,
        of: str,
        kind: str,
        phase: Phase,
        axes: tuple[str, ...],
        payload: float,
        stages: set[int],
        dispatch: bool = False,
    ) -> Iterator[Record]:
        """One for each of ``stages``, every microbatch."""
        for stage in sorted(stages):
            yield Record(
                cause=cause,
                of=of,
                kind=kind,
                phase=phase,
                axes=axes,
                payload_bytes=payload,
                times=self.num_microbatches,
                stages=(stage,),
                dispatch=dispatch,
            )
