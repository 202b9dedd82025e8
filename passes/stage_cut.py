"""The ops, inputs and outputs of each pipeline stage.

The prelude (positions, masks, label shifts: whatever depends on no parameter) is cheap and is repeated on every stage
that needs it; everything else is computed once and sent on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE, BlockRepetition
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, call_nodes, has_gradient_dtype
from autopar.ir.plan import Plan
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class StageCut:
    """A program cut into blocks and stages."""

    program: PlacedProgram

    @property
    def captured(self) -> CapturedModel:
        """The captured model."""
        return self.program.placed.captured

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.program.placed.plan

    @property
    def repetition(self) -> BlockRepetition:
        """Its blocks, and which of them repeat."""
        return self.program.placed.analysis.repetition

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Dotted name of every parameter and buffer, by placeholder name."""
        return {
            **{name: p.name for name, p in self.captured.parameters.items()},
            **{name: b.name for name, b in self.captured.buffers.items()},
        }

    @cached_property
    def by_block(self) -> Mapping[int, list[fx.Node]]:
        """The ops of every block, PRELUDE included."""
        found: dict[int, list[fx.Node]] = {}
        for node in call_nodes(self.program.graph):
            found.setdefault(node.meta["block"], []).append(node)
        return found

    def stage_of(self, node: fx.Node) -> int:
        """Stage that computes ``node``; the prelude is on all of them, counted as the first."""
        block = node.meta["block"]
        return 0 if block == PRELUDE else self.plan.stage_of(block)

    def kept(self) -> set[fx.Node]:
        """Nodes that the caller or a buffer needs after the last block."""
        return {*self.program.outputs, *self.program.updates.values()}

    def crossing(self, stage: int) -> list[fx.Node]:
        """Values that enter ``stage`` from the one before, in order; none at the two ends of the pipeline."""
        if not 0 < stage < self.plan.num_stages:
            return []
        values, forward_only = [], self.program.results == "model"  # then no gradient goes back over a cut
        for node in call_nodes(self.program.graph):
            if node.meta["block"] == PRELUDE or self.stage_of(node) >= stage:
                continue
            later = [u for u in node.users if u.op == "call_function" and self.stage_of(u) >= stage]
            handed_out = forward_only and node in self.program.outputs
            if later or handed_out:
                if not forward_only and not has_gradient_dtype(node.meta["val"]):
                    raise PlanMismatch(
                        f"stages: the cut before stage {stage} would send {node.name}, a {node.meta['val'].dtype} "
                        f"tensor; only floating point tensors cross a cut.\n  needed by: {later[0].format_node()}\n"
                        "  try: cut at another block"
                    )
                values.append(node)
        return values

    def parameter_stages(self) -> dict[str, set[int]]:
        """Parameter placeholder name -> stages that read it."""
        found: dict[str, set[int]] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in self.captured.parameters:
                found[node.name] = {self.stage_of(user) for user in node.users if user.op == "call_function"}
        return found

    def idle_parameters(self) -> dict[str, int]:
        """Placeholder name of a parameter that no op of the program reads -> the stage that holds it.

        It is the stage of the captured op that does read it, if there is one; the first of a parameter without any.
        """
        read = {name for name, stages in self.parameter_stages().items() if stages}
        found = {name: 0 for name in self.captured.parameters if name not in read}
        for node in self.captured.graph.nodes:
            if node.name in found and node.op == "placeholder":
                blocks = [self.repetition.block_of[user] for user in node.users if user in self.repetition.block_of]
                found[node.name] = self.plan.stage_of(min(blocks)) if blocks else 0
        return found

    def shared(self, stage: int) -> tuple[list[str], list[str]]:
        """Dotted names of the parameters and of the buffers that several blocks of ``stage`` read."""
        parameters: list[str] = []
        buffers: list[str] = []
        for node in self.program.graph.nodes:
            if node.op != "placeholder" or node.name not in self.names:
                continue
            readers = {
                user.meta["block"] for user in node.users if user.op == "call_function" and self.runs_on(user, stage)
            }
            if len(readers) > 1:
                (parameters if node.name in self.captured.parameters else buffers).append(self.names[node.name])
        return parameters, buffers

    def runs_on(self, node: fx.Node, stage: int) -> bool:
        """Whether ``stage`` computes ``node``, alone or as every other."""
        return node.meta["block"] == PRELUDE or self.stage_of(node) == stage
