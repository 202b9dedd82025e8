"""How each op has its operands: the records from which redistributions are inserted, priced and counted.

    linear(x, w)    x is a sum of summands on tp, needed whole:   all_reduce on tp, shared by all ops of the block
                    w is stored as it is needed:                  a read, whose gradient is summed once a step

A chain of moves takes a tensor from the layout it is made in to the one that an op needs. Chains that begin alike share
their first moves, within one block. What keeps or shrinks a tensor is done in the block that makes it, once for all
blocks that use it; what grows it, or only concerns the gradient, is done in each block that uses it, so that less
crosses between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.zigzag import ZigzagDim
from autopar.ir.placement import Layout, Partial, Replicate, Shard
from autopar.ir.redistribution import Collective, Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """One step of a redistribution, as one block runs it in every microbatch.

    tensor: of the captured graph. before, after: layouts. block: that runs it; PRELUDE ahead of all blocks. previous:
    the move whose result this one takes, None of the first.
    """

    tensor: fx.Node
    step: Step
    before: Layout
    after: Layout
    block: int
    previous: Move | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """A parameter as one block reads it. scale: on its gradient. wide: in its own dtype, not in that of compute."""

    parameter: fx.Node
    block: int
    scale: float
    wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How one op, output or buffer has one tensor.

    tensor: of the captured graph, in the layout it is made or stored in; through ``read`` if it is a parameter.
    into: its sequences in natural order that are put in zigzag order first. moves: then one after another. total: then
    the sum over all microbatches is taken, before the first of them runs. share: divided by the number of microbatches,
    which together add it once. back: sequences that are put back in natural order at last.
    """

    tensor: fx.Node
    block: int
    read: Read | None = None
    into: tuple[ZigzagDim, ...] = ()
    moves: tuple[Move, ...] = ()
    total: bool = False
    share: bool = False
    back: tuple[ZigzagDim, ...] = ()


@dataclass(slots=True)
class Chains:
    """The moves and reads of a model, each once."""

    moves: dict[tuple[object, ...], Move] = field(default_factory=dict)
    reads: dict[tuple[object, ...], Read] = field(default_factory=dict)

    def chain(
        self, tensor: fx.Node, steps: Sequence[Step], layout: Layout, block: int, made_in: int, key: object
    ) -> tuple[Move, ...]:
        """``steps`` of ``tensor`` from ``layout``, for users in ``block``. made_in: block that makes the tensor.

        key: tells apart what the steps begin with, such as two reads of a parameter.
        """
        found: list[Move] = []
        where = block if made_in == PRELUDE else made_in
        for number, step in enumerate(steps):
            if step.forward in (Collective.ALL_GATHER, Collective.NONE):
                where = block
            known = (tensor, where, key, tuple(steps[: number + 1]))
            if known not in self.moves:
                after = moved(layout, step)
                previous = found[-1] if found else None
                self.moves[known] = Move(
                    tensor=tensor, step=step, before=layout, after=after, block=where, previous=previous
                )
            found.append(self.moves[known])
            layout = found[-1].after
        return tuple(found)

    def read(self, parameter: fx.Node, block: int, scale: float, wide: bool) -> Read:
        """The one read of ``parameter`` in ``block`` with this factor and dtype."""
        key = (parameter, block, scale, wide)
        if key not in self.reads:
            self.reads[key] = Read(parameter=parameter, block=block, scale=scale, wide=wide)
        return self.reads[key]


def moved(layout: Layout, step: Step) -> Layout:
    """Layout after ``step``."""
    after = list(layout)
    if step.shard_dim is not None:
        after[step.axis] = Shard(step.shard_dim)
    elif step.forward in (Collective.ALL_GATHER, Collective.ALL_REDUCE):
        after[step.axis] = Replicate()
    elif step.forward is Collective.DIVIDE:
        after[step.axis] = Partial()
    return tuple(after)
