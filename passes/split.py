"""Cut the program of one rank into blocks and pipeline stages.

Each block becomes a graph of its own, from named stage values to named stage values. The prelude (positions,
masks, label shifts: whatever depends on no parameter) is cheap and is repeated on every stage that needs it;
everything else is computed once and sent on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from autopar.ir.analysis.blocks import Folding
from autopar.ir.analysis.op_clusters import Clusters
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, has_gradient_dtype
from autopar.ir.plan import Plan, StagePlan
from autopar.ir.primitives.collectives import identity, split
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.program import BlockProgram, ParameterLayout, Remat, StageProgram, TensorSpec
from autopar.ir.torch_private import OpOverload, schema_of
from autopar.passes.parameters import Storage
from autopar.passes.shard import PRELUDE, ShardedProgram

# Functions besides ATen's views whose result may share its memory with their operand.
_SHARING = (identity, split)


def split_stages(
    captured: CapturedModel,
    folding: Folding,
    clusters: Clusters,
    sharded: ShardedProgram,
    storage: Mapping[str, Storage],
    shard_axes: tuple[int, ...],
    plan: Plan,
    *,
    outputs: str,
) -> tuple[StageProgram, ...]:
    """One program per stage of ``plan``. Raises PlanMismatch where a tensor cannot cross a cut."""
    cut = _Cut(captured, sharded, plan, outputs == "model")
    readers, idle = cut.parameter_stages(), cut.idle_parameters(folding)
    layouts = {
        name: ParameterLayout(
            parameter=parameter,
            layout=storage[name].layout,
            partial_axes=storage[name].partial_axes,
            zero_axes=storage[name].zero_axes,
            stages=(idle[name],) if name in idle else tuple(sorted(readers[name])),
        )
        for name, parameter in captured.parameters.items()
    }
    by_name = {layout.parameter.name: layout for layout in layouts.values()}
    input_layouts = {
        node.name: tuple(
            clusters.input_placement(node, "batch" if name in plan.inputs else None) for name in plan.stage_mesh.names
        )
        for node in clusters.input_dims
    }
    programs = []
    for number in range(plan.num_stages):
        blocks, totals = cut.blocks(number, folding), cut.totals(number)
        parts = (*totals, *blocks)
        read_by_many, buffers_of_many = cut.shared(number)
        held = {p for b in blocks for p in b.parameters} | set(read_by_many)
        updates = {name: node.name for name, node in sharded.updates.items() if cut.stage_of(node) == number}
        used_buffers = {b for block in parts for b in block.buffers} | {*buffers_of_many, *updates}
        wanted = {name for block in parts for name in block.inputs} | {n.name for n in sharded.outputs}
        last = number == plan.num_stages - 1
        whole = last and outputs == "model"
        mine = [
            n.name if whole or cut.stage_of(n) == number or n.op == "placeholder" else None for n in sharded.outputs
        ]
        loss = mine[0] if outputs == "loss" and mine else None
        partial = sharded.output_layouts[0] if sharded.output_layouts else ()
        programs.append(
            StageProgram(
                stage=number,
                num_stages=plan.num_stages,
                mesh=plan.stage_mesh,
                blocks=blocks,
                inputs={name: step.key for name, step in captured.inputs.items() if name in wanted},
                received=tuple(_spec(n) for n in cut.crossing(number)),
                sent=tuple(_spec(n) for n in cut.crossing(number + 1)),
                parameters={name: layout for name, layout in by_name.items() if name in held},
                buffers={b.name: b for b in captured.buffers.values() if b.name in used_buffers},
                constants={name: value for name, value in captured.constants.items() if name in wanted},
                shared_parameters=tuple(read_by_many),
                shared_buffers=tuple(buffers_of_many),
                buffer_updates=updates,
                summed_updates=sharded.summed & updates.keys(),
                outputs=tuple(mine),
                output_layouts=tuple(
                    layout if name is not None else None
                    for name, layout in zip(mine, sharded.output_layouts, strict=True)
                ),
                loss=loss,
                loss_partial_axes=tuple(axis for axis, p in enumerate(partial) if p.is_partial()) if loss else (),
                num_microbatches=plan.batch.num_microbatches,
                shard_axes=shard_axes,
                input_layouts={name: layout for name, layout in input_layouts.items() if name in wanted},
                totals=totals,
                unread={captured.parameters[n].name: layouts[n] for n, stage in idle.items() if stage == number},
                output_microbatches=sharded.output_microbatches if whole else (),
                output_specs=tuple(map(_spec, sharded.outputs)) if whole else (),
            )
        )
    return tuple(programs)


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(name=node.name, shape=tuple(value.shape), dtype=value.dtype)


@dataclass(slots=True)
class _Cut:
    """The sharded graph seen as blocks and stages. forward_only: no gradients go back over a cut."""

    captured: CapturedModel
    sharded: ShardedProgram
    plan: Plan
    forward_only: bool
    names: dict[str, str] = field(init=False)
    by_block: dict[int, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {
            **{name: p.name for name, p in self.captured.parameters.items()},
            **{name: b.name for name, b in self.captured.buffers.items()},
        }
        self.by_block = {}
        for node in self.sharded.graph.nodes:
            if node.op == "call_function":
                self.by_block.setdefault(node.meta["block"], []).append(node)

    def stage_of_block(self, block: int) -> int:
        for number, stage in enumerate(self.plan.stages):
            if stage.first <= block <= stage.last:
                return number
        raise AssertionError(f"block {block} is in no stage")

    def stage_of(self, node: fx.Node) -> int:
        """Stage that computes ``node``; the prelude is on all of them, counted as the first."""
        block = node.meta["block"]
        return 0 if block == PRELUDE else self.stage_of_block(block)

    def kept(self) -> set[fx.Node]:
        """Nodes that the caller or a buffer needs after the last block."""
        return {*self.sharded.outputs, *self.sharded.updates.values()}

    def crossing(self, stage: int) -> list[fx.Node]:
        """Values that enter ``stage`` from the one before, in order; none at the two ends of the pipeline."""
        if not 0 < stage < self.plan.num_stages:
            return []
        values = []
        for node in self.sharded.graph.nodes:
            if node.op != "call_function" or node.meta["block"] == PRELUDE or self.stage_of(node) >= stage:
                continue
            later = [u for u in node.users if u.op == "call_function" and self.stage_of(u) >= stage]
            handed_out = self.forward_only and node in self.sharded.outputs
            if later or handed_out:
                if not self.forward_only and not has_gradient_dtype(node.meta["val"]):
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
        for node in self.sharded.graph.nodes:
            if node.op == "placeholder" and node.name in self.captured.parameters:
                found[node.name] = {self.stage_of(user) for user in node.users if user.op == "call_function"}
        return found

    def idle_parameters(self, folding: Folding) -> dict[str, int]:
        """Placeholder name of a parameter that no op of the program reads -> the stage that holds it.

        It is the stage of the captured op that does read it, if there is one; the first of a parameter without any.
        """
        read = {name for name, stages in self.parameter_stages().items() if stages}
        found = {name: 0 for name in self.captured.parameters if name not in read}
        for node in self.captured.graph.nodes:
            if node.name in found and node.op == "placeholder":
                blocks = [folding.block_of[user] for user in node.users if user in folding.block_of]
                found[node.name] = self.stage_of_block(min(blocks)) if blocks else 0
        return found

    def shared(self, stage: int) -> tuple[list[str], list[str]]:
        """Dotted names of the parameters and of the buffers that several blocks of ``stage`` read."""
        parameters: list[str] = []
        buffers: list[str] = []
        for node in self.sharded.graph.nodes:
            if node.op != "placeholder" or node.name not in self.names:
                continue
            readers = {
                user.meta["block"] for user in node.users if user.op == "call_function" and self._runs_on(user, stage)
            }
            if len(readers) > 1:
                (parameters if node.name in self.captured.parameters else buffers).append(self.names[node.name])
        return parameters, buffers

    def _runs_on(self, node: fx.Node, stage: int) -> bool:
        return node.meta["block"] == PRELUDE or self.stage_of(node) == stage

    def blocks(self, stage: int, folding: Folding) -> tuple[BlockProgram, ...]:
        """The blocks of ``stage``: the part of the prelude that it needs, then its own."""
        plan = self.plan.stages[stage]
        own = range(plan.first, plan.last + 1)
        shared = {name for group in self.shared(stage) for name in group}
        prelude = self._prelude(self._roots(stage))
        programs = []
        if prelude:
            programs.append(self._extract("prelude", -1, prelude, shared, "none", set(prelude)))
        for number, index in enumerate(own):
            block = folding.blocks[index]
            nodes = self.by_block.get(index, [])
            if nodes:
                remat = _remat(plan, number)
                programs.append(self._extract(block.name, block.kind, nodes, shared, remat, set(nodes)))
        return tuple(programs)

    def totals(self, stage: int) -> tuple[BlockProgram, ...]:
        """What ``stage`` has to run on every microbatch before the first, the sums that others are made of first."""
        rounds: list[list[fx.Node]] = []
        roots = self._roots(stage)
        wanted = _sums(roots, self._prelude(roots))
        while wanted:
            rounds.insert(0, wanted)
            roots = [operand for node in wanted for operand in node.all_input_nodes]
            wanted = _sums(roots, self._prelude(roots))
        shared = {name for group in self.shared(stage) for name in group}
        programs: list[BlockProgram] = []
        done: set[fx.Node] = set()
        for number, wanted in enumerate(rounds):
            new = [node for node in wanted if node not in done]
            done.update(new)
            inside = [*self._prelude([operand for node in new for operand in node.all_input_nodes]), *new]
            programs.append(self._extract(f"total {number}", -1, inside, shared, "none", set(inside), new))
        return tuple(programs)

    def _roots(self, stage: int) -> list[fx.Node]:
        """Every value that the blocks of ``stage`` read, and what it hands out that no block computes."""
        plan = self.plan.stages[stage]
        roots = [
            operand
            for block in range(plan.first, plan.last + 1)
            for node in self.by_block.get(block, [])
            for operand in node.all_input_nodes
        ]
        if stage == self.plan.num_stages - 1:
            roots += [n for n in self.sharded.outputs if n.meta["block"] == PRELUDE]
        if stage == 0:
            roots += [n for n in self.sharded.updates.values() if n.meta["block"] == PRELUDE]
        return roots

    def _prelude(self, roots: Iterable[fx.Node]) -> list[fx.Node]:
        """The part of the prelude that ``roots`` are made of. Sums over the whole batch are given, not made."""
        needed: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            inside = node.op == "call_function" and node.meta["block"] == PRELUDE
            if inside and node.target is not whole_batch and node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        return [node for node in self.by_block.get(PRELUDE, []) if node in needed]

    def _extract(
        self,
        name: str,
        kind: int,
        nodes: list[fx.Node],
        shared: set[str],
        remat: Remat,
        inside: set[fx.Node],
        results: Sequence[fx.Node] | None = None,
    ) -> BlockProgram:
        """A graph of ``nodes`` alone. results: None for all that is needed outside."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        inputs: list[str] = []
        parameters: list[str] = []
        buffers: list[str] = []
        outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        for node in outside:
            dotted = self.names.get(node.name) if node.op == "placeholder" else None
            if dotted is None or dotted in shared:
                value = dotted or node.name
                copied[node] = graph.placeholder(node.name)
                inputs.append(value)
        for node in outside:
            dotted = self.names.get(node.name) if node.op == "placeholder" else None
            if dotted is not None and dotted not in shared:
                copied[node] = graph.create_node("get_attr", dotted, name=node.name)
                (parameters if node.name in self.captured.parameters else buffers).append(dotted)
        for node, new in copied.items():
            new.meta.update(node.meta)
        for node in nodes:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
        kept = self.kept()
        if results is None:
            results = [
                n for n in nodes if n in kept or any(u not in inside and u.op == "call_function" for u in n.users)
            ]
        freed = kind >= 0 and self.plan.zero_of(kind) == 3
        graph.output(tuple(_kept(copied[n]) if freed and _views_parameter(n) else copied[n] for n in results))
        return BlockProgram(
            name=name,
            kind=kind,
            graph=graph,
            inputs=tuple(inputs),
            outputs=tuple(n.name for n in results),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            remat=remat,
        )


def _views_parameter(node: fx.Node) -> bool:
    """Whether a value shares its memory with a parameter: a chain of views of what ``read_parameter`` gives."""
    while node.target is not read_parameter:
        operand = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(operand, fx.Node) or not _shares_memory(node.target):
            return False
        node = operand
    return True


def _shares_memory(target: object) -> bool:
    """Whether the result of an op may share its memory with its first operand."""
    if not isinstance(target, OpOverload):
        return target in _SHARING
    returns = schema_of(target).returns
    return bool(returns) and returns[0].alias_info is not None


def _kept(node: fx.Node) -> fx.Node:
    """A copy, for blocks that run when the parameters of this one are resharded and their memory is freed."""
    copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta.update(node.meta)
    return copy


def _sums(roots: Iterable[fx.Node], prelude: Iterable[fx.Node]) -> list[fx.Node]:
    """The sums over the whole batch among ``roots`` and among what the nodes of a prelude read."""
    read = [*roots, *(operand for node in prelude for operand in node.all_input_nodes)]
    return list(dict.fromkeys(node for node in read if node.target is whole_batch))


def _remat(stage: StagePlan, number: int) -> Remat:
    """Level of the stage's block ``number``: the strongest first."""
    levels: tuple[Literal["full", "alternate", "selective"], ...] = ("full", "alternate", "selective")
    for level in levels:
        count = stage.remat.get(level, 0)
        if number < count:
            return level
        number -= count
    return "none"
