"""Mutants of partitioned programs and of their schedule: a correct program with one thing changed.

``mutants(programs, shape)`` yields a description and a function that makes the mutant anew: programs are copied, since
graphs are changed in place. Many mutants change what is computed; some do not (a collective over one operand moved
across a linear op, two backward passes of a rank swapped), and those may be accepted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.ir.placement import Replicate
from autopar.ir.plan import Plan
from autopar.ir.primitives.collectives import (
    COLLECTIVES,
    all_gather,
    all_reduce,
    all_to_all,
    divide,
    identity,
    reduce_scatter,
    split,
)
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.program import BlockProgram, ParameterLayout, StageProgram
from autopar.ir.schedule import Order, Pipelining
from autopar.passes.verify.placements import verify_placements
from autopar.passes.verify.schedule import verify_schedule

aten = torch.ops.aten
Programs = tuple[StageProgram, ...]
# Changes a copy of a graph, given the copy of one of its nodes.
Change = Callable[[fx.Graph, fx.Node], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """kind: what was done, in a word. text: to what. make: the mutated programs.

    orders: the mutated schedule, what each rank does in order; None if it is as it was.
    """

    kind: str
    text: str
    make: Callable[[], Programs]
    orders: tuple[Order, ...] | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def verify(self, captured: CapturedModel, plan: Plan) -> None:
        """Raise UnprovenProgram if the proof refuses it, RuntimeError if there is no such mutant: no valid graph."""
        verify_placements(captured, self.make(), plan)
        if self.orders is not None:
            verify_schedule(plan.pipelining, self.orders)


def mutants(programs: Sequence[StageProgram], shape: Pipelining) -> Iterator[Mutant]:
    """Every mutant of ``programs`` and of ``shape``, those of one op after the other, in a fixed order."""
    programs = tuple(programs)
    for program in programs:
        for number, block in enumerate(program.blocks):
            for index, node in enumerate(block.graph.nodes):
                if node.op != "call_function" or node.target is operator.getitem:
                    continue
                for kind, change in _changes(node, program):
                    text = f"stage {program.stage}, {block.name}: {node.format_node()}"
                    yield Mutant(kind, text, _with_graph(programs, program.stage, number, index, change))
    yield from _of_parameters(programs)
    yield from _of_stages(programs)
    yield from _of_schedule(programs, shape)


def _with_graph(programs: Programs, stage: int, block: int, index: int, change: Change) -> Callable[[], Programs]:
    def make() -> Programs:
        program = programs[stage]
        old = program.blocks[block]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in old.graph.nodes:
            copies[node] = graph.node_copy(node, lambda one: copies[one])
        change(graph, copies[list(old.graph.nodes)[index]])
        graph.lint()
        blocks = list(program.blocks)
        blocks[block] = replace(old, graph=graph)
        return _with(programs, replace(program, blocks=tuple(blocks)))

    return make


def _with(programs: Programs, changed: StageProgram) -> Programs:
    return tuple(changed if program.stage == changed.stage else program for program in programs)


def _changes(node: fx.Node, program: StageProgram) -> Iterator[tuple[str, Change]]:
    """What can be done to one node."""
    if node.target in COLLECTIVES:
        yield from _of_collective(node, program)
    if node.target is read_parameter and "grad_scale" in node.kwargs:
        yield "gradient divided not", _without("grad_scale")
        yield "gradient divided twice", _options(grad_scale=node.kwargs["grad_scale"] ** 2)
    if node.target is read_parameter and "grad_scale" not in node.kwargs and program.mesh.size > 1:
        yield "gradient divided", _options(grad_scale=0.5)
    for key in node.kwargs:
        if key.endswith("groups") and node.kwargs[key]:
            yield "groups left out", _options(**{key: ()})
            others = tuple(name for name in program.mesh.names if name not in node.kwargs[key])
            if others:
                yield "groups of another axis", _options(**{key: others[:1]})
    if node.target is aten.div.Scalar:
        yield "division dropped", _dropped
        yield "division doubled", _doubled
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield "gradient cut", _wrapped(lambda graph, new: graph.call_function(aten.detach.default, (new,)))
        if program.mesh.size > 1 and node.target not in COLLECTIVES:
            axis = program.mesh.names[0]
            yield "identity added", _wrapped(lambda graph, new: graph.call_function(identity, (new,), {"group": axis}))
            yield (
                "all_reduce added",
                _wrapped(
                    lambda graph, new: graph.call_function(all_reduce, (new,), {"group": axis, "backward": "none"})
                ),
            )
        yield from _of_operands(node)


def _of_collective(node: fx.Node, program: StageProgram) -> Iterator[tuple[str, Change]]:
    yield "collective dropped", _dropped
    yield "collective doubled", _doubled
    for name in program.mesh.names:
        if name != node.kwargs["group"]:
            yield "collective on another axis", _options(group=name)
    group, options = node.kwargs["group"], dict(node.kwargs)
    backward = {"all_reduce": "none", "none": "all_reduce", "split": "reduce_scatter", "reduce_scatter": "split"}
    if node.target in (all_gather, all_reduce):
        yield "wrong conjugate", _options(backward=backward[str(options["backward"])])
    others: dict[Any, list[tuple[Any, dict[str, Any]]]] = {
        identity: [(all_reduce, {"backward": "all_reduce"}), (all_reduce, {"backward": "none"}), (divide, {})],
        divide: [(identity, {}), (all_reduce, {"backward": "none"})],
        all_reduce: [(identity, {}), (divide, {})],
        split: [(reduce_scatter, {"dim": options.get("dim")})],
        reduce_scatter: [(split, {"dim": options.get("dim")})],
    }
    for function, own in others.get(node.target, []):
        yield "collective of another kind", _retargeted(function, {**own, "group": group})
    for key in ("dim", "gather_dim", "shard_dim"):
        if key in options:
            yield "collective of another dimension", _options(**{key: 1 if options[key] == 0 else options[key] - 1})
    if node.target is all_to_all:
        ends = {"gather_dim": options["shard_dim"], "shard_dim": options["gather_dim"]}
        yield "collective of another kind", _options(**ends)
    if node.target is split:
        yield "another rank's piece", _rolled
    users = list(node.users)
    if len(users) == 1 and users[0].op == "call_function" and users[0].target not in COLLECTIVES:
        yield "collective moved down", _moved_down
    producer = node.all_input_nodes[0]
    simple = producer.op == "call_function" and len(producer.all_input_nodes) == 1
    if simple and producer.target not in (read_parameter, operator.getitem):
        yield "collective moved up", _moved_up


def _of_operands(node: fx.Node) -> Iterator[tuple[str, Change]]:
    """Another value of the same shape, computed earlier, in the place of an operand."""
    for operand in node.all_input_nodes:
        mine = operand.meta.get("val")
        for other in node.graph.nodes:
            if other is node:
                break
            value = other.meta.get("val")
            if (
                other.op == "call_function"
                and other is not operand
                and isinstance(value, torch.Tensor)
                and isinstance(mine, torch.Tensor)
                and (value.shape, value.dtype) == (mine.shape, mine.dtype)
            ):
                yield "another operand", _rewired(operand.name, other.name)
                return


def _dropped(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def _doubled(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        again = graph.call_function(node.target, (node, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
    again.meta.update(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _options(**changed: Any) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, **changed}

    return change


def _without(key: str) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != key}

    return change


def _retargeted(function: Callable[..., Any], options: dict[str, Any]) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        node.target, node.kwargs = function, options

    return change


def _wrapped(make: Callable[[fx.Graph, fx.Node], fx.Node]) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_after(node):
            new = make(graph, node)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return change


def _rolled(graph: fx.Graph, node: fx.Node) -> None:
    operand = node.all_input_nodes[0]
    length = node.meta["val"].shape[node.kwargs["dim"]]
    with graph.inserting_before(node):
        rolled = graph.call_function(aten.roll.default, (operand, [length], [node.kwargs["dim"]]))
    rolled.meta.update(operand.meta)
    node.args = (rolled,)


def _moved_down(graph: fx.Graph, node: fx.Node) -> None:
    (user,) = node.users
    user.replace_input_with(node, node.all_input_nodes[0])
    node.replace_all_uses_with(node.all_input_nodes[0])
    with graph.inserting_after(user):
        moved = graph.call_function(node.target, (user,), dict(node.kwargs))  # type: ignore[arg-type]
    moved.meta.update(user.meta)
    user.replace_all_uses_with(moved, delete_user_cb=lambda one: one is not moved)
    graph.erase_node(node)


def _moved_up(graph: fx.Graph, node: fx.Node) -> None:
    producer = node.all_input_nodes[0]
    source = producer.all_input_nodes[0]
    with graph.inserting_before(producer):
        moved = graph.call_function(node.target, (source,), dict(node.kwargs))  # type: ignore[arg-type]
    moved.meta.update(source.meta)
    with graph.inserting_after(producer):
        again = graph.node_copy(producer, lambda one: moved if one is source else one)
    producer.append(again)
    node.replace_all_uses_with(again)
    graph.erase_node(node)


def _rewired(old: str, new: str) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        by_name = {one.name: one for one in graph.nodes}
        node.replace_input_with(by_name[old], by_name[new])

    return change


def _of_parameters(programs: Programs) -> Iterator[Mutant]:
    """A gradient summed twice, not at all, or over other axes."""
    names = dict.fromkeys(name for program in programs for name in program.parameters)
    for name in names:
        layout = next(program.parameters[name] for program in programs if name in program.parameters)
        for axis, (mesh_axis, placement) in enumerate(zip(programs[0].mesh.axes, layout.layout, strict=True)):
            if axis in layout.partial_axes:
                left = tuple(other for other in layout.partial_axes if other != axis)
                changed = replace(layout, partial_axes=left, zero_axes=tuple(a for a in layout.zero_axes if a != axis))
                yield Mutant("gradient not summed", f"{name} over {mesh_axis.name}", _stored(programs, name, changed))
            elif placement == Replicate() and mesh_axis.size > 1:
                more = tuple(sorted((*layout.partial_axes, axis)))
                changed = replace(layout, partial_axes=more)
                yield Mutant("gradient summed twice", f"{name} over {mesh_axis.name}", _stored(programs, name, changed))
        if len(layout.stages) > 1:
            changed = replace(layout, stages=layout.stages[:1])
            yield Mutant("gradient not summed", f"{name} over stages", _stored(programs, name, changed))


def _stored(programs: Programs, name: str, layout: ParameterLayout) -> Callable[[], Programs]:
    def make() -> Programs:
        return tuple(
            replace(p, parameters={n: layout if n == name else old for n, old in p.parameters.items()})
            for p in programs
        )

    return make


def _of_stages(programs: Programs) -> Iterator[Mutant]:
    """A stage that sends another tensor, or the same ones in another order; a loss that is summed otherwise."""
    for program in programs:
        yield from _under_names_sent(programs, program)
        for number, spec in enumerate(program.sent):
            others = [
                (block, name, node)
                for block in program.blocks
                for name, node in zip(block.outputs, _results(block), strict=True)
                if name != spec.name and _alike(node, spec)
            ]
            for _, name, _ in others[:2]:
                changed = list(program.sent)
                changed[number] = replace(spec, name=name)
                yield Mutant(
                    "another tensor sent",
                    f"stage {program.stage}: {name} for {spec.name}",
                    _sent(programs, program, changed),
                )
        for number in range(1, len(program.sent)):
            changed = list(program.sent)
            changed[0], changed[number] = changed[number], changed[0]
            yield Mutant(
                "another tensor sent",
                f"stage {program.stage}: 0 and {number} swapped",
                _sent(programs, program, changed),
            )
    last = programs[-1]
    if last.loss is not None:
        for axis in range(len(last.mesh)):
            axes = set(last.loss_partial_axes) ^ {axis}
            yield Mutant(
                "loss summed otherwise",
                f"over {sorted(axes)}",
                lambda axes=axes: _with(programs, replace(last, loss_partial_axes=tuple(sorted(axes)))),  # type: ignore[misc]
            )


def _under_names_sent(programs: Programs, program: StageProgram) -> Iterator[Mutant]:
    """A block that gives another value of the same shape under a name that is sent."""
    sent = {spec.name for spec in program.sent}
    for number, block in enumerate(program.blocks):
        nodes = list(block.graph.nodes)
        for place, (name, node) in enumerate(zip(block.outputs, _results(block), strict=True)):
            value = node.meta.get("val")
            if name not in sent or not isinstance(value, torch.Tensor):
                continue
            others = [n for n in nodes if n.op == "call_function" and n is not node and _alike(n, value)]
            for other in others[-2:]:
                change = _result(place, other.name)
                yield Mutant(
                    "another tensor sent",
                    f"stage {program.stage}, {block.name}: {other.name} as {name}",
                    _with_graph(programs, program.stage, number, len(nodes) - 1, change),
                )


def _result(place: int, name: str) -> Change:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        (results,) = node.args
        by_name = {one.name: one for one in graph.nodes}
        node.args = (tuple(by_name[name] if n == place else one for n, one in enumerate(results)),)  # type: ignore[arg-type]

    return change


def _of_schedule(programs: Programs, shape: Pipelining) -> Iterator[Mutant]:
    """Two actions of one rank swapped. Without a pipeline there is no order to follow."""
    for rank, order in enumerate(shape.orders() if shape.num_ranks > 1 else ()):
        for one, two in combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[one], swapped[two] = order[two], order[one]
            orders = (*shape.orders()[:rank], tuple(swapped), *shape.orders()[rank + 1 :])
            text = f"{order[one]} and {order[two]} of rank {rank}, {shape.schedule}"
            yield Mutant("schedule actions swapped", text, lambda: programs, orders)


def _results(block: BlockProgram) -> tuple[fx.Node, ...]:
    (output,) = (node for node in block.graph.nodes if node.op == "output")
    return tuple(output.args[0])  # type: ignore[arg-type]


def _alike(node: fx.Node, spec: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype)


def _sent(programs: Programs, program: StageProgram, sent: Sequence[Any]) -> Callable[[], Programs]:
    """Names of what is received stay, so that the next stage runs as before on what it is given."""
    return lambda: _with(programs, replace(program, sent=tuple(sent)))
