"""The workload: facts about a model that the search computes before it chooses a mesh.

Ops of repeated blocks are represented by those of the first. Tensors are seen as *transfers*: one tensor and the ops of
one block that use it, which share its redistributions. Transfers with equal representatives of producer and users are
one, with the list of blocks that they lead into; so the tensors that run from one repeat to the next, into the first
and out of the last are all included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import fx

from autopar.cost_model.compute.flops import training_flops
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.batch_and_sequence import Roles
from autopar.ir.analysis.blocks import PRELUDE, BlockRepetition
from autopar.ir.analysis.eight_bits import recipes_by_rule
from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.analysis.matrix_factors import find_expert_factors, find_stacks_of_experts
from autopar.ir.analysis.narrow_activations import reads_narrow, takes_narrow_gradient
from autopar.ir.analysis.op_clusters import OpCluster, OpClusters, first_instances
from autopar.ir.analysis.views import Storage, storage_of
from autopar.ir.graph import CapturedModel, has_gradient_dtype, op_nodes, source, tensor_operands, tensor_results
from autopar.ir.plan import Plan, Precision, Recipe
from autopar.ir.precision import itemsize_of
from autopar.ir.recipe_pins import RecipePin
from autopar.ir.rule import FactorRule
from autopar.ir.rules.moe import EXPERTS
from autopar.search.problem.arrivals import Arrivals, Tensor, Transfer, arrivals_of
from autopar.search.problem.kept_activations import KeptActivations


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with equal uses.

    uses: (representative op, operand position) of every use in execution order; the first decides the storage. names:
    placeholder names. blocks: for each of them the blocks that use it, in that order. itemsize: bytes of an element.
    narrow: whether ZeRO may gather it in 8 bits; reaches: then, whether the input of its product has a gradient.
    """

    numel: int
    shape: tuple[int, ...]
    requires_grad: bool
    itemsize: int
    uses: tuple[tuple[fx.Node, int], ...]
    names: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]
    narrow: bool = False
    reaches: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A captured model, analysed. ``precision`` is of compute.

    ends_early: whether the recomputation of a block ends when all tensors that autograd saves are restored, as with
    torch since 2.1.
    """

    analysis: Analysis
    precision: Precision
    ends_early: bool = True

    @classmethod
    def of(
        cls,
        captured: CapturedModel,
        precision: Precision,
        expert_capacity: float | None = None,
        recipe: Recipe | None = None,
        pins: Sequence[RecipePin] = (),
    ) -> Workload:
        """Analyse ``captured``; see ``Analysis.of``. recipe: of the products that the rule finds. pins: of some.

        Raises InvalidInput for pins that the model cannot have.
        """
        recipes = recipes_by_rule(captured, recipe, pins)
        return cls(analysis=Analysis.of(captured, expert_capacity, recipes), precision=precision)

    @classmethod
    def for_plan(cls, captured: CapturedModel, plan: Plan) -> Workload:
        """Analyse ``captured`` as ``plan`` computes it."""
        return cls(analysis=Analysis.for_plan(captured, plan), precision=plan.precision)

    @property
    def captured(self) -> CapturedModel:
        """The captured model."""
        return self.analysis.captured

    @property
    def repetition(self) -> BlockRepetition:
        """Its blocks, and which of them repeat."""
        return self.analysis.repetition

    @property
    def roles(self) -> Roles:
        """Batch and sequence dimensions of its tensors."""
        return self.analysis.roles

    @property
    def clusters(self) -> OpClusters:
        """Its op clusters."""
        return self.analysis.clusters

    def rule(self, node: fx.Node) -> FactorRule:
        """Factor rule of an op."""
        return self.analysis.rule(node)

    def representative(self, node: fx.Node) -> fx.Node:
        """The op of the first block of its kind that stands for ``node``."""
        return self.analysis.representative(node)

    def cluster_of(self, node: fx.Node) -> OpCluster:
        """The op cluster that decides the placement of ``node``."""
        return self.analysis.cluster_of(node)

    @cached_property
    def experts(self) -> frozenset[int]:
        """Numbers of experts of the model's mixture-of-experts layers."""
        return frozenset(self.rule(n).sizes[EXPERTS] for n in self.repeats if EXPERTS in self.rule(n).sizes)

    @cached_property
    def expert_factors(self) -> Mapping[fx.Node, frozenset[str]]:
        """The expert factors of ops."""
        return find_expert_factors(self.analysis, self.repeats)

    @cached_property
    def repeats(self) -> Mapping[fx.Node, int]:
        """How often each op of the prelude and of the first block of each kind runs; others are absent."""
        found: dict[fx.Node, int] = {}
        for group in self.clusters.clusters:
            for node in group.members:
                block = self.repetition.block_of.get(node)
                found[node] = 1 if block is None else self.repetition.kinds[self.repetition.blocks[block].kind].repeats
        return found

    @cached_property
    def clusters_of_kinds(self) -> tuple[tuple[int, ...], ...]:
        """Op clusters of the ops of each kind of block."""
        blocks = (self.repetition.blocks[index] for index in first_instances(self.repetition))
        nodes = ([node for node in block.nodes if node in self.repeats] for block in blocks)
        return tuple(tuple(sorted({self.cluster_of(node).index for node in own})) for own in nodes)

    @cached_property
    def clusters_of_transfers(self) -> tuple[tuple[int, ...], ...]:
        """Op clusters that the redistributions of each of ``transfers`` depend on."""
        every = tuple(range(len(self.clusters.clusters)))
        found = []
        for transfer, own in zip(self.transfers, self.transfer_variables, strict=True):
            nodes = (transfer.tensor.node, *(node for node, _ in transfer.uses))
            # Whether summands pass through a derived op is decided by all that use what it makes.
            found.append(own if self.analysis.derived.keys().isdisjoint(nodes) else every)
        return tuple(found)

    @cached_property
    def transfer_variables(self) -> tuple[tuple[int, ...], ...]:
        """Op clusters of the producer and of every use, for each of ``transfers``."""
        return tuple(
            tuple(self.cluster_of(node).index for node in (transfer.tensor.node, *(node for node, _ in transfer.uses)))
            for transfer in self.transfers
        )

    @cached_property
    def block_counts(self) -> tuple[int, ...]:
        """Number of instances of each distinct block."""
        return tuple(kind.repeats for kind in self.repetition.kinds)

    @cached_property
    def num_blocks(self) -> int:
        """Number of block instances."""
        return len(self.repetition.blocks)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every tensor that is no parameter, with its uses; those of repeated blocks together."""
        gathered: dict[tuple[fx.Node, int, int], list[tuple[fx.Node, int]]] = {}
        for node in op_nodes(self.captured.graph):
            block = self.repetition.block_of.get(node, PRELUDE)
            for position, operand in enumerate(tensor_operands(node)):
                producer, result = source(operand)
                if producer.name in self.captured.parameters and producer.op == "placeholder":
                    continue
                gathered.setdefault((producer, result, block), []).append((self.representative(node), position))
        order = {node: number for number, node in enumerate(self.captured.graph.nodes)}
        alike: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
        first: dict[tuple[object, ...], tuple[fx.Node, int, tuple[tuple[fx.Node, int], ...]]] = {}
        for (producer, result, block), users in gathered.items():
            uses = tuple(sorted(set(users), key=lambda use: (order[use[0]], use[1])))
            known = self.representative(producer)
            key = (known, result, uses)
            first.setdefault(key, (known, result, uses))
            blocks, from_blocks = alike.setdefault(key, ([], []))
            blocks.append(block)
            from_blocks.append(self.repetition.block_of.get(producer, PRELUDE))
        return tuple(
            Transfer(
                tensor=self.tensor(*first[key][:2]),
                uses=first[key][2],
                blocks=tuple(blocks),
                from_blocks=tuple(from_blocks),
                narrow=(
                    all(reads_narrow(user, position) for user, position in first[key][2]),
                    takes_narrow_gradient(first[key][0]) and len(first[key][0].users) == 1,
                ),
            )
            for key, (blocks, from_blocks) in alike.items()
        )

    @cached_property
    def arrivals(self) -> Mapping[int, Arrivals]:
        """Arrivals of every block and of the PRELUDE; one object for equal blocks."""
        return arrivals_of(self.transfers, self.num_blocks)

    def tensor(self, node: fx.Node, result: int) -> Tensor:
        """Description of result ``result`` of ``node``."""
        return self._tensors[node, result]

    @cached_property
    def _tensors(self) -> Mapping[tuple[fx.Node, int], Tensor]:
        carrying: dict[tuple[fx.Node, int], bool] = {}
        flowing: set[tuple[fx.Node, int]] = set()
        for node in self.captured.graph.nodes:
            if node.op in ("placeholder", "call_function"):
                key = source(node)
                if isinstance(node.meta.get("val"), torch.Tensor):
                    carrying[key] = self.roles.batch_dim.get(node) is not None
                    if node in self.analysis.differentiable:
                        flowing.add(key)
        found: dict[tuple[fx.Node, int], Tensor] = {}
        for node in self.captured.graph.nodes:
            if node.op not in ("placeholder", "call_function") or source(node)[0] is not node:
                continue
            for result, value in enumerate(tensor_results(node)):
                found[node, result] = Tensor(
                    node=node,
                    result=result,
                    numel=value.numel(),
                    rows=value.shape[0] if value.dim() else 1,
                    itemsize=itemsize_of(value.dtype, self.precision),
                    carries_batch=carrying.get((node, result), self.roles.batch.get(node) is not None),
                    by_rows=self.roles.batch_dim.get(node) in (0, None),
                    differentiable=(node, result) in flowing and has_gradient_dtype(value),
                    floating=has_gradient_dtype(value),
                )
        return found

    @cached_property
    def reads_weights(self) -> frozenset[fx.Node]:
        """Representative ops that read a trainable parameter."""
        return frozenset(node for group in self.parameters if group.requires_grad for node, _ in group.uses)

    def weights_share(self, node: fx.Node) -> float:
        """Share of the backward of a representative op that computes gradients of parameters."""
        if node not in self.reads_weights:
            return 0.0
        return (
            0.5
            if any(o in self.analysis.differentiable and o.op != "placeholder" for o in tensor_operands(node))
            else 1.0
        )

    @cached_property
    def parameters(self) -> tuple[ParameterGroup, ...]:
        """Parameters, those alike together."""
        uses: dict[str, list[tuple[int, fx.Node, int]]] = {name: [] for name in self.captured.parameters}
        for node in op_nodes(self.captured.graph):
            block = self.repetition.block_of.get(node, PRELUDE)
            for position, operand in enumerate(tensor_operands(node)):
                if operand.op == "placeholder" and operand.name in uses:
                    uses[operand.name].append((block, self.representative(node), position))
        grouped: dict[tuple[object, ...], list[str]] = {}
        for name, used in uses.items():
            if used:
                parameter = self.captured.parameters[name]
                key = (tuple(u[1:] for u in used), parameter.shape, parameter.dtype, name in self.analysis.trained)
                grouped.setdefault(key, []).append(name)
        found = []
        for names in grouped.values():
            parameter, trains = self.captured.parameters[names[0]], names[0] in self.analysis.trained
            found.append(
                ParameterGroup(
                    numel=prod(parameter.shape),
                    shape=tuple(parameter.shape),
                    requires_grad=trains,
                    itemsize=parameter.dtype.itemsize,
                    uses=tuple(u[1:] for u in uses[names[0]]),
                    names=tuple(names),
                    blocks=tuple(tuple(dict.fromkeys(u[0] for u in uses[name])) for name in names),
                    narrow=(narrow := names[0] in self.analysis.narrow_weights),
                    reaches=narrow and tensor_operands(uses[names[0]][0][1])[0] in self.analysis.differentiable,
                )
            )
        return tuple(found)

    @cached_property
    def narrow_products(self) -> Mapping[fx.Node, ParameterGroup]:
        """Representative products whose weights ZeRO may gather in 8 bits."""
        return {group.uses[0][0]: group for group in self.parameters if group.narrow}

    @cached_property
    def trainable_numel(self) -> int:
        """Elements of the parameters that train."""
        return sum(
            parameter.numel for name, parameter in self.captured.parameters.items() if name in self.analysis.trained
        )

    @cached_property
    def expert_numel(self) -> int:
        """Those of them that are stacks of experts."""
        trained, stacks = self.analysis.trained, find_stacks_of_experts(self.analysis)
        return sum(p.numel for name, p in self.captured.parameters.items() if name in trained and name in stacks)

    @cached_property
    def unread_bytes(self) -> float:
        """Bytes of the parameters that no op reads."""
        read = {name for group in self.parameters for name in group.names}
        unread = (parameter for name, parameter in self.captured.parameters.items() if name not in read)
        return float(sum(parameter.numel * parameter.dtype.itemsize for parameter in unread))

    @cached_property
    def shared_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several blocks use, and which."""
        named = (
            (name, used) for group in self.parameters for name, used in zip(group.names, group.blocks, strict=True)
        )
        return {name: used for name, used in named if len(used) > 1}

    @cached_property
    def _kept(self) -> dict[StackMemory, KeptActivations]:
        return {}

    @cached_property
    def kept_elsewhere(self) -> tuple[frozenset[tuple[int, Storage]], frozenset[tuple[int, Storage]]]:
        """Kinds of blocks, with tensors that another block may keep for them: what the block before reads too, and
        what the next block reads of what they make."""
        shared, passed = set[tuple[int, Storage]](), set[tuple[int, Storage]]()
        kinds = [block.kind for block in self.repetition.blocks]
        for block, kind in enumerate(kinds):
            arrivals = self.arrivals[block]
            uses = (use for own in arrivals.shared for use in self.transfers[own.transfer].uses)
            shared.update((kind, storage_of(tensor_operands(node)[position])) for node, position in uses)
            passed.update((kinds[block - 1], self.transfers[number].tensor.storage) for number in arrivals.passed)
        return frozenset(shared), frozenset(passed)

    def kept(self, memory: StackMemory) -> KeptActivations:
        """What is kept for backward with a software stack that keeps ``memory``."""
        if memory not in self._kept:
            self._kept[memory] = KeptActivations(
                analysis=self.analysis,
                repeats=self.repeats,
                precision=self.precision,
                ends_early=self.ends_early,
                memory=memory,
                shared=self.kept_elsewhere[0],
                passed=self.kept_elsewhere[1],
            )
        return self._kept[memory]

    @cached_property
    def forward_flops(self) -> float:
        """Floating point operations of a forward on the whole batch, of all outputs of the model."""
        return sum(self.rule(node).flops * count for node, count in self.repeats.items())

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the first step input of the captured batch, or samples if it holds no token ids."""
        for node in self.clusters.input_dims:
            value = node.meta["val"]
            if not value.is_floating_point() and value.dim() >= 2:
                return int(value.numel())
        return self.captured.batch_size

    @cached_property
    def model_flops(self) -> float:
        """Floating point operations of a step on the whole batch: of its forward and of the gradients it computes.

        Of a weight that is frozen there is no gradient, of what it reads only where something before it trains.
        """
        run = computed(self.captured)
        return sum(
            training_flops(node, self.rule(self.representative(node)), self.analysis.flow)
            for node in op_nodes(self.captured.graph)
            if node in run
        )
