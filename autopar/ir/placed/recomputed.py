"""What runs again in the backward of the blocks of a placed model that keep what the plan lists.

    kept: {a: [mlp.up/linear, mlp.down/linear(0)]}      results of one op, and what another one reads after a gather

Ops and moves that nothing kept stands in for run again, if anything in backward needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from autopar.ir.analysis.forward_graph import INSIDE, ForwardBuilder, ForwardGraph, ForwardOp, Op, Tensor
from autopar.ir.analysis.views import storage_of
from autopar.ir.graph import tensor_operands
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.uses import Move


class Recomputation(Enum):
    """Of an op or a move: it runs again; it does not, since all that its kernel makes is kept, or the results of its
    products or collectives; or since nothing reads what it makes."""

    RUNS = "runs"
    KEPT = "kept"
    PRODUCTS_KEPT = "products kept"
    UNREAD = "unread"


@dataclass(slots=True)
class Recomputed:
    """Of one program of a placed model, whose operands are given."""

    operands: Operands
    _known: dict[int, tuple[ForwardGraph, frozenset[Op], frozenset[Tensor]]] = field(default_factory=dict)

    def of(self, block: int, what: fx.Node | Move) -> Recomputation:
        """What becomes of an op or a move of a block that keeps what the plan lists."""
        graph, again, held = self._in(block)
        if what not in graph.ops:
            # A view, a move of a parameter or of what depends on none; or a move for other blocks alone.
            return (
                Recomputation.UNREAD
                if isinstance(what, Move) and what.tensor in self._made(block)
                else Recomputation.RUNS
            )
        if what in again:
            inside = (what, INSIDE)
            return Recomputation.PRODUCTS_KEPT if inside in graph.ops and inside not in again else Recomputation.RUNS
        if isinstance(what, Move):
            return Recomputation.PRODUCTS_KEPT if what in held else Recomputation.UNREAD
        how = graph.keeping[what]
        if not how.is_kept:
            return Recomputation.RUNS  # in vain
        if graph.ops[what].makes.isdisjoint(held):
            return Recomputation.UNREAD
        return Recomputation.KEPT if how.is_whole else Recomputation.PRODUCTS_KEPT

    def communicates(self, block: int, what: fx.Node | Move) -> bool:
        """Whether collectives of an op or a move run again."""
        return self.of(block, what) is Recomputation.RUNS

    def on_host(self, block: int, what: fx.Node | Move) -> bool:
        """Whether what is kept of an op or a move of such a block waits in host memory."""
        graph, _, _ = self._in(block)
        named = graph.named(self.operands.placed.host_of(block))
        makers = graph.makers
        return any(makers.get(tensor) in (what, (what, INSIDE)) for tensor in named)

    def _made(self, block: int) -> frozenset[fx.Node]:
        """The tensors that ops of a block make."""
        return frozenset(self.operands.placed.analysis.repetition.blocks[block].nodes)

    def _in(self, block: int) -> tuple[ForwardGraph, frozenset[Op], frozenset[Tensor]]:
        if block not in self._known:
            placed = self.operands.placed
            graph = _Builder(self.operands, block).graph(placed.analysis.repetition.blocks[block].nodes)
            again = graph.recomputed(graph.named(placed.kept_of(block) or frozenset()))
            self._known[block] = graph, again, graph.held(again)
        return self._known[block]


class _Builder(ForwardBuilder):
    def __init__(self, operands: Operands, block: int) -> None:
        placed = operands.placed
        repetition = placed.analysis.repetition
        super().__init__(
            repetition.key,
            differentiable=placed.analysis.differentiable,
            free=frozenset(repetition.prelude),
            once=frozenset(),
        )
        self._operands, self._block = operands, block

    def is_lowered(self, node: fx.Node) -> bool:
        return self._operands.placed.lowering(node) is not None

    def arriving(self, node: fx.Node, position: int) -> Tensor:
        return storage_of(tensor_operands(node)[position])

    def redistributed(self, node: fx.Node, position: int, made: Tensor) -> Tensor:
        for move in self._operands.of(node, position).moves:
            if move.block != self._block:
                continue  # where it is made
            if move not in self.ops:
                self.ops[move] = ForwardOp(reads=frozenset([made]), makes=frozenset([move]))
            made = move
        return made
