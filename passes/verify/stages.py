"""Types of the stages of a pipeline, one after the other: block by block, from the step inputs to the loss.

A stage is an environment of named values (``autopar.ir.program``). What stage i sends is what stage i + 1 receives, in
order, and its gradient comes back the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Replicate, Shard
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.program import BlockProgram, ParameterLayout, StageProgram, TensorSpec
from autopar.passes.verify import parameters
from autopar.passes.verify.calls import CallTyper
from autopar.passes.verify.terms import Terms
from autopar.passes.verify.types import TIME, Mistyped, Type
from autopar.passes.verify.values import Call, Derivation, Value

Environment = dict[str, Value]


class Unplaced(Exception):
    """What is wrong, and where: the message of a ``Mistyped`` with the stage, the block and the op."""


@dataclass(slots=True)
class StageTyper:
    """Types stages in order. calls: of all of them, in order; what is received is the very value that is sent."""

    captured: CapturedModel
    mesh: Mesh
    compute: torch.dtype | None
    placeholders: Mapping[str, str]
    typer: CallTyper = field(init=False)
    calls: list[Call] = field(default_factory=list)
    held: dict[Value, ParameterLayout] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.typer = CallTyper(Terms.number(self.captured), self.mesh, self.compute)
        self.nodes = {node.name: node for node in self.captured.graph.nodes if node.op == "placeholder"}

    def stage(self, program: StageProgram, sent: Sequence[tuple[TensorSpec, Value]]) -> Environment:
        """The values of a stage by name. sent: what the stage before sends. Raises Unplaced."""
        try:
            environment = self._start(program, sent)
        except Mistyped as error:
            raise Unplaced(f"stage {program.stage}: {error}") from error
        for block in (*program.totals, *program.blocks):
            outputs = self._block(program, block, environment)
            environment.update(zip(block.outputs, outputs, strict=True))
        for block in program.totals:
            self._check_totals(program, block)
        return environment

    def sent(self, program: StageProgram, environment: Environment) -> list[tuple[TensorSpec, Value]]:
        """Specifications and typed values of the tensors that a stage sends. Raises Unplaced if a shape is another one
        than that of the value's type."""
        found = []
        for spec in program.sent:
            value = environment.get(spec.name)
            if value is None or not any(kind.shape(self.mesh) == spec.shape for kind in value.types):
                kinds = "nothing" if value is None else "; ".join(kind.show(self.mesh) for kind in value.types)
                raise Unplaced(f"stage {program.stage}: sends {spec}; the stage has {kinds} under that name")
            found.append((spec, value))
        return found

    def _start(self, program: StageProgram, sent: Sequence[tuple[TensorSpec, Value]]) -> Environment:
        """What a stage has before its first block runs."""
        environment: Environment = {}
        for name, key in program.inputs.items():
            environment[name] = self._input(program, name, key)
        for name, tensor in program.constants.items():
            if self.captured.constants.get(name) is not tensor:
                raise Mistyped(f"constant {name} is not that of the model")
            environment[name] = self._whole(name)
        for name in program.shared_parameters:
            environment[name] = self._parameter(program, name)
        for name in program.shared_buffers:
            environment[name] = self._buffer(program, name)
        if [spec for spec, _ in sent] != list(program.received):
            got, wanted = ([spec.name for spec in specs] for specs in ((s for s, _ in sent), program.received))
            raise Mistyped(
                f"receives {wanted}; the stage before sends {got}, of these names, shapes and dtypes in order"
            )
        environment.update((spec.name, value) for spec, value in sent)
        return environment

    def _whole(self, name: str) -> Value:
        """A placeholder of the model that every rank has whole."""
        return Value((self.typer.plain(self.typer.terms.of[self.nodes[name]]),))

    def _input(self, program: StageProgram, name: str, key: str) -> Value:
        step_input = self.captured.inputs.get(name)
        layout = program.input_layouts.get(name)
        if step_input is None or step_input.key != key or layout is None:
            raise Mistyped(f"{name} is no step input of the model under the key {key!r}, or has no layout")
        rows = None if step_input.batch_dim is None else Shard(step_input.batch_dim)
        if any(placement not in (rows, Replicate()) for placement in layout):
            raise Mistyped(f"step input {name} arrives as {layout}; its batch is dimension {step_input.batch_dim}")
        in_time: Placement = rows if rows is not None and self.mesh.sizes[TIME] > 1 else Replicate()
        return Value((Type(self.typer.terms.of[self.nodes[name]], (in_time, *layout)),))

    def _parameter(self, program: StageProgram, name: str) -> Value:
        layout = program.parameters.get(name)
        if layout is None:
            raise Mistyped(f"reads parameter {name}, which the stage does not hold")
        term = self.typer.terms.of[self.nodes[self.placeholders[name]]]
        value = parameters.stored(layout, term, self.mesh)
        self.held[value] = layout
        return value

    def _buffer(self, program: StageProgram, name: str) -> Value:
        found = [place for place, buffer in self.captured.buffers.items() if buffer.name == name]
        if name not in program.buffers or not found:
            raise Mistyped(f"reads buffer {name}, which the stage does not hold")
        return self._whole(found[0])

    def _block(self, program: StageProgram, block: BlockProgram, environment: Environment) -> list[Value]:
        values: dict[fx.Node, Value] = {}
        several: dict[fx.Node, tuple[Value, ...]] = {}
        inputs = iter(block.inputs)
        for node in block.graph.nodes:
            place = f"stage {program.stage}, block {block.name}"
            try:
                if node.op == "placeholder":
                    name = next(inputs)
                    if name not in environment:
                        raise Mistyped(f"reads {name}, which the stage does not have yet")
                    values[node] = environment[name]
                elif node.op == "get_attr":
                    read = self._parameter if node.target in program.parameters else self._buffer
                    values[node] = read(program, str(node.target))
                elif node.op == "output":
                    return [values[result] for result in node.args[0]]
                elif node.target is operator.getitem:
                    values[node] = several[node.args[0]][node.args[1]]
                else:
                    results = self._call(node, values, place)
                    several[node] = results
                    values[node] = results[0]
            except Mistyped as error:
                raise Unplaced(located(node, place, str(error))) from error
            except KeyError as error:
                raise Unplaced(located(node, place, f"reads {error}, which is no value")) from error
        raise Unplaced(f"stage {program.stage}, block {block.name}: the graph has no output")

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Value], place: str) -> tuple[Value, ...]:
        operands = {operand: values[operand] for operand in node.all_input_nodes}
        given, derivations, flows = self._derive(node, operands)
        results = []
        for number in range(len(derivations[0].results)):
            kinds = tuple(dict.fromkeys(d.results[number] for d in derivations))
            typed = tuple(kind for kind in kinds if kind is not None)
            results.append(Value(typed, flows and any(kind.term.carries_gradient for kind in typed)))
        self.calls.append(Call(node=node, place=place, operands=given, results=tuple(results), derivations=derivations))
        return tuple(results)

    def _derive(
        self, node: fx.Node, operands: dict[fx.Node, Value]
    ) -> tuple[tuple[Value, ...], tuple[Derivation, ...], bool]:
        if node.target is read_parameter:
            (value,) = operands.values()
            if value not in self.held:
                raise Mistyped("it reads what is no parameter")
            return (value,), (parameters.read(node, value, self.held[value], self.compute),), value.needs_gradient
        for value in operands.values():
            if value in self.held:
                raise Mistyped("it takes a stored parameter; expected what read_parameter gives of it")
        return self.typer.derive(node, operands)

    def _check_totals(self, program: StageProgram, block: BlockProgram) -> None:
        (output,) = (node for node in block.graph.nodes if node.op == "output")
        if any(result.target is not whole_batch for result in output.args[0]):
            raise Unplaced(f"stage {program.stage}, {block.name}: a result is no sum over the whole batch")


def located(node: fx.Node, place: str, reason: str) -> str:
    """A message that names the op, its place and its source line."""
    source = node.meta.get("source")
    line = f"\n  at {source}" if source else ""
    return f"{place}: {node.format_node() or node.name}{line}\n  {reason}"
