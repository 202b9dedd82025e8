"""What the blocks of a workload keep for their backward, with the software of one stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.cost_model.memory.activations import BlockActivations
from autopar.cost_model.memory.saved_tensors import Saved
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.op_clusters import first_instances
from autopar.ir.analysis.views import Storage
from autopar.ir.plan import Precision


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptActivations:
    """Of the workload with this analysis; each part is found when it is first asked for.

    repeats: its ops, those of repeated blocks by the first. precision, ends_early: as of ``Workload``. memory: what the
    stack keeps. shared, passed: kinds of blocks with tensors that another block may keep for them
    (``Workload.kept_elsewhere``).
    """

    analysis: Analysis
    repeats: Mapping[fx.Node, int]
    precision: Precision
    ends_early: bool
    memory: StackMemory
    shared: frozenset[tuple[int, Storage]]
    passed: frozenset[tuple[int, Storage]]

    @cached_property
    def blocks(self) -> tuple[BlockActivations, ...]:
        """Activations that each kind of block saves for its backward."""
        repetition = self.analysis.repetition
        return tuple(
            BlockActivations.of(
                [node for node in repetition.blocks[index].nodes if node in self.repeats],
                precision=self.precision,
                batch_factors=self.analysis.roles.batch,
                shared=frozenset(repetition.prelude),
                needs_grad=self.analysis.differentiable,
                ends_early=self.ends_early,
                memory=self.memory,
            )
            for index in first_instances(repetition)
        )

    @cached_property
    def surely(self) -> Mapping[fx.Node, tuple[Saved, ...]]:
        """Tensors that ops surely save for backward, each storage of a block with the first op that saves it, without
        those that another block may keep as well."""
        found: dict[fx.Node, list[Saved]] = {}
        elsewhere = self.shared | self.passed
        for kind, activations in enumerate(self.blocks):
            seen = {storage for own, storage in elsewhere if own == kind}
            losses = {loss.pair.loss for loss in activations.losses}
            extra = (tensor for tensor in activations.extra if tensor.node not in losses)
            for tensor in (*activations.saved, *extra):
                if tensor.storage not in seen:
                    seen.add(tensor.storage)
                    found.setdefault(tensor.node, []).append(tensor)
        return {node: tuple(tensors) for node, tensors in found.items()}

    def inputs(self, kind: int) -> list[Saved]:
        """The inputs of a kind of block, without those that the block before may keep as well."""
        return [tensor for tensor in self.blocks[kind].inputs if (kind, tensor.storage) not in self.shared]

    @cached_property
    def contracted(self) -> Mapping[fx.Node, tuple[Saved, ...]]:
        """Results of contractions."""
        found: dict[fx.Node, list[Saved]] = {}
        for activations in self.blocks:
            for tensor in activations.kept:
                found.setdefault(tensor.node, []).append(tensor)
        return {node: tuple(tensors) for node, tensors in found.items()}
