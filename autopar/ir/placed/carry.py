"""Carry a plan over to another capture of the model that it was made for: in eval mode, or at other sizes.

    train:  linear -> batch_norm(batch statistics)   -> relu -> dropout -> linear
    eval:   linear -> batch_norm(running statistics) -> relu ->            linear

A plan names the ops of one graph, that of training. The ops that another mode has as well are found by module path,
name, parameters and shape, and are placed where the plan places them. An op that is new takes its operands as they
come, along each mesh axis, or whole if it cannot. Whatever is chosen is exact: redistributions are inserted afterwards.

Blocks keep their numbers and so their stages. A new op runs in the block that reads its parameters in training, or else
in that of its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

from torch import fx

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.blocks import BlockRepetition
from autopar.ir.analysis.op_stream import op_name
from autopar.ir.graph import CapturedModel, call_nodes, is_getitem, source, tensor_operands, tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.placed.assign import inputs_of
from autopar.ir.placed.layouts import made_on_axis
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan
from autopar.ir.rule import Assignment, Choice


def carry(
    analysis: Analysis, plan: Plan, trained: Analysis, trained_assignments: Mapping[fx.Node, Assignment]
) -> tuple[BlockRepetition, dict[fx.Node, Assignment]]:
    """The decisions of ``plan``, made for ``trained``, for another capture of the model.

    trained_assignments: of every op of ``trained``. Returns the blocks of the plan with the ops of the other capture,
    and the assignment of every op of it.
    """
    captured, clusters, mesh = analysis.captured, analysis.clusters, plan.stage_mesh
    counterparts = _counterparts(captured, trained.captured)
    assignments: dict[fx.Node, Assignment] = {}
    inputs = inputs_of(plan)
    prelude = set(clusters.inputs.members)
    for node in clusters.inputs.members:
        own = clusters.inputs.assignment(node, inputs)
        assignments[node] = own if analysis.rule(node).allows(own, mesh) else (None,) * len(mesh)
    for node in call_nodes(captured.graph):
        if is_getitem(node) or node in prelude:
            continue
        rule = analysis.rule(node)
        first = counterparts.get(node)
        carried = None if first is None else trained_assignments.get(first)
        if carried is not None and all(c in rule.choices() for c in carried) and rule.allows(carried, mesh):
            assignments[node] = carried
        else:
            assignments[node] = _as_operands_come(node, analysis, inputs, assignments, mesh)
    return _blocks(captured, analysis.repetition, counterparts, trained.captured, trained.repetition), assignments


def _counterparts(captured: CapturedModel, trained: CapturedModel) -> dict[fx.Node, fx.Node]:
    """Op of ``captured`` -> the op of ``trained`` that is the same one: of several alike, in the same order."""
    own, others = _input_shapes(captured), _input_shapes(trained)
    sized = all(own[key] == others[key] for key in own.keys() & others.keys())
    known = {key: node for node, key in _keys(trained, sized=sized).items()}
    return {node: known[key] for node, key in _keys(captured, sized=sized).items() if key in known}


def _input_shapes(captured: CapturedModel) -> dict[str, tuple[int, ...]]:
    values = {node.name: node.meta["val"] for node in captured.graph.nodes if node.name in captured.inputs}
    return {captured.inputs[name].key: tuple(value.shape) for name, value in values.items()}


def _keys(captured: CapturedModel, *, sized: bool) -> dict[fx.Node, Hashable]:
    """What ops are told apart by. sized: by the shapes of their results, not just by the number of dimensions."""
    seen: Counter[Hashable] = Counter()
    keys: dict[fx.Node, Hashable] = {}
    for node in call_nodes(captured.graph):
        if is_getitem(node):
            continue
        read = tuple(captured.parameters[n.name].name for n in node.all_input_nodes if n.name in captured.parameters)
        results = tensor_results(node)
        shapes = tuple((tuple(result.shape) if sized else result.dim(), result.dtype) for result in results)
        key = (node.meta.get("path"), op_name(node), read, shapes)
        seen[key] += 1
        keys[node] = (key, seen[key])
    return keys


def _as_operands_come(
    node: fx.Node, analysis: Analysis, inputs: Assignment, assignments: Mapping[fx.Node, Assignment], mesh: Mesh
) -> Assignment:
    """Along each axis the factor that takes most operands in the placement that they have; None if none is divided."""
    rule = analysis.rule(node)

    def placement(operand: fx.Node, axis: int) -> Placement:
        producer, result = source(operand)
        choices = assignments[producer] if producer.op == "call_function" else inputs
        return made_on_axis(analysis, producer, result, choices[axis])

    operands = list(enumerate(tensor_operands(node)))
    factors = [factor for factor in rule.shardable() if factor not in rule.lowered]
    found: Assignment = ()
    for axis in range(len(mesh)):
        given = [(position, placement(operand, axis)) for position, operand in operands]
        divided = [(position, own) for position, own in given if own.is_shard()]

        def fitting(factor: Choice, divided: list[tuple[int, Placement]] = divided) -> int:
            return sum(rule.operand(position, factor)[0] == own for position, own in divided)

        best = max(factors, key=fitting, default=None)
        choice = best if best is not None and fitting(best) else None
        if not rule.allows((*found, choice), Mesh(mesh.axes[: axis + 1])):
            choice = None
        found = (*found, choice)
    return found


def _blocks(
    captured: CapturedModel,
    repetition: BlockRepetition,
    counterparts: Mapping[fx.Node, fx.Node],
    trained: CapturedModel,
    trained_repetition: BlockRepetition,
) -> BlockRepetition:
    """The blocks of ``trained_repetition`` with the ops of ``captured``, each no earlier than its operands."""
    readers = _readers(trained, trained_repetition)
    prelude = set(repetition.prelude)
    block_of: dict[fx.Node, int] = {}
    loose: list[fx.Node] = []  # made of parameters alone, so that they may run anywhere before their readers
    for node in call_nodes(captured.graph):
        if node in prelude:
            continue
        earliest = max((block_of[operand] for operand in node.all_input_nodes if operand in block_of), default=None)
        own = _block_in_training(node, counterparts, captured, trained_repetition, readers, earliest or 0)
        if own is None and earliest is None:
            loose.append(node)
            continue
        block_of[node] = max(value for value in (own, earliest) if value is not None)
    for node in reversed(loose):
        block_of[node] = min((block_of[user] for user in node.users if user in block_of), default=0)
    nodes: list[list[fx.Node]] = [[] for _ in trained_repetition.blocks]
    for node in call_nodes(captured.graph):
        if node in block_of:
            nodes[block_of[node]].append(node)
    blocks = tuple(
        replace(block, nodes=tuple(own)) for block, own in zip(trained_repetition.blocks, nodes, strict=True)
    )
    return replace(
        repetition,
        blocks=blocks,
        kinds=trained_repetition.kinds,
        representative={},
        key={},
        block_of=block_of,
        crossings=(),
    )


def _block_in_training(
    node: fx.Node,
    counterparts: Mapping[fx.Node, fx.Node],
    captured: CapturedModel,
    trained_repetition: BlockRepetition,
    readers: Mapping[str, list[int]],
    earliest: int,
) -> int | None:
    """The block that an op is in when training, or that reads its parameters then, not before ``earliest``."""
    producer, _ = source(node)
    counterpart = counterparts.get(producer)
    if counterpart is not None and counterpart in trained_repetition.block_of:
        return trained_repetition.block_of[counterpart]
    for operand in producer.all_input_nodes:
        parameter = captured.parameters.get(operand.name)
        blocks = readers.get(parameter.name, []) if parameter is not None else []
        if blocks:
            return next((block for block in blocks if block >= earliest), blocks[-1])
    return None


def _readers(trained: CapturedModel, repetition: BlockRepetition) -> dict[str, list[int]]:
    """Parameter -> the blocks that read it, in order."""
    found: dict[str, set[int]] = {}
    for node in trained.graph.nodes:
        if node.op == "placeholder" and node.name in trained.parameters:
            name = trained.parameters[node.name].name
            found[name] = {repetition.block_of[user] for user in node.users if user in repetition.block_of}
    return {name: sorted(blocks) for name, blocks in found.items()}
