"""The analysis of a captured model alone, before any mesh or plan is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar.ir.analysis.batch_and_sequence import Roles, find_roles, microbatch_obstacle
from autopar.ir.analysis.blocks import PRELUDE, BlockRepetition, find_repetition
from autopar.ir.analysis.derived_parameters import DerivedUses, find_derived
from autopar.ir.analysis.eight_bits import Recipes, in_eight_bits, recipes_of_plan, renamed
from autopar.ir.analysis.gradient_flow import gradient_flow
from autopar.ir.analysis.limit_experts import limit_experts
from autopar.ir.analysis.narrow_weights import narrow_weights
from autopar.ir.analysis.op_clusters import OpCluster, OpClusters, cluster
from autopar.ir.analysis.zigzag import ZigzagSequence, find_zigzag
from autopar.ir.graph import CapturedModel, source
from autopar.ir.plan import Plan
from autopar.ir.rule import FactorRule


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """A captured model, analysed once for the search, the placed model and the passes.

    captured: with the limit on experts that was asked for, and with its products in 8-bit floats by ``recipes``. roles:
    dimensions of the batch and of the sequence. repetition: its blocks, and which of them repeat. clusters: ops whose
    placement follows from that of a leader.
    """

    captured: CapturedModel
    roles: Roles
    repetition: BlockRepetition
    clusters: OpClusters
    recipes: Recipes = field(default_factory=dict)

    @classmethod
    def of(
        cls, captured: CapturedModel, expert_capacity: float | None = None, recipes: Recipes | None = None
    ) -> Analysis:
        """Analyse ``captured``, in time linear in its ops.

        expert_capacity: most rows that an expert takes, as a multiple of an even share; see ``Plan``. Raises
        PlanMismatch if it is given and the model has no experts.
        """
        captured, recipes = limit_experts(captured, expert_capacity), recipes or {}
        repetition = find_repetition(captured)
        if recipes:
            captured = in_eight_bits(captured, recipes)
            repetition = renamed(repetition, captured)
        roles = find_roles(captured)
        clusters = cluster(captured, repetition, roles)
        return cls(captured=captured, roles=roles, repetition=repetition, clusters=clusters, recipes=recipes)

    @classmethod
    def for_plan(cls, captured: CapturedModel, plan: Plan) -> Analysis:
        """Analyse ``captured`` as ``plan`` computes it. Raises InvalidPlan or PlanMismatch where it cannot be so."""
        return cls.of(captured, plan.expert_capacity, recipes_of_plan(captured, plan))

    def rule(self, node: fx.Node) -> FactorRule:
        """Rule of an op."""
        return self.roles.rules[node]

    def representative(self, node: fx.Node) -> fx.Node:
        """The op of the first block of its kind that stands for ``node``; ``node`` itself outside repeated blocks."""
        return self.repetition.representative.get(node, node)

    def cluster_of(self, node: fx.Node) -> OpCluster:
        """Op cluster of a representative op or of a step input."""
        return self.clusters.of.get(node, self.clusters.inputs)

    def block_of(self, node: fx.Node) -> int:
        """Number of the block that computes ``node``; PRELUDE for placeholders and for what depends on no parameter."""
        return self.repetition.block_of.get(source(node)[0], PRELUDE)

    @cached_property
    def obstacle(self) -> str | None:
        """Why the batch may not be cut into microbatches; None if it may."""
        return microbatch_obstacle(self.captured, self.roles)

    @cached_property
    def zigzag(self) -> ZigzagSequence:
        """How the sequence could be stored in zigzag order."""
        return find_zigzag(self.captured, self.repetition, self.roles)

    @cached_property
    def derived(self) -> DerivedUses:
        """Representative ops on parameters alone, with all uses of their results in any of the blocks alike."""
        found: dict[fx.Node, dict[tuple[fx.Node, int], None]] = {}
        for node, uses in find_derived(self.captured, self.roles).items():
            own = found.setdefault(self.representative(node), {})
            own.update(((self.representative(user), position), None) for user, position in uses)
        return {node: tuple(uses) for node, uses in found.items()}

    @cached_property
    def flow(self) -> frozenset[fx.Node]:
        """The tensors that a training step computes a gradient of, in every block; parameters are among them."""
        return gradient_flow(self.captured)

    @cached_property
    def forward_flow(self) -> frozenset[fx.Node]:
        """The tensors that have a gradient where one comes back through any output of a plain forward."""
        return gradient_flow(self.captured, every_output=True)

    @cached_property
    def differentiable(self) -> frozenset[fx.Node]:
        """``flow``, and the representatives of any in it: of equal blocks the first may read what has no gradient."""
        return self.flow | {self.representative(node) for node in self.flow}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Placeholder names of the parameters that have a gradient."""
        return frozenset(node.name for node in self.flow if node.op == "placeholder")

    @cached_property
    def narrow_weights(self) -> frozenset[str]:
        """Placeholder names of the parameters that ranks may gather in 8 bits."""
        return narrow_weights(self.captured)

    @cached_property
    def names(self) -> Mapping[str, fx.Node]:
        """The nodes of the graph by name."""
        return {node.name: node for node in self.captured.graph.nodes}
