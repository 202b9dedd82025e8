"""Insert-redistributions: every tensor is had in the layout that its user needs. Shapes stay global.

Before, with ``up`` sharded on its output features over axis ``tp`` and ``down`` on its input features:

    h = linear(x, up)
    y = linear(gelu(h), down)
    z = relu(y)

After:

    x_1 = redistribution(x, axis='tp', forward='none', backward='all_reduce')
    up_1 = read_parameter(up)
    h = linear(x_1, up_1)
    down_1 = read_parameter(down)
    y = linear(gelu(h), down_1)
    y_1 = redistribution(y, axis='tp', forward='all_reduce', backward='none')
    z = relu(y_1)

A microbatch is the batch divided in time, over an outermost axis that no collective crosses. A sum over the whole
batch that every microbatch needs is taken before they run (``whole_batch``); what reads no batch is added once by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.zigzag import ZigzagDim, from_zigzag, to_zigzag
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import is_getitem, source, tensor_operands
from autopar.ir.op_graph import dependencies, op_graph
from autopar.ir.packed_order import from_document_order, to_document_order
from autopar.ir.placed.operands import Operands, Results
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.uses import Move, Read, Use
from autopar.ir.placement import Layout, Placement, Replicate, Shard
from autopar.ir.precision import narrow_dtype
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.primitives.redistribution_marker import keywords_of, redistribution
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.redistribution import Collective
from autopar.ir.torch_private import pytree
from autopar.passes.placed_program import PlacedProgram

NAME = "insert-redistributions"
PROVIDES = frozenset({"redistributions"})


def insert_redistributions(placed: PlacedModel, results: Results) -> PlacedProgram:
    """The global program of ``placed`` with its redistributions.

    results: "loss" keeps the loss alone, in the layout that it is made in; "model" the model's outputs, their batch
    over the data-parallel ranks and otherwise whole.
    """
    sweep = _Sweep(placed, Operands(placed=placed, results=results))
    captured = placed.captured
    for node in _documents_first(placed):
        if node.op == "placeholder":
            sweep.placeholder(node)
        elif node.op == "call_function":
            sweep.call(node)
    flat = captured.output_args()
    start = 1 if captured.has_loss else 0
    kept = flat[:1] if results == "loss" else flat[start : start + captured.num_outputs]
    outputs: list[fx.Node] = []
    layouts: list[tuple[Layout, Placement]] = []
    last = max(placed.analysis.repetition.block_of.values(), default=PRELUDE)
    for value in kept:
        if not isinstance(value, fx.Node):
            continue
        if results == "model":
            layouts.append(sweep.operands.output_layout(value))
            outputs.append(sweep.handed_out(value, *layouts[-1], last))
        else:
            layouts.append((placed.layout(value), placed.over_time(value)))
            outputs.append(sweep.made[value])
    updates: dict[str, fx.Node] = {}
    summed: set[str] = set()
    for buffer in captured.buffers.values():
        if buffer.updated_by is not None:
            new = placed.analysis.names[buffer.updated_by]
            if sweep.operands.sums_over_time(new):
                summed.add(buffer.name)
            updates[buffer.name] = sweep.have(sweep.operands.update_of(new))
    sweep.graph.output((*outputs, *updates.values()))
    sweep.graph.eliminate_dead_code()
    return PlacedProgram(
        placed=placed,
        results=results,
        graph=sweep.graph,
        origin=sweep.origin,
        moves=sweep.moves,
        operands=sweep.operands,
        outputs=tuple(outputs),
        output_layouts=tuple(layout for layout, _ in layouts),
        output_microbatches=tuple(over_time for _, over_time in layouts),
        updates=updates,
        summed=frozenset(summed),
        provides=PROVIDES,
    )


@dataclass(slots=True)
class _Sweep:
    """One sweep over the captured graph. made: captured node -> new one; known: those that several users share."""

    placed: PlacedModel
    operands: Operands
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    known: dict[object, fx.Node] = field(default_factory=dict)
    moves: dict[fx.Node, Move] = field(default_factory=dict)

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta.update(_value(node), block=PRELUDE)
        self.place(new, self.placed.layout(node), self.placed.over_time(node))
        self.made[node] = new

    def call(self, node: fx.Node) -> None:
        had = {}
        if not is_getitem(node):
            uses = (self.operands.of(node, position) for position in range(len(tensor_operands(node))))
            had = {position: self.have(use) for position, use in enumerate(uses)}
        new = self.graph.create_node("call_function", node.target, *self.arguments(node, had), name=node.name)
        new.meta.update(node.meta)
        new.meta["block"] = self.placed.analysis.block_of(node)
        rule = self.placed.analysis.rule(source(node)[0])
        new.meta["wide"] = bool(rule.couples) and not is_getitem(node)
        if rule.results:
            self.place(new, self.placed.layout(node), self.placed.over_time(node))
        else:
            self.place(new, (), Replicate())
        self.origin[new] = node
        self.made[node] = self.mean_over_time(node, new)

    def arguments(self, node: fx.Node, had: dict[int, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``node`` in the new graph. had: its tensor operands, by position."""
        operands, positions = set(tensor_operands(node)), iter(range(len(had)))

        def new(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return had[next(positions)] if leaf in operands else self.made[leaf]

        args, kwargs = pytree.tree_map_only(fx.Node, new, (node.args, node.kwargs))
        return args, kwargs

    def mean_over_time(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """A mean over the batch is, of each microbatch, its mean divided by their number."""
        if is_getitem(node):
            return new
        rule, choice = self.placed.analysis.rule(node), self.placed.time_choice(node)
        if choice is None or choice not in rule.lowered or choice not in rule.summed:
            return new
        return self.shared_out(new)

    def handed_out(self, node: fx.Node, layout: Layout, over_time: Placement, block: int) -> fx.Node:
        """``node`` for the caller or for a buffer."""
        return self.have(self.operands.handed_out(node, layout, over_time, block))

    def have(self, use: Use) -> fx.Node:
        """The node that a user reads."""
        node = self.made[use.tensor] if use.read is None else self.read(use.read)
        node = self.reorder(node, use.into, PRELUDE, back=False)
        for move in use.moves:
            node = self.moved(node, move)
        if use.total:
            node = self.once((node, whole_batch), lambda: self.like(node, whole_batch, (node,), over_time=Replicate()))
        if use.share:
            node = self.once((node, "share"), lambda: self.shared_out(node))
        return self.reorder(node, use.back, use.block, back=True)

    def read(self, read: Read) -> fx.Node:
        def make() -> fx.Node:
            node, narrow = read.parameter, narrow_dtype(self.placed.plan.precision)
            kwargs: dict[str, Any] = {}
            if not read.wide and self.placed.captured.parameters[node.name].dtype.is_floating_point:
                kwargs["dtype"] = narrow
            if read.scale != 1.0:
                kwargs["grad_scale"] = read.scale
            new = self.graph.call_function(read_parameter, (self.made[node],), kwargs)
            new.meta.update(val=node.meta["val"], block=read.block)
            return self.place(new, self.placed.layout(node), Replicate())

        return self.once(read, make)

    def moved(self, node: fx.Node, move: Move) -> fx.Node:
        def make() -> fx.Node:
            name = move.step.forward.value if move.step.forward is not Collective.NONE else "identity"
            kwargs = keywords_of(move.step, self.placed.mesh)
            new = self.graph.create_node("call_function", redistribution, (node,), kwargs, name=name)
            self.moves[new] = move
            new.meta.update(_value(move.tensor), block=move.block)
            return self.place(new, move.after, node.meta["over_time"])

        return self.once(move, make)

    def shared_out(self, node: fx.Node) -> fx.Node:
        """``node`` divided by the number of microbatches."""
        count = float(self.placed.num_microbatches)
        return self.like(node, torch.ops.aten.div.Scalar, (node, count))

    def reorder(self, node: fx.Node, dims: tuple[ZigzagDim, ...], block: int, *, back: bool) -> fx.Node:
        """``node`` with its sequence in another order. It is whole there on every rank."""
        for own in dims:
            node = self.reordered(node, own, block, back=back)
        return node

    def reordered(self, node: fx.Node, own: ZigzagDim, block: int, *, back: bool) -> fx.Node:
        """``node`` with one sequence of it in another order."""
        zigzag, ranks = self.placed.zigzag, self.placed.zigzag_ranks
        assert zigzag is not None
        options: dict[str, Any] = {"dim": own.dim, "length": zigzag.length, "inner": own.inner}
        args: tuple[fx.Node, ...]
        if zigzag.documents is None:
            function: Callable[..., torch.Tensor] = from_zigzag if back else to_zigzag
            args, options = (node,), {**options, "zigzag_ranks": ranks}
        else:
            function = from_document_order if back else to_document_order
            args, options = (node, self.documents(node, own)), {**options, "num_ranks": ranks, "rows": own.rows}
        key = (node, own, function, block)
        return self.once(key, lambda: self.like(node, function, args, options, block=block))

    def documents(self, node: fx.Node, own: ZigzagDim) -> fx.Node:
        """The documents of the rows that a rank has of ``node``. Raises PlanMismatch if it has them of other rows."""
        zigzag = self.placed.zigzag
        assert zigzag is not None and zigzag.documents is not None
        documents = self.made[zigzag.documents]
        wanted, has = (
            tuple(
                dim is not None and placement == Shard(dim)
                for placement in (one.meta["over_time"], *one.meta["layout"])
            )
            for one, dim in ((node, own.rows), (documents, 0))
        )
        if wanted != has:
            raise PlanMismatch(
                f"sequence_layout: {node.name} ({node.meta.get('source', 'no source')}) is divided by rows along other "
                "mesh axes than the documents whose order it is in.\n"
                "  try: sequence_layout: contiguous"
            )
        return documents

    def like(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        **meta: Any,
    ) -> fx.Node:
        """A call whose result is as ``node`` but for ``meta``."""
        new = self.graph.call_function(function, args, kwargs or {})
        new.meta.update(node.meta)
        new.meta.update(meta)
        return new

    def once(self, key: object, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @staticmethod
    def place(node: fx.Node, layout: Layout, over_time: Placement) -> fx.Node:
        node.meta.update(layout=layout, over_time=over_time)
        return node


def _documents_first(placed: PlacedModel) -> Sequence[fx.Node]:
    """The captured nodes in order, but ahead of the ops what says in which order their sequences are."""
    nodes = list(placed.captured.graph.nodes)
    if placed.zigzag is None or placed.zigzag.documents is None:
        return nodes
    first = dependencies(op_graph(nodes), [placed.zigzag.documents])
    return sorted(nodes, key=lambda node: 0 if node.op == "placeholder" else 1 if node in first else 2)


def _value(node: fx.Node) -> dict[str, Any]:
    """The global tensor that a node makes, with and without symbols."""
    return {key: node.meta[key] for key in ("val", "symbolic") if key in node.meta}
