"""One tensor from the rule of the op that makes it to the collective that its user waits for, in the compiler's words.

The down projection of a layer of Llama 3 8B, on two ranks with tensor and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

import torch
from torch import fx
from transformers import LlamaForCausalLM

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import call_nodes, tensor_operands
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.placed_model import PlacedModel, place_captured
from autopar.ir.placed.records import Record
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.placed.uses import Move
from autopar.ir.placement import Layout, Placement, Replicate, Shard
from autopar.ir.rule import FactorRule, TensorFactors
from autopar.passes.insert_redistributions import NAME as INSERT
from autopar.passes.lower_redistributions import LowerRedistributions
from autopar.passes.narrow_compute import NarrowCompute
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.placed_program import PlacedProgram
from autopar.passes.printing import node_text
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from examples.llama3_8b import config
from scripts.architecture.svg import Picture

LAYERS, LENGTH, WEIGHT = 2, 8192, "model.layers.0.mlp.down_proj.weight"
WIDTH, LEFT, TEXT, LINE, LETTERS = 860.0, 24.0, 36.0, 18.0, 113
SHOWN = (INSERT, LowerRedistributions.name, NarrowCompute.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """op: that makes the tensor; user: that needs it, at ``position``. programs: its line after each pass shown."""

    placed: PlacedModel
    op: fx.Node
    user: fx.Node
    position: int
    move: Move
    records: tuple[Record, ...]
    programs: dict[str, str]

    @property
    def rule(self) -> FactorRule:
        return self.placed.analysis.rule(self.op)


def journey() -> Journey:
    """Of the output of the row-parallel linear."""
    sizes = config()
    sizes.num_hidden_layers = LAYERS
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(sizes), torch.zeros((1, LENGTH), dtype=torch.long)
    captured = normalise(capture(model, {"input_ids": tokens, "labels": tokens.clone()}, name="Llama 3 8B"))
    constraints = Constraints(tp=2, zero=0, sequence_parallel=True, precision="bf16")
    placed = place_captured(captured, estimate_captured(captured, make_cluster("h100-sxm", 2), constraints).plan)
    (weight,) = (name for name, parameter in captured.parameters.items() if parameter.name == WEIGHT)
    (op,) = (node for node in call_nodes(captured.graph) if weight in {n.name for n in tensor_operands(node)})
    (user,) = op.users
    position = list(tensor_operands(user)).index(op)
    (move,) = Operands(placed=placed, results="loss").of(user, position).moves
    programs: dict[str, str] = {}

    def note(name: str, program: PlacedProgram) -> None:
        moved = (
            next(n for n in call_nodes(program.graph) if n.args[:1] == (ops[0],)) if (ops := _of(program, op)) else None
        )
        if name in SHOWN and moved is not None:
            programs[name] = node_text(moved, placed.mesh)

    partition(placed, after=note)
    records = tuple(
        record for record in step_communication(placed) if record.cause == "redistribution" and record.of == op.name
    )
    return Journey(placed=placed, op=op, user=user, position=position, move=move, records=records, programs=programs)


def _of(program: PlacedProgram, op: fx.Node) -> list[fx.Node]:
    return [node for node in call_nodes(program.graph) if program.origin.get(node) is op]


def draw() -> Picture:
    found = journey()
    rule, (label,) = found.rule, found.placed.layouts.assignments[found.op]
    axis = found.placed.mesh.names[0]
    inputs = [_on(rule.operand(number, label)[0]) for number in range(2)]
    made, need = found.placed.layouts.made(found.op), found.placed.layouts.need(found.user, found.position)
    step = found.move.step
    picture = Picture(
        title="One tensor, from the rule of its op to the collective in the program",
        description=f"The output of {WEIGHT.removesuffix('.weight')} under {axis}={found.placed.mesh.size}",
        width=WIDTH,
    )
    picture.text(LEFT, 34, picture.title, "bold", size=17)
    picture.text(LEFT, 54, f"{WEIGHT} of Llama 3 8B on two H100, tensor and sequence parallel, as printed", "soft")
    sizes = " ".join(f"{name}={size}" for name, size in rule.sizes.items())
    y = 74.0
    for name, says, lines in (
        ("captured", "an op on the global batch", [node_text(found.op)]),
        (
            "rule",
            "factors of its loops",
            [
                f"linear: {', '.join(map(_factors, rule.operands))} -> {_factors(rule.results[0])}",
                f"        {sizes}; {', '.join(sorted(rule.summed))} is summed",
            ],
        ),
        (
            "label",
            "chosen by the search",
            [
                f"{axis} on {label}: x is {inputs[0]}, weight is {inputs[1]}, the result is {_layout(made)}",
            ],
        ),
        (
            "needed",
            "by the residual connection",
            [
                node_text(found.user),
                f"needs operand {found.position} as {_layout(need.value)}, "
                f"gives its gradient back as {_layout(need.grad)}",
            ],
        ),
        (
            "redistribution",
            "a record of the placed model",
            [
                f"{_layout(found.move.before)} -> {_layout(found.move.after)} on {axis}: "
                f"{step.forward.value} forward, {step.backward.value} backward",
                *(
                    f"{record.phase}: {record.kind} over {', '.join(record.axes)}, "
                    f"{record.payload_bytes / 2**20:.0f} MiB, {record.times} a step"
                    for record in found.records
                ),
            ],
        ),
        *(("program", f"after {step}", [text]) for step, text in found.programs.items()),
    ):
        lines = [
            part for line in lines for part in wrap(line, LETTERS, subsequent_indent="    ", drop_whitespace=False)
        ]
        named = picture.text(LEFT, y + 18, name, "bold", size=14)
        picture.text(named.right + 10, y + 18, says, "soft", size=12)
        height = len(lines) * LINE + 14
        picture.box(LEFT, y + 26, WIDTH - 2 * LEFT, height)
        for number, line in enumerate(lines):
            picture.text(TEXT, y + 45 + LINE * number, line, "code", size=11.5)
        y += height + 36
        if name == "label":
            y = _shards(picture, y, found, label)
    picture.height = y + 8
    return picture


def _shards(picture: Picture, y: float, found: Journey, label: str | None) -> float:
    """The operands and the result as matrices, with the part that each of two ranks has."""
    rule = found.rule
    operands = [(rule.operand(number, label)[0], name) for number, name in enumerate(("x", "weight"))]
    factors = dict(zip(("x", "weight", "result"), (*rule.operands, *rule.results)))
    x = TEXT
    for (placement, name), sign in zip([*operands, (rule.result(0, label), "result")], ("", "×", "=")):
        if sign:
            picture.text(x - 26, y + 38, sign, size=18)
        width, height = 130.0, 60.0
        _matrix(picture, x + 15, y, width, height, placement, len(factors[name]))
        says = f"{name} ({_factors(factors[name])}): {_on(placement)}"
        picture.text(x, y + height + 16, says, "code", size=11.5)
        x += width + 66
    for rank in range(2):
        picture.box(x + 10, y + 12 + 24 * rank, 14, 14, tone=f"part-{rank}")
        picture.text(x + 30, y + 24 + 24 * rank, f"rank {rank}", "soft", size=11.5)
    return y + 96


def _matrix(picture: Picture, x: float, y: float, width: float, height: float, placement: Placement, rank: int) -> None:
    """Rows are the last dimension but one. Summands are drawn one above the other."""
    if isinstance(placement, Shard):
        across = placement.dim == rank - 1
        for part in range(2):
            left, top = x + part * width / 2 * across, y + part * height / 2 * (not across)
            picture.box(left, top, width / (1 + across), height / (2 - across), tone=f"part-{part}")
        return
    for part in range(2):
        shift = 0.0 if isinstance(placement, Replicate) else 10.0 * part
        picture.box(x + shift, y + shift, width - 10, height - 10, tone=f"part-{part}")


def _factors(tensor: TensorFactors) -> str:
    return " ".join("&".join(dim) or "1" for dim in tensor)


def _layout(layout: Layout) -> str:
    return ", ".join(map(_on, layout))


def _on(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Replicate()" if placement.is_replicate() else "Partial()"
