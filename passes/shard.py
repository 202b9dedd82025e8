"""Rewrite the global program into the program of one rank, with explicit collectives.

Before, on global shapes, with ``up`` sharded on its output features over axis ``tp`` and ``down`` on its input
features:

    h = linear(x, up)            # x (8, 64), up (256, 64)
    y = linear(gelu(h), down)    # down (64, 256)

After, on local shapes:

    x_1 = identity(x, group='tp', backward='all_reduce')
    h = linear(x_1, up)          # up (64, 64)
    y = linear(gelu(h), down)    # down (64, 64)
    y_1 = all_reduce(y, group='tp', backward='none')

The batch is cut into microbatches in the same sweep: a microbatch is the batch factor sharded in time, over an
extra outermost axis that no collective crosses. What is a sum over it and needed whole is had before the microbatches
run, if it is made of step inputs alone (``autopar.ir.primitives.whole_batch``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.analysis.batch_and_sequence import Roles
from autopar.ir.analysis.blocks import Folding
from autopar.ir.analysis.derived_parameters import Passing, left_to_sum
from autopar.ir.analysis.op_clusters import BATCH, Clusters
from autopar.ir.analysis.zigzag import Fold, FoldedSequence, fold_sequence, unfold_sequence
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, has_gradient_dtype, source, tensor_operands, tensor_results
from autopar.ir.lowered.table import LOWERINGS, lowering_of
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.placement import Layout, Placement, Replicate, Shard, local_shape, replicated
from autopar.ir.plan import Plan
from autopar.ir.precision import narrow_dtype
from autopar.ir.primitives.collectives import step_call
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.redistribution import Collective, Step, redistribute
from autopar.ir.rule import Assignment, Choice, FactorRule
from autopar.ir.rules import rule_for
from autopar.ir.rules.sizes import local_arguments
from autopar.ir.torch_private import pytree
from autopar.passes.parameters import Storage

PRELUDE = -1
_TIME = "microbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedProgram:
    """The program of one rank of a stage mesh, for one microbatch, before it is cut into stages.

    Every node has ``meta["val"]`` with its local shape, ``meta["layout"]`` and ``meta["block"]`` (PRELUDE for
    what depends on no parameter). outputs: the flat outputs asked for, in order. output_layouts: over the mesh;
    output_microbatches: over the microbatches. updates: buffer -> its new value. summed: those of which every
    microbatch has a summand; the others are the same in each.
    """

    graph: fx.Graph
    outputs: tuple[fx.Node, ...]
    output_layouts: tuple[Layout, ...]
    output_microbatches: tuple[Placement, ...]
    updates: Mapping[str, fx.Node]
    summed: frozenset[str]


def shard(
    captured: CapturedModel,
    folding: Folding,
    clusters: Clusters,
    roles: Roles,
    assignments: Mapping[fx.Node, Assignment],
    passing: Passing,
    storage: Mapping[str, Storage],
    plan: Plan,
    *,
    outputs: str,
    folded: FoldedSequence | None = None,
) -> ShardedProgram:
    """The local program of every rank under ``assignments``.

    passing: axes on which gradients pass through derived ops as summands.
    folded: where the sequence is put in folded order and back, for ``sequence_layout: zigzag``.

    outputs: "loss" keeps only the loss, in the layout that it is produced in; "model" keeps the model's
    outputs, their batch over the data-parallel ranks and otherwise whole.
    """
    sweep = _Sweep(captured, folding, clusters, roles, assignments, passing, storage, plan, folded)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            sweep.placeholder(node)
        elif node.op == "call_function":
            sweep.call(node)
    flat = captured.output_args()
    start = 1 if captured.has_loss else 0
    kept = flat[:1] if outputs == "loss" else flat[start : start + captured.num_outputs]
    layouts: list[Layout] = []  # time axis first
    results: list[fx.Node] = []
    for value in kept:
        if not isinstance(value, fx.Node):
            continue
        wanted = sweep.layout(value)
        if outputs == "model":
            wanted = sweep.output_layout(value)
            results.append(sweep.use_in_order(value, wanted, max(folding.block_of.values(), default=PRELUDE)))
        else:
            results.append(sweep.made[value])
        layouts.append(wanted)
    updates: dict[str, fx.Node] = {}
    summed: set[str] = set()
    for buffer in captured.buffers.values():
        if buffer.updated_by is not None:
            new = next(n for n in captured.graph.nodes if n.name == buffer.updated_by)
            over_time = sweep.layout(new)[0]
            if over_time.is_partial() and sweep.block(new) != PRELUDE:
                summed.add(buffer.name)
            else:
                over_time = Replicate()
            whole = (over_time, *replicated(plan.stage_mesh))
            updates[buffer.name] = sweep.use_in_order(new, whole, sweep.block(new))
    sweep.graph.output(tuple(results) + tuple(updates.values()))
    sweep.graph.eliminate_dead_code()
    sweep.graph.lint()
    return ShardedProgram(
        graph=sweep.graph,
        outputs=tuple(results),
        output_layouts=tuple(layout[1:] for layout in layouts),
        output_microbatches=tuple(layout[0] for layout in layouts),
        updates=updates,
        summed=frozenset(summed),
    )


@dataclass(slots=True)
class _Sweep:
    """State of one sweep over the graph. Layouts and meshes here have the time axis in front."""

    captured: CapturedModel
    folding: Folding
    clusters: Clusters
    roles: Roles
    assignments: Mapping[fx.Node, Assignment]
    passing: Passing
    storage: Mapping[str, Storage]
    plan: Plan
    folded: FoldedSequence | None = None
    num_folds: int = 1
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    uses: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    mesh: Mesh = field(init=False)
    differentiable: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        time = MeshAxis(_TIME, self.plan.batch.num_microbatches)
        self.mesh = Mesh((time, *self.plan.stage_mesh.axes))
        if self.folded is not None:
            self.num_folds = self.folded.num_folds(self.assignments, self.plan.stage_mesh)

    # Layouts of the original nodes, time axis first.

    def choices(self, node: fx.Node) -> Assignment:
        """The assignment of an op with its choice along the time axis in front."""
        factor: Choice = self.roles.batch.get(node) if self.mesh.sizes[0] > 1 else None
        return (factor, *self.assignments[node])

    def passes(self, node: fx.Node) -> frozenset[int]:
        """The axes on which summands pass through an op, as numbers of ``mesh``."""
        return frozenset(1 + axis for axis in self.passing.get(source(node)[0], ()))

    def layout(self, node: fx.Node) -> Layout:
        """Layout that ``node`` is produced in."""
        producer, result = source(node)
        if producer.op == "call_function":
            return rule_for(producer).result_layout(result, self.choices(producer))
        if producer.name in self.captured.inputs:
            inputs = (BATCH, *(BATCH if n in self.plan.inputs else None for n in self.plan.mesh))
            return tuple(self.clusters.input_placement(producer, choice) for choice in inputs)
        if producer.name in self.captured.parameters:
            return (Replicate(), *self.storage[producer.name].layout)
        return replicated(self.mesh)

    def output_layout(self, node: fx.Node) -> Layout:
        """Layout in which a model output is handed to the caller, who adds up what microbatches have summands of."""
        dim = self.roles.batch_dim.get(node)
        if dim is None:
            time = self.layout(node)[0]
            return (time if time.is_partial() else Replicate(), *replicated(self.plan.stage_mesh))
        names = {_TIME, *self.plan.inputs}
        return tuple(Shard(dim) if name in names else Replicate() for name in self.mesh.names)

    def block(self, node: fx.Node) -> int:
        return self.folding.block_of.get(source(node)[0], PRELUDE)

    # New nodes.

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        self.describe(new, node.meta["val"], self.layout(node), PRELUDE)
        self.made[node] = new
        parameter = self.captured.parameters.get(node.name)
        if parameter is not None and parameter.requires_grad:
            self.differentiable.add(node)

    def describe(self, new: fx.Node, value: Any, layout: Layout, block: int) -> None:
        """Attach the local value (from the global one), layout and block of a new node."""
        if isinstance(value, torch.Tensor):
            value = value.new_empty(local_shape(value.shape, layout, self.mesh))
        new.meta.update(val=value, layout=layout[1:], block=block)

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.getitem(node)
            return
        rule = rule_for(node)
        choices = self.choices(node)
        block = self.block(node)
        operands = tensor_operands(node)
        if any(n in self.differentiable for n in operands) and _differentiable(node):
            self.differentiable.add(node)
        wanted = iter(
            [
                self.operand(node, position, operand, *rule.operand_layout(position, choices, self.passes(node)), block)
                for position, operand in enumerate(operands)
            ]
        )
        operand_set = set(operands)

        def localise(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return next(wanted) if leaf in operand_set else self.made[leaf]

        layouts = [rule.result_layout(i, choices) for i in range(len(rule.results))]
        shapes = [
            local_shape(result.shape, layout, self.mesh)
            for result, layout in zip(tensor_results(node), layouts, strict=True)
        ]
        args, kwargs = local_arguments(node, shapes[0]) if shapes else (node.args, node.kwargs)
        args, kwargs = pytree.tree_map_only(fx.Node, localise, (args, kwargs))
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        leaves, spec = pytree.tree_flatten(node.meta["val"])
        fresh = iter(zip(shapes, strict=True))
        values = [leaf.new_empty(next(fresh)[0]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        new.meta.update(node.meta)
        new.meta.update(val=pytree.tree_unflatten(values, spec), layout=layouts[0][1:] if layouts else (), block=block)
        new.meta["wide"] = bool(rule.couples)
        self.lower(node, new, rule)
        self.made[node] = self.mean_over_time(node, new, rule, choices[0], block)

    def getitem(self, node: fx.Node) -> None:
        producer, _ = source(node)
        inner, index = node.args
        assert isinstance(inner, fx.Node)
        new = self.graph.create_node("call_function", operator.getitem, (self.made[inner], index), name=node.name)
        self.describe(new, node.meta["val"], self.layout(node), self.block(node))
        if producer in self.differentiable and _differentiable(node):
            self.differentiable.add(node)
        self.made[node] = new

    def lower(self, node: fx.Node, new: fx.Node, rule: FactorRule) -> None:
        """Replace the op by its lowering where a lowered factor is sharded over the mesh."""
        assignment = self.assignments[node]
        folded = self.folded is not None and self.num_folds > 1 and node in self.folded.attentions
        name = "ring" if folded else lowering_of(rule, assignment)
        if name is None:
            return
        function, args, kwargs = LOWERINGS[name](new, rule, assignment, self.plan.stage_mesh)
        if folded:
            kwargs["folds"] = self.num_folds
        new.target, new.args, new.kwargs = function, args, kwargs

    def mean_over_time(self, node: fx.Node, new: fx.Node, rule: FactorRule, choice: Choice, block: int) -> fx.Node:
        """A mean over the batch is, of each microbatch, its mean divided by their number."""
        if choice is None or choice not in rule.lowered or choice not in rule.summed:
            return new
        scaled = self.graph.call_function(torch.ops.aten.div.Scalar, (new, float(self.mesh.sizes[0])))
        scaled.meta.update(new.meta)
        return scaled

    # Uses: reads of parameters and redistributions, shared by the consumers in one block.

    def operand(self, user: fx.Node, position: int, node: fx.Node, value: Layout, grad: Layout, block: int) -> fx.Node:
        """The operand of ``user`` in the layout and in the order of the sequence that it needs."""
        wide = bool(rule_for(user).couples)
        if self.folded is None or self.num_folds == 1:
            return self.use(node, value, grad, block, wide=wide)
        into, back = (side.get((user, position), ()) for side in (self.folded.into, self.folded.back))
        return self.reorder(self.use(node, value, grad, block, wide=wide, into=into), back, unfold_sequence, block)

    def use_in_order(self, node: fx.Node, layout: Layout, block: int) -> fx.Node:
        """``node`` for the caller or for a buffer."""
        found = self.use(node, layout, layout, block)
        if self.folded is None or self.num_folds == 1:
            return found
        return self.reorder(found, self.folded.results.get(source(node), ()), unfold_sequence, block)

    def reorder(
        self, node: fx.Node, folds: tuple[Fold, ...], function: Callable[..., torch.Tensor], block: int
    ) -> fx.Node:
        """``node`` of the new graph with its sequence in another order. It is whole there on every rank."""
        for fold in folds:
            key = (node, fold, function, block)
            if key not in self.uses:
                assert self.folded is not None
                length = self.folded.length
                assert not node.meta["val"].shape[fold.dim] % (length * fold.inner), f"{node} has parts of a sequence"
                options = {"length": length, "inner": fold.inner, "folds": self.num_folds}
                new = self.graph.call_function(function, (node,), {"dim": fold.dim, **options})
                new.meta.update(node.meta)
                new.meta["block"] = block
                self.uses[key] = new
            node = self.uses[key]
        return node

    def use(
        self,
        node: fx.Node,
        value: Layout,
        grad: Layout,
        block: int,
        *,
        wide: bool = False,
        into: tuple[Fold, ...] = (),
    ) -> fx.Node:
        """The node that holds ``node`` in layout ``value`` for consumers in ``block``.

        wide: parameters are read in their own dtype, as an op that keeps statistics needs them. into: sequences that
        are put in folded order first.
        """
        made = self.layout(node)
        if made[0].is_partial() and value[0].is_replicate() and self.block(node) == PRELUDE:
            steps = redistribute(made[1:], value[1:], grad[1:])
            return self.total(node, made, tuple(step for step in steps if step.forward is not Collective.NONE))
        if made[0].is_replicate() and value[0].is_partial():
            return self.share(node, self.use(node, (made[0], *value[1:]), grad, block, wide=wide, into=into))
        if made[0] != value[0] and self.mesh.sizes[0] > 1 and node.name not in self.captured.parameters:
            raise PlanMismatch(
                f"the batch cannot be cut into {self.mesh.sizes[0]} microbatches: {node.name} "
                f"({node.meta.get('source', 'no source')}) does not keep the samples of a batch apart.\n"
                "  try: one microbatch (batch.num_microbatches: 1)"
            )
        if node.name in self.captured.parameters and node.op == "placeholder":
            return self.read(node, value[1:], grad[1:], block, wide=wide)
        steps = redistribute(made[1:], value[1:], left_to_sum(grad, self.passes(node))[1:])
        if node not in self.differentiable:
            steps = tuple(step for step in steps if step.forward is not Collective.NONE)
        start = self.reorder(self.made[node], into, fold_sequence, PRELUDE)
        return self.emit(node, start, steps, made, block, into)

    def total(self, node: fx.Node, made: Layout, steps: tuple[Step, ...]) -> fx.Node:
        """The sum over all microbatches of ``node``, after ``steps``."""
        known = (node, steps, whole_batch)
        if known not in self.uses:
            one = self.emit(node, self.made[node], steps, made, PRELUDE, ())
            new = self.graph.call_function(whole_batch, (one,))
            new.meta.update(one.meta)
            self.uses[known] = new
        return self.uses[known]

    def share(self, node: fx.Node, whole: fx.Node) -> fx.Node:
        """What one microbatch adds of ``node``, which reads no batch: all of them together add it once."""
        key = (node, whole, _TIME)
        if key not in self.uses:
            new = self.graph.call_function(torch.ops.aten.div.Scalar, (whole, float(self.mesh.sizes[0])))
            new.meta.update(whole.meta)
            self.uses[key] = new
        return self.uses[key]

    def read(self, node: fx.Node, value: Layout, grad: Layout, block: int, *, wide: bool) -> fx.Node:
        stored = self.storage[node.name]
        scale, steps = stored.read(value, grad, self.plan.stage_mesh)
        narrow = None if wide else narrow_dtype(self.plan.precision)
        key = (node, block, scale, narrow)
        if key not in self.uses:
            kwargs: dict[str, Any] = {}
            if narrow is not None and self.captured.parameters[node.name].dtype.is_floating_point:
                kwargs["dtype"] = narrow
            if scale != 1.0:
                kwargs["grad_scale"] = scale
            new = self.graph.call_function(read_parameter, (self.made[node],), kwargs)
            self.describe(new, node.meta["val"], (Replicate(), *stored.layout), block)
            self.uses[key] = new
        return self.emit(node, self.uses[key], steps, (Replicate(), *stored.layout), block, (scale, narrow))

    def emit(
        self, node: fx.Node, start: fx.Node, steps: tuple[Step, ...], layout: Layout, block: int, key: tuple[Any, ...]
    ) -> fx.Node:
        """The chain of collectives ``steps`` after ``start``, shared with equal chains in the same block.

        What keeps or shrinks a tensor is done where it was produced, once for all blocks that use it; what
        grows it, or only concerns the gradient, in each block that uses it, so that less crosses between them.
        """
        current = start
        placements = list(layout[1:])
        user = block
        block = start.meta["block"] if start.op == "call_function" and start.meta["block"] != PRELUDE else user
        for number, step in enumerate(steps):
            if step.forward in (Collective.ALL_GATHER, Collective.NONE):
                block = user
            known = (node, block, key, steps[: number + 1])
            if known not in self.uses:
                function, kwargs = step_call(step, self.plan.stage_mesh)
                new = self.graph.call_function(function, (current,), kwargs)
                after = list(placements)
                _move(after, step)
                self.describe(new, node.meta["val"], (layout[0], *after), block)
                self.uses[known] = new
            _move(placements, step)
            current = self.uses[known]
        return current


def _move(placements: list[Any], step: Step) -> None:
    if step.shard_dim is not None:
        placements[step.axis] = Shard(step.shard_dim)
    elif step.forward in (Collective.ALL_GATHER, Collective.ALL_REDUCE):
        placements[step.axis] = Replicate()


def _differentiable(node: fx.Node) -> bool:
    return any(map(has_gradient_dtype, tensor_results(node)))
