"""Activations that a block keeps for its backward.

Autograd saves operands and results of ops (``autopar.ir.rules.saved``); ``saved_tensors`` says what is counted once.

    none        everything autograd saves
    selective   results of contractions, of reductions and all-to-alls, and the block's inputs; the rest is recomputed.
                A product that only a reduction or an all-to-all reads is not saved beside the result of that
    alternate   the same without every second product, which is recomputed
    full        the block's inputs; everything is recomputed

Recomputation ends when all tensors that autograd saves are restored. Later ops are not recomputed: additions at the end
of a block, and the matrix product before them, of which autograd saves the operands alone (``unreached``).

Parameters are counted with the model state. Tensors made of no parameter (masks, positions) are ``shared``:
every block of a stage saves the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch import fx

from autopar.cost_model.compute.flops import is_contraction, op_name
from autopar.cost_model.memory.backward_peak import BackwardOp, BackwardPeak, BlockBackward, is_read_outside
from autopar.cost_model.memory.chunked_losses import ChunkableLoss, Chunked, chunks
from autopar.cost_model.memory.saved_tensors import Saved, local_sizes, names_of
from autopar.cost_model.memory.tiled_rows import Tile, TileableRegion, tileable_regions, tiles
from autopar.cost_model.stacks.known_memory import AUTOPAR
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.analysis.matrix_products import every_second, is_product
from autopar.ir.analysis.row_regions import RowRegion
from autopar.ir.analysis.views import Storage, is_view, storage_of
from autopar.ir.graph import has_gradient_dtype, is_getitem, source, tensor_operands, tensor_results
from autopar.ir.lowered.loss_chunks import Pair, pair_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import itemsize_of
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice
from autopar.ir.rules import rule_for
from autopar.ir.rules.saved import saved_for_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A tensor from one op to another. use: as it is read. made, read: rule, and which result or operand it is."""

    use: Saved
    producer: fx.Node
    made: tuple[FactorRule, int]
    read: tuple[FactorRule, int]

    def is_reduced_or_all_to_all(self, assignments: Mapping[fx.Node, Assignment]) -> bool:
        """Whether the redistribution is a reduction or an all-to-all, so that its result is another tensor on each
        rank."""
        (maker, result), (reader, position) = self.made, self.read
        for made, read in zip(assignments[self.producer], assignments[self.use.node], strict=True):
            before, after = maker.result(result, made), reader.operand(position, read)[0]
            if before != after and (before.is_partial() or (before.is_shard() and after.is_shard())):
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Activations that one block may save. Built once per distinct block; evaluated per assignment.

    saved: what autograd keeps. extra: bytes an op keeps that are no tensor of the graph (masks, statistics). kept:
    results of contractions, also of those inside an op. every_second: products that level alternate recomputes, with
    the factors that they sum over. moved: what goes from op to op, where a collective may be between them. inputs:
    operands from outside the block. unreached: ops that are not recomputed. ends_at: the one of them whose operands
    are there again all the same. losses: that a rank with many logits computes in chunks, whose gradients are saved
    at each level. regions: that full rematerialisation computes in tiles where a rank has much of them. dispatched:
    results of the all-to-alls of token dispatch and combine inside ops, and the choices that dispatch. constants:
    what autograd keeps of what depends on no parameter, such as masks and rotary tables, and is made once for all
    blocks. copied: the part of ``extra`` that an op's own code makes again wherever it is recomputed.
    """

    saved: tuple[Saved, ...]
    extra: tuple[Saved, ...]
    kept: tuple[Saved, ...]
    every_second: Mapping[fx.Node, frozenset[str]]
    moved: tuple[Moved, ...]
    inputs: tuple[Saved, ...]
    backward: BlockBackward
    unreached: frozenset[fx.Node]
    ends_at: fx.Node | None
    losses: tuple[ChunkableLoss, ...] = ()
    regions: tuple[TileableRegion, ...] = ()
    dispatched: tuple[tuple[Saved, frozenset[str]], ...] = ()
    constants: tuple[Saved, ...] = ()
    copied: tuple[Saved, ...] = ()

    @classmethod
    def of(
        cls,
        nodes: Sequence[fx.Node],
        *,
        precision: str = "fp32",
        batch_factors: Mapping[fx.Node, str | None] | None = None,
        shared: AbstractSet[fx.Node] = frozenset(),
        needs_grad: AbstractSet[fx.Node] | None = None,
        rules: Callable[[fx.Node], FactorRule] = rule_for,
        ends_early: bool = True,
        memory: StackMemory = AUTOPAR,
    ) -> BlockActivations:
        """Measure the ops of a block.

        batch_factors: op -> factor that is the batch. shared: nodes whose storage is not the block's to count:
        parameters, buffers, step inputs, and ops that depend on no parameter. needs_grad: tensors that a
        gradient flows through; every floating point one if not given. ends_early: whether recomputation ends as above.
        memory: what the software stack keeps.
        """
        inside = set(nodes)
        batches = batch_factors or {}
        made_for_all = {node for node in shared if node.op == "call_function"}
        differentiable = None if needs_grad is None else needs_grad.__contains__

        def entry(node: fx.Node, tensor: fx.Node | None, position: int) -> Saved:
            rule = rules(node)
            if tensor is None:
                storage, factors = (node, position), rule.results[position]
                value = tensor_results(node)[position]
            else:
                storage, factors = storage_of(tensor), rule.operands[position]
                value = tensor.meta["val"]
            base = tensor_results(storage[0])[storage[1]]
            num_bytes = base.numel() * itemsize_of(value.dtype, precision)
            itemsize = itemsize_of(value.dtype, precision)
            return Saved.of(node, storage, num_bytes, (factors,), batches.get(node), itemsize)

        saved: list[Saved] = []
        constants: list[Saved] = []
        copied: list[Saved] = []
        extra: list[Saved] = []
        kept: list[Saved] = []
        moved: list[Moved] = []
        inputs: list[Saved] = []
        outputs: list[Saved] = []
        ops: list[BackwardOp] = []
        unreached: list[fx.Node] = []
        ends_at: fx.Node | None = None
        losses: list[ChunkableLoss] = []
        dispatched: list[tuple[Saved, frozenset[str]]] = []
        apart: dict[Saved, Saved] = {}

        def flows(tensor: fx.Node) -> bool:
            return has_gradient_dtype(tensor.meta["val"]) and (differentiable is None or differentiable(tensor))

        for node in nodes:
            if is_getitem(node):
                continue
            rule = rules(node)
            operands = tensor_operands(node)
            uses = [entry(node, tensor, position) for position, tensor in enumerate(operands)]
            counted = {use for use in uses if use.storage[0] not in shared and use.storage[0].op == "call_function"}
            results = [entry(node, None, p) for p in range(len(rule.results))] if not is_view(node) else []
            own = saved_for_backward(node, differentiable, precision)
            operand_positions, result_positions, extra_bytes = own.operands, own.results, own.extra_bytes
            if result_positions or extra_bytes:
                unreached, ends_at = [], None
            elif operand_positions:
                unreached, ends_at = [node], node
            else:
                unreached.append(node)
            saved += [uses[p] for p in operand_positions if uses[p] in counted]
            constants += [uses[p] for p in operand_positions if uses[p].storage[0] in made_for_all]
            saved += [results[p] for p in result_positions if p < len(results)]
            if memory.loss is not None and "cross_entropy" in op_name(node):
                extra_bytes = tensor_operands(node)[0].meta["val"].numel() * memory.loss.kept
            # A loss has no dimensions left; what it keeps is cut as its first operand is.
            shaped = rule.results[:1] if rule.results and rule.results[0] else rule.operands[:1]
            cut_like = *shaped, (own.extra_factors,)
            if extra_bytes:
                extra.append(Saved.of(node, (node, -1), extra_bytes, cut_like, batches.get(node)))
            if own.copied_bytes:
                copied.append(Saved.of(node, (node, -1), own.copied_bytes, cut_like, batches.get(node)))
            if own.product_bytes:
                kept.append(Saved.of(node, (node, -2), own.product_bytes, cut_like, batches.get(node)))
            elif is_contraction(node, rule):
                kept += results
            if own.dispatched_bytes:
                received = Saved.of(node, (node, -3), own.dispatched_bytes, cut_like, batches.get(node))
                dispatched.append((received, frozenset(rule.joint)))
            pair = pair_of(node) if memory.divides else None
            if pair is not None and pair.linear in inside:
                loss = ChunkableLoss.of(node, entry, rules, tensor_operands(pair.linear), flows)
                losses += [] if loss is None else [loss]
            inputs += [use for use in uses if use in counted and use.storage[0] not in inside]
            for position, (tensor, use) in enumerate(zip(operands, uses, strict=True)):
                producer, result = source(tensor)
                if producer in inside and use in counted:
                    made = rules(producer), result
                    moved.append(Moved(use=use, producer=producer, made=made, read=(rule, position)))
                    if memory.regathers and is_product(node.target) and position in operand_positions:
                        factors = rules(producer).results[result]
                        apart[use] = replace(use, node=producer, factors=names_of([factors]))
            if is_view(node):
                continue
            outputs += [result for result in results if is_read_outside(result.storage, inside)]
            ops.append(BackwardOp.of(node, uses, results, rules, batches, inside, shared, differentiable))
        again = {t for t in saved if op_name(t.storage[0]) in memory.recomputes and not is_product(t.node.target)}
        kept_once, beside = tuple(t for t in dict.fromkeys(saved) if t not in again), tuple(extra)
        regions = tileable_regions(nodes, entry, rules, flows) if memory.divides else ()
        return cls(
            saved=kept_once,
            extra=beside,
            kept=tuple(dict.fromkeys(kept)),
            every_second={
                node: frozenset(rules(node).summed)
                for node in every_second([node for node in nodes if is_product(node.target)])
            },
            moved=tuple(moved),
            inputs=tuple(dict.fromkeys(inputs)),
            backward=BlockBackward(
                ops=tuple(reversed(ops)),
                outputs=tuple(outputs),
                saved=kept_once,
                extra=beside,
                losses=tuple(losses),
                tileable=frozenset(node for own in regions for node in own.region.nodes),
                apart=apart,
                loss=memory.loss,
            ),
            unreached=frozenset(unreached if ends_early else ()),
            ends_at=ends_at,
            losses=tuple(losses),
            regions=regions,
            dispatched=tuple(dispatched),
            constants=tuple(constants),
            copied=tuple(copied),
        )

    def saved_bytes(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1, remat: str = "none"
    ) -> float:
        """Bytes of activations that a rank saves of one microbatch between forward and backward, at
        rematerialisation level ``remat``."""
        chunks = self.chunks(assignments, mesh, num_microbatches)
        held = sum(chunked.held_bytes for chunked in chunks.values())
        unsaved = {node for pair in chunks for node in pair}
        if remat == "full":
            return held + _total(self.inputs, assignments, mesh, num_microbatches)
        if remat in ("selective", "alternate"):
            contracted, communicated = self._dear(assignments)
            if remat == "alternate":
                contracted = [t for t in contracted if not self._is_recomputed(t.node, assignments)]
            contracted = [t for t in contracted if t.node not in unsaved]
            # The result of a collective is another tensor than its operand, of the same storage in the graph.
            least = sum(
                _total(tensors, assignments, mesh, num_microbatches)
                for tensors in ((*self.inputs, *contracted), communicated)
            )
            return held + least
        saved, extra = ([t for t in tensors if t.node not in unsaved] for tensors in (self.saved, self.extra))
        saved = self.backward.as_kept(saved, assignments, mesh)
        return held + sum(_total(tensors, assignments, mesh, num_microbatches) for tensors in (saved, extra))

    def read_by(
        self,
        nodes: AbstractSet[fx.Node],
        assignments: Mapping[fx.Node, Assignment],
        mesh: Mesh,
        num_microbatches: int = 1,
    ) -> float:
        """Bytes that the backward of ``nodes`` reads of what is saved, their results aside."""
        chunks = self.chunks(assignments, mesh, num_microbatches)
        held = sum(chunked.held_bytes for pair, chunked in chunks.items() if not nodes.isdisjoint(pair))
        own = frozenset(nodes).difference(*chunks)
        read = [tensor for tensor in self.saved if tensor.node in own and tensor.storage[0] is not tensor.node]
        read = self.backward.as_kept(read, assignments, mesh)
        extra = [tensor for tensor in self.extra if tensor.node in own]
        return held + sum(_total(tensors, assignments, mesh, num_microbatches) for tensors in (read, extra))

    def chunks(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
    ) -> dict[Pair, Chunked]:
        """The losses that are computed in chunks under ``assignments``, and what they need."""
        return chunks(self.losses, assignments, mesh, num_microbatches)

    def tiled(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
    ) -> tuple[dict[RowRegion, Tile], float, BackwardPeak]:
        """The regions that full rematerialisation computes in tiles; bytes of what is not made again for that; the peak
        of the backward then."""
        given = assignments, mesh, num_microbatches
        found = tiles(self.regions, *given)
        if not found:
            return found, 0.0, self.backward.peak(*given)
        unmade = {node for region in found for node in region.made}
        unsaved = {node for pair in self.chunks(*given) for node in pair}
        every = [tensor for tensor in (*self.saved, *self.extra) if tensor.node not in unsaved]
        left = [tensor for tensor in every if tensor.storage[0] not in unmade]
        return found, _total(every, *given) - _total(left, *given), self.backward.peak(*given, tiles=found)

    def recomputed(self, assignments: Mapping[fx.Node, Assignment]) -> list[Saved]:
        """Results of contractions that level selective saves and level alternate recomputes."""
        contracted, _ = self._dear(assignments)
        return [t for t in contracted if self._is_recomputed(t.node, assignments) and t.node not in self.unreached]

    def is_past(self, readers: Iterable[fx.Node]) -> bool:
        """Whether recomputation ends before any of ``readers`` needs its operands."""
        return all(node in self.unreached and node is not self.ends_at for node in readers)

    def _is_recomputed(self, node: fx.Node, assignments: Mapping[fx.Node, Assignment]) -> bool:
        """Whether level alternate recomputes a product. A product that is reduced between ranks is saved as their
        sum."""
        summed = self.every_second.get(node)
        return summed is not None and not any(
            factor in summed for choice in assignments[node] for factor in factors_of_choice(choice)
        )

    def _dear(self, assignments: Mapping[fx.Node, Assignment]) -> tuple[list[Saved], list[Saved]]:
        """Tensors that level selective saves: results of contractions, and of reductions and all-to-alls."""
        communicated = []
        read: dict[fx.Node, bool] = {}  # whether more than reductions and all-to-alls read the result of an op
        for moved in self.moved:
            kept = moved.is_reduced_or_all_to_all(assignments)
            if kept:
                communicated.append(moved.use)
            read[moved.producer] = read.get(moved.producer, False) or not kept
        communicated += [t for t, choices in self.dispatched if not choices.isdisjoint(assignments[t.node])]
        contracted = [t for t in self.kept if read.get(t.node, True) or not is_product(t.node.target)]
        return contracted, communicated

    def additive_bytes(self, node: fx.Node, assignment: Assignment, mesh: Mesh, num_microbatches: int = 1) -> float:
        """Saved bytes that ``node`` is the first op to keep, for a price per op.

        Summed over the block it is ``saved_bytes`` where every op that saves a tensor cuts it the same way.
        """
        total = 0.0
        owned: set[Storage] = set()
        for tensor in self.saved:
            if tensor.storage in owned:
                continue
            owned.add(tensor.storage)
            if tensor.node is node:
                total += tensor.local_bytes(assignment, mesh, num_microbatches)
        return total + sum(t.local_bytes(assignment, mesh, num_microbatches) for t in self.extra if t.node is node)


def _total(
    tensors: Iterable[Saved], assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
) -> float:
    """Bytes of the distinct storages among ``tensors``, each way of cutting one counted once."""
    return sum(local_sizes(tensors, assignments, mesh, num_microbatches).values())
