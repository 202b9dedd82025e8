"""A graph for each block, from named values of its stage to named values.

Parameters and buffers that one block alone uses are read inside it by their dotted names; others are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.graph import call_nodes, is_getitem
from autopar.ir.placed.recomputed import Recomputed
from autopar.ir.primitives.collectives import identity, split
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.program import BlockProgram
from autopar.ir.rematerialisation import Remat
from autopar.ir.torch_private import OpOverload, schema_of
from autopar.passes.stage_cut import StageCut

# Functions besides ATen's views whose result may share its memory with their operand.
_SHARING = (identity, split)


@dataclass(frozen=True)
class BlockGraphs:
    """The graphs of the blocks of a program that is cut into stages."""

    cut: StageCut

    @cached_property
    def recomputed(self) -> Recomputed:
        """What runs again in blocks that keep what the plan lists."""
        return Recomputed(self.cut.program.operands)

    def blocks(self, stage: int) -> tuple[BlockProgram, ...]:
        """The blocks of ``stage``: the part of the prelude that it needs, then its own."""
        plan = self.cut.plan.stages[stage]
        own = range(plan.first, plan.last + 1)
        shared = {name for group in self.cut.shared(stage) for name in group}
        prelude = self._prelude(self._roots(stage))
        programs = []
        if prelude:
            programs.append(self._extract("prelude", -1, prelude, shared, "none", set(prelude)))
        for index in own:
            block = self.cut.repetition.blocks[index]
            nodes = self.cut.by_block.get(index, [])
            if nodes:
                remat = self.cut.program.placed.remat_of(index)
                programs.append(self._extract(block.name, block.kind, nodes, shared, remat, set(nodes)))
                if remat == "listed":
                    programs[-1] = replace(programs[-1], host=self.cut.program.placed.host_of(index))
                    self._mark(index, nodes, programs[-1])
        return tuple(programs)

    def _mark(self, block: int, nodes: Sequence[fx.Node], made: BlockProgram) -> None:
        """Say of each op of the program of a block, which has those of ``nodes`` in order, what becomes of it in
        recomputation, and whether what is kept of it waits in host memory."""
        program = self.cut.program
        for node, own in zip(nodes, call_nodes(made.graph), strict=False):
            what = program.origin.get(node) or program.moves.get(node)
            if what is not None and not is_getitem(node):
                own.meta["recomputation"] = self.recomputed.of(block, what)
                own.meta["on_host"] = bool(made.host) and self.recomputed.on_host(block, what)

    def totals(self, stage: int) -> tuple[BlockProgram, ...]:
        """The sums over the batch that ``stage`` has to run on every microbatch before the first, dependencies
        first."""
        rounds: list[list[fx.Node]] = []
        roots = self._roots(stage)
        wanted = _sums(roots, self._prelude(roots))
        while wanted:
            rounds.insert(0, wanted)
            roots = [operand for node in wanted for operand in node.all_input_nodes]
            wanted = _sums(roots, self._prelude(roots))
        shared = {name for group in self.cut.shared(stage) for name in group}
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
        plan = self.cut.plan.stages[stage]
        roots = [
            operand
            for block in range(plan.first, plan.last + 1)
            for node in self.cut.by_block.get(block, [])
            for operand in node.all_input_nodes
        ]
        if stage == self.cut.plan.num_stages - 1:
            roots += [n for n in self.cut.program.outputs if n.meta["block"] == PRELUDE]
        if stage == 0:
            roots += [n for n in self.cut.program.updates.values() if n.meta["block"] == PRELUDE]
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
        return [node for node in self.cut.by_block.get(PRELUDE, []) if node in needed]

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
            dotted = self.cut.names.get(node.name) if node.op == "placeholder" else None
            if dotted is None or dotted in shared:
                value = dotted or node.name
                copied[node] = graph.placeholder(node.name)
                inputs.append(value)
        for node in outside:
            dotted = self.cut.names.get(node.name) if node.op == "placeholder" else None
            if dotted is not None and dotted not in shared:
                copied[node] = graph.create_node("get_attr", dotted, name=node.name)
                (parameters if node.name in self.cut.captured.parameters else buffers).append(dotted)
        for node, new in copied.items():
            new.meta.update(node.meta)
        for node in nodes:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
        kept = self.cut.kept()
        if results is None:
            results = [
                n for n in nodes if n in kept or any(u not in inside and u.op == "call_function" for u in n.users)
            ]
        freed = kind >= 0 and self.cut.plan.zero_of(kind) == 3
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
