"""Peak memory of the backward of a block.

Ops run last first. One makes gradients of its operands while its own is still there; then what it was the first to
save is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.memory.chunked_losses import ChunkableLoss, chunks
from autopar.cost_model.memory.saved_tensors import Saved, local_sizes
from autopar.cost_model.memory.tiled_rows import Tile
from autopar.cost_model.stacks.memory import LossMemory
from autopar.ir.analysis.row_regions import RowRegion
from autopar.ir.analysis.views import Storage, is_view
from autopar.ir.graph import has_gradient_dtype, is_getitem, source, tensor_operands, tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice

# Ops whose backward passes on the gradient that comes in, as it is, to operands of the same shape.
_PASSING = frozenset({"add", "sub", "positive", "alias", "annotated"})

# Bytes of a class's logit in float32, which a cross entropy computes in.
_WIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOp:
    """One op in the backward of its block.

    incoming: results, whose gradients are there and then no longer needed. outgoing: (operand as this op reads it, as
    its producer made it), whose gradients come into being. passes: for each of them, whether it is the incoming
    gradient itself. weights: parameters among the operands. logits: of a cross entropy, with the classes' factors.
    """

    node: fx.Node
    incoming: tuple[Saved, ...]
    outgoing: tuple[tuple[Saved, Saved], ...]
    passes: tuple[bool, ...]
    weights: tuple[Saved, ...]
    logits: tuple[Saved, frozenset[str]] | None

    @classmethod
    def of(
        cls,
        node: fx.Node,
        uses: Sequence[Saved],
        results: Sequence[Saved],
        rules: Callable[[fx.Node], FactorRule],
        batches: Mapping[fx.Node, str | None],
        inside: AbstractSet[fx.Node],
        shared: AbstractSet[fx.Node],
        differentiable: Callable[[fx.Node], bool] | None,
    ) -> BackwardOp:
        """uses: its operands. results: what it makes. batches: op -> factor that is the batch. inside: the block's ops.

        shared: whose storage is not the block's. differentiable: whether a gradient flows through a tensor.
        """
        outgoing, passes, weights = [], [], []
        keeps = op_name(node) in _PASSING
        shape = tensor_results(node)[0].shape
        operands = tensor_operands(node)
        flows = differentiable is None or differentiable(node)
        for position, (tensor, use) in enumerate(zip(operands, uses, strict=True) if flows else ()):
            value = tensor.meta["val"]
            if not has_gradient_dtype(value) or not (differentiable is None or differentiable(tensor)):
                continue
            if use.storage[0].op != "call_function":
                if use.storage[0].op == "placeholder" and differentiable is not None:
                    weights.append(use)
                continue
            if use.storage[0] in shared:
                continue
            producer, result = source(tensor)
            produced = use
            if producer in inside:
                factors, batch = rules(producer).results[result], batches.get(producer)
                produced = Saved.of(producer, use.storage, use.num_bytes, (factors,), batch, use.itemsize)
            outgoing.append((use, produced))
            passes.append(keeps and value.shape == shape and not (op_name(node) == "sub" and position))
        logits = None
        if "cross_entropy" in op_name(node):
            rule = rules(node)
            own, other = ({f for dim in rule.operands[position] for f in dim} for position in (0, 1))
            logits = uses[0], frozenset(own - other)
        return cls(
            node=node,
            incoming=tuple(results) if flows else (),
            outgoing=tuple(outgoing),
            passes=tuple(passes),
            weights=tuple(weights),
            logits=logits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPeak:
    """Most bytes that the backward of a block needs at once beside all that is saved for it when it begins.

    merged: where gradients of parameters are added to ones that are there. arriving: where they stay, in float32.
    unsharded: where they stay, as computed, until the block is done.
    end: what is left when the block is done but for parameters' gradients: the gradients of its inputs, less all that
    was saved.
    """

    merged: float = 0.0
    arriving: float = 0.0
    unsharded: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBackward:
    """The backward of one block.

    ops: last first. outputs: results that are read outside the block. saved, extra, losses: as in
    ``BlockActivations``. tileable: ops whose results and gradients may never be there as a whole. apart: what products
    read and gather again in backward, if it was gathered -> the same as its producer made it. loss: of cross entropies;
    None as of our own runtime.
    """

    ops: tuple[BackwardOp, ...]
    outputs: tuple[Saved, ...]
    saved: tuple[Saved, ...]
    extra: tuple[Saved, ...]
    losses: tuple[ChunkableLoss, ...] = ()
    tileable: frozenset[fx.Node] = frozenset()
    apart: Mapping[Saved, Saved] = field(default_factory=dict)
    loss: LossMemory | None = None

    def as_kept(self, saved: Iterable[Saved], assignments: Mapping[fx.Node, Assignment], mesh: Mesh) -> list[Saved]:
        """The tensors, those that are gathered again in backward as the parts that are kept of them."""
        found = []
        for tensor in saved:
            part = self.apart.get(tensor)
            if part is not None and _share(part, assignments, mesh) < _share(tensor, assignments, mesh):
                tensor = part
            found.append(tensor)
        return found

    def peak(
        self,
        assignments: Mapping[fx.Node, Assignment],
        mesh: Mesh,
        num_microbatches: int = 1,
        tiles: Mapping[RowRegion, Tile] | None = None,
    ) -> BackwardPeak:
        """Peak bytes of the backward, op by op, as autograd allocates and releases. tiles: regions that are one op."""

        def local(tensor: Saved) -> float:
            return tensor.local_bytes(assignments[tensor.node], mesh, num_microbatches)

        # Gradients: bytes of the memory of each, and who still needs it; a tensor's gradient -> its memory.
        held: dict[int, tuple[float, int]] = {}
        gradients: dict[Storage, int] = {}
        # Of parameters: as computed, and in float32.
        now, weights, wide = 0.0, 0.0, 0.0
        most = {"merged": 0.0, "arriving": 0.0, "unsharded": 0.0}
        count = 0

        def allocate(size: float) -> int:
            nonlocal now, count
            count += 1
            held[count] = size, 1
            now += size
            return count

        def release(memory: int) -> None:
            nonlocal now
            size, users = held[memory]
            if users > 1:
                held[memory] = size, users - 1
            else:
                del held[memory]
                now -= size

        def see(more: float = 0.0, more_wide: float = 0.0) -> None:
            most["merged"] = max(most["merged"], now + more)
            most["arriving"] = max(most["arriving"], now + wide + more_wide)
            most["unsharded"] = max(most["unsharded"], now + weights + more)

        in_chunks = chunks(self.losses, assignments, mesh, num_microbatches)
        working = {pair.loss: chunked.working_bytes for pair, chunked in in_chunks.items()}
        ends = {region.result: region for region in tiles or ()}
        unmade = {node for region in ends.values() for node in region.made}
        released = self._released(
            assignments, mesh, num_microbatches, {node for pair in in_chunks for node in pair}, unmade
        )
        released |= {pair.linear: chunked.held_bytes for pair, chunked in in_chunks.items()}
        gathered: dict[fx.Node, float] = {}
        for whole in self.apart:
            if self.as_kept([whole], assignments, mesh) != [whole]:
                gathered[whole.node] = gathered.get(whole.node, 0.0) + local(whole)
        for tensor in self.outputs:
            gradients[tensor.storage] = allocate(local(tensor))
        for op in self.ops:
            if op.node in unmade:
                now -= released.get(op.node, 0.0)
                continue
            came = [gradients.pop(result.storage) for result in op.incoming if result.storage in gradients]
            if op.node in ends:
                assert tiles is not None
                region, tile = ends[op.node], tiles[ends[op.node]]
                parts = [part for part in self.ops if part.node is op.node or part.node in region.made]
                given = {
                    produced.storage: (used, produced)
                    for part in parts
                    for used, produced in part.outgoing
                    if produced.storage[0] not in region.made
                }
                op = replace(
                    op,
                    outgoing=tuple(given.values()),
                    passes=(False,) * len(given),
                    weights=tuple(weight for part in parts for weight in part.weights),
                )
                during = tile.working_bytes + tile.wide_bytes
            else:
                during = 0.0
            if op.node in working:  # forward, while all that forward saved is there
                see(working[op.node], working[op.node])
                for memory in came:
                    release(memory)
                continue
            own = sum(map(local, op.weights))
            own_wide = sum(local(tensor) * _WIDE / tensor.itemsize for tensor in op.weights)
            made = []
            for (used, _), passed in zip(op.outgoing, op.passes, strict=True):
                if passed and came:
                    memory = came[0]
                    held[memory] = held[memory][0], held[memory][1] + 1
                else:
                    memory = allocate(local(used))
                made.append(memory)
            if op.logits is not None:
                now += self._loss_bytes(op, assignments, mesh, num_microbatches)
            again = gathered.get(op.node, 0.0)
            see(max(own, during) + again, max(own_wide, during) + again)
            if op.logits is not None:
                now -= self._loss_bytes(op, assignments, mesh, num_microbatches)
            weights, wide = weights + own, wide + own_wide
            for memory in came:
                release(memory)
            now -= released.get(op.node, 0.0)
            for (used, produced), memory in zip(op.outgoing, made, strict=True):
                if used.cuts(assignments[used.node]) != produced.cuts(assignments[produced.node]):
                    moved = allocate(local(produced))
                    see()
                    release(memory)
                    memory = moved
                earlier = gradients.get(produced.storage)
                if earlier is None:
                    gradients[produced.storage] = memory
                    continue
                if held[earlier][1] == 1:  # added in place
                    release(memory)
                    continue
                gradients[produced.storage] = allocate(local(produced))
                see()
                release(memory)
                release(earlier)
        return BackwardPeak(**most, end=now)

    def working(self) -> Iterator[tuple[Saved, ...]]:
        """Tensors that ops surely hold in their backward beside all saved ones: those before anything is released."""
        savers = {tensor.node for tensor in (*self.saved, *self.extra)}
        divisible = {node for loss in self.losses for node in loss.pair} | self.tileable
        for op in self.ops:
            if op.node in divisible:  # its logits, or what is wide, may not be there
                continue
            made = [used for (used, _), passed in zip(op.outgoing, op.passes, strict=True) if not passed]
            if op.logits is not None and (logits := op.logits[0]).itemsize < _WIDE:
                made.append(replace(logits, num_bytes=logits.num_bytes * _WIDE / logits.itemsize))
            yield (*op.incoming, *made)
            if op.node in savers:
                return

    def _released(
        self,
        assignments: Mapping[fx.Node, Assignment],
        mesh: Mesh,
        num_microbatches: int,
        unsaved: AbstractSet[fx.Node],
        unmade: AbstractSet[fx.Node] = frozenset(),
    ) -> dict[fx.Node, float]:
        """Bytes of saved tensors that are released after the backward of an op, the first that saved them.

        unsaved: ops that save nothing. unmade: those that make nothing that is saved.
        """
        released: dict[fx.Node, float] = {}
        saved = [tensor for tensor in (*self.saved, *self.extra) if tensor.node not in unsaved]
        saved = [tensor for tensor in saved if tensor.storage[0] not in unmade]
        saved = self.as_kept(saved, assignments, mesh)
        sizes = local_sizes(saved, assignments, mesh, num_microbatches)
        for tensor in saved:
            size = sizes.pop((tensor.storage, tensor.cuts(assignments[tensor.node])), 0.0)
            released[tensor.node] = released.get(tensor.node, 0.0) + size
        return released

    def _loss_bytes(
        self, op: BackwardOp, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
    ) -> float:
        """What a cross entropy holds beside its saved logits and the gradient that it hands on. Of our runtime:

        Whole classes: the gradients of log probabilities and of logits, in float32. Split ones: backward rewrites one
        copy in place; forward, the logits as they came, in float32, and what the exponentials are summed from.
        """
        assert op.logits is not None
        logits, classes = op.logits
        assignment = assignments[op.node]
        elements = logits.local_bytes(assignment, mesh, num_microbatches) / logits.itemsize
        if self.loss is not None:
            return elements * max(0.0, self.loss.working - logits.itemsize)
        split = any(not classes.isdisjoint(factors_of_choice(choice)) for choice in assignment)
        needed = (_WIDE if logits.itemsize == _WIDE else _WIDE + logits.itemsize) if split else 2 * _WIDE
        return elements * (needed - logits.itemsize)


def _share(tensor: Saved, assignments: Mapping[fx.Node, Assignment], mesh: Mesh) -> float:
    """Share of a tensor that a rank has."""
    cuts = tensor.cuts(assignments[tensor.node])
    return 1.0 / prod(axis.size for cut, axis in zip(cuts, mesh.axes, strict=True) if cut)


def is_read_outside(storage: Storage, inside: AbstractSet[fx.Node]) -> bool:
    """Whether a floating point tensor that a block makes is read outside it, views of it included."""
    waiting = list(storage[0].users)
    if not has_gradient_dtype(tensor_results(storage[0])[storage[1]]):
        return False
    while waiting:
        user = waiting.pop()
        if is_getitem(user):
            if user.args[1] == storage[1]:
                waiting += user.users
        elif user not in inside:
            # Of what the model returns only the loss has a gradient.
            if user.op != "output":
                return True
        elif is_view(user):
            waiting += user.users
    return False
