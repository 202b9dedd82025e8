"""Activations that a block keeps for its backward.

Autograd saves operands and results of ops (``autopar.ir.rules.saved``). Views share the storage of what they
view, so a storage is counted once however many ops save it, but once for every way it is cut: an operand that
a redistribution gathered is another tensor than the shard it came from.

    none        everything autograd saves
    selective   results of contractions, of reductions and exchanges, and the block's inputs; the rest is recomputed.
                A product that only a reduction or an exchange reads is not kept beside what comes out of it
    alternate   the same without every second product, which runs again
    full        the block's inputs; everything is recomputed

Parameters are counted with the model state. Tensors made of no parameter (masks, positions) are ``shared``:
every block of a stage saves the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import inf

from torch import fx

from autopar.cost_model.ops import compute_itemsize, is_contraction, is_view, op_name
from autopar.ir.graph import is_getitem, source, tensor_operands, tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.products import every_second, is_product
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.rules import rule_for
from autopar.ir.rules.saved import saved_for_backward

# One storage: the op that allocates it and the number of its result.
Storage = tuple[fx.Node, int]

# Ops whose backward passes on the gradient that comes in, as it is, to operands of the same shape.
_PASSING = frozenset({"add", "sub", "positive", "alias", "annotated"})

# Bytes of a class's logit in float32, which a cross entropy computes in.
_WIDE = 4


def storage_of(node: fx.Node) -> Storage:
    """Whose memory a tensor lives in, looking through views and ``getitem``."""
    while True:
        producer, position = source(node)
        if producer.op != "call_function" or not is_view(producer):
            return producer, position
        node = tensor_operands(producer)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of ``node`` that may be kept: bytes of the whole batch over all ranks, and the factors it runs over.

    itemsize: of an element, where it matters.
    """

    node: fx.Node
    storage: Storage
    num_bytes: float
    factors: frozenset[str]
    carries_batch: bool
    itemsize: int = 1

    def cuts(self, assignment: Assignment) -> tuple[bool, ...]:
        """Which mesh axes cut the tensor."""
        return tuple(not self.factors.isdisjoint(factors_of_choice(choice)) for choice in assignment)

    def local_bytes(self, assignment: Assignment, mesh: Mesh, num_microbatches: int = 1) -> float:
        """What one rank holds of it for one microbatch."""
        local = self.num_bytes / (num_microbatches if self.carries_batch else 1)
        for cut, axis in zip(self.cuts(assignment), mesh.axes, strict=True):
            if cut:
                local /= axis.size
        return local


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
class BlockActivations:
    """What one block may keep. Built once per distinct block; evaluated per assignment.

    saved: what autograd keeps. extra: bytes an op keeps that are no tensor of the graph (masks, statistics).
    kept: results of contractions. every_second: products that level alternate leaves out, with the factors that they
    sum over. moved: (producer's result, consumer's operand), between which a collective may be.
    inputs: operands from outside the block. outputs: results that are read outside it. backward: its ops, last first.
    """

    saved: tuple[Saved, ...]
    extra: tuple[Saved, ...]
    kept: tuple[Saved, ...]
    every_second: Mapping[fx.Node, frozenset[str]]
    moved: tuple[tuple[Saved, Saved], ...]
    inputs: tuple[Saved, ...]
    outputs: tuple[Saved, ...]
    backward: tuple[BackwardOp, ...]

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
    ) -> BlockActivations:
        """Measure the ops of a block.

        batch_factors: op -> factor that is the batch. shared: nodes whose storage is not the block's to count:
        parameters, buffers, step inputs, and ops that depend on no parameter. needs_grad: tensors that a
        gradient flows through; every floating point one if not given.
        """
        inside = set(nodes)
        batches = batch_factors or {}
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
            num_bytes = base.numel() * compute_itemsize(value.dtype, precision)
            itemsize = compute_itemsize(value.dtype, precision)
            return _saved(node, storage, num_bytes, (factors,), batches.get(node), itemsize)

        saved: list[Saved] = []
        extra: list[Saved] = []
        kept: list[Saved] = []
        moved: list[tuple[Saved, Saved]] = []
        inputs: list[Saved] = []
        outputs: list[Saved] = []
        backward: list[BackwardOp] = []
        for node in nodes:
            if is_getitem(node):
                continue
            rule = rules(node)
            operands = tensor_operands(node)
            uses = [entry(node, tensor, position) for position, tensor in enumerate(operands)]
            counted = {use for use in uses if use.storage[0] not in shared and use.storage[0].op == "call_function"}
            results = [entry(node, None, p) for p in range(len(rule.results))] if not is_view(node) else []
            operand_positions, result_positions, extra_bytes, extra_factors = saved_for_backward(node, differentiable)
            saved += [uses[p] for p in operand_positions if uses[p] in counted]
            saved += [results[p] for p in result_positions if p < len(results)]
            if extra_bytes:
                # A loss has no dimensions left; what it keeps is cut as its first operand is.
                shaped = rule.results[:1] if rule.results and rule.results[0] else rule.operands[:1]
                extra.append(_saved(node, (node, -1), extra_bytes, (*shaped, (extra_factors,)), batches.get(node)))
            if is_contraction(node, rule):
                kept += results
            inputs += [use for use in uses if use in counted and use.storage[0] not in inside]
            for tensor, use in zip(operands, uses, strict=True):
                producer, result = source(tensor)
                if producer in inside and use in counted:
                    produced = _saved(
                        producer, use.storage, use.num_bytes, (rules(producer).results[result],), batches.get(producer)
                    )
                    moved.append((produced, use))
            if is_view(node):
                continue
            outputs += [result for result in results if _leaves(result.storage, inside)]
            backward.append(_backward_op(node, uses, results, rules, batches, inside, shared, differentiable))
        return cls(
            saved=tuple(dict.fromkeys(saved)),
            extra=tuple(extra),
            kept=tuple(dict.fromkeys(kept)),
            every_second={
                node: frozenset(rules(node).summed)
                for node in every_second([node for node in nodes if is_product(node.target)])
            },
            moved=tuple(dict.fromkeys(moved)),
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(outputs),
            backward=tuple(reversed(backward)),
        )

    def saved_bytes(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1, remat: str = "none"
    ) -> float:
        """Bytes one rank keeps of one microbatch between forward and backward, rematerialised at level ``remat``."""
        if remat == "full":
            return _total(self.inputs, assignments, mesh, num_microbatches)
        if remat in ("selective", "alternate"):
            contracted, exchanged = self._dear(assignments, mesh, num_microbatches)
            if remat == "alternate":
                contracted = [t for t in contracted if not self._runs_again(t.node, assignments)]
            chosen = dict.fromkeys((*self.inputs, *contracted, *exchanged))
            least = _total(chosen, assignments, mesh, num_microbatches)
            return min(least, self.saved_bytes(assignments, mesh, num_microbatches))
        return _total(self.saved, assignments, mesh, num_microbatches) + _total(
            self.extra, assignments, mesh, num_microbatches
        )

    def run_again(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
    ) -> list[Saved]:
        """Results of contractions that level selective keeps and level alternate computes again."""
        contracted, _ = self._dear(assignments, mesh, num_microbatches)
        return [tensor for tensor in contracted if self._runs_again(tensor.node, assignments)]

    def _runs_again(self, node: fx.Node, assignments: Mapping[fx.Node, Assignment]) -> bool:
        """Whether level alternate computes a product again. One that is reduced between ranks is kept as their sum."""
        summed = self.every_second.get(node)
        return summed is not None and not any(
            factor in summed for choice in assignments[node] for factor in factors_of_choice(choice)
        )

    def _dear(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
    ) -> tuple[list[Saved], list[Saved]]:
        """What level selective keeps: results of contractions, and of reductions and exchanges."""
        exchanged = []
        read: dict[Storage, bool] = {}  # whether more than reductions and exchanges read it
        for produced, use in self.moved:
            before, after = (t.local_bytes(assignments[t.node], mesh, num_microbatches) for t in (produced, use))
            cut = produced.cuts(assignments[produced.node]) != use.cuts(assignments[use.node])
            if cut and after <= before:
                exchanged.append(use)
            read[use.storage] = read.get(use.storage, False) or not cut or after > before
        contracted = [t for t in self.kept if read.get(t.storage, True) or not is_product(t.node.target)]
        return contracted, exchanged

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

    def backward_peak(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
    ) -> BackwardPeak:
        """What the backward holds at its fullest moments, op by op, as autograd allocates and releases."""

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

        released = self._released(assignments, mesh, num_microbatches)
        for tensor in self.outputs:
            gradients[tensor.storage] = allocate(local(tensor))
        for op in self.backward:
            came = [gradients.pop(result.storage) for result in op.incoming if result.storage in gradients]
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
            see(own, own_wide)
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

    def _released(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
    ) -> Mapping[fx.Node, float]:
        """Bytes of what nobody needs any more after the backward of an op: it is the first that saved them."""
        released: dict[fx.Node, float] = {}
        sizes = _sizes((*self.saved, *self.extra), assignments, mesh, num_microbatches)
        for tensor in (*self.saved, *self.extra):
            size = sizes.pop((tensor.storage, tensor.cuts(assignments[tensor.node])), 0.0)
            released[tensor.node] = released.get(tensor.node, 0.0) + size
        return released

    def working(self) -> Iterator[tuple[Saved, ...]]:
        """What ops surely hold in their backward beside all that is saved: those before anything is released."""
        savers = {tensor.node for tensor in (*self.saved, *self.extra)}
        for op in self.backward:
            made = [used for (used, _), passed in zip(op.outgoing, op.passes, strict=True) if not passed]
            if op.logits is not None and (logits := op.logits[0]).itemsize < _WIDE:
                made.append(replace(logits, num_bytes=logits.num_bytes * _WIDE / logits.itemsize))
            yield (*op.incoming, *made)
            if op.node in savers:
                return

    def _loss_bytes(
        self, op: BackwardOp, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
    ) -> float:
        """What a cross entropy holds beside its saved logits and the gradient that it hands on.

        Whole classes: the gradients of log probabilities and of logits, in float32. Split ones: backward rewrites one
        copy in place; forward, the logits as they came, in float32, and what the exponentials are summed from.
        """
        assert op.logits is not None
        logits, classes = op.logits
        assignment = assignments[op.node]
        elements = logits.local_bytes(assignment, mesh, num_microbatches) / logits.itemsize
        split = any(not classes.isdisjoint(factors_of_choice(choice)) for choice in assignment)
        needed = (_WIDE if logits.itemsize == _WIDE else _WIDE + logits.itemsize) if split else 2 * _WIDE
        return elements * (needed - logits.itemsize)


def _total(
    tensors: Iterable[Saved], assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
) -> float:
    """Bytes of the distinct storages among ``tensors``, each way of cutting one counted once."""
    return sum(_sizes(tensors, assignments, mesh, num_microbatches).values())


def _sizes(
    tensors: Iterable[Saved], assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
) -> dict[tuple[Storage, tuple[bool, ...]], float]:
    sizes: dict[tuple[Storage, tuple[bool, ...]], float] = {}
    for tensor in tensors:
        assignment = assignments[tensor.node]
        local = tensor.local_bytes(assignment, mesh, num_microbatches)
        key = tensor.storage, tensor.cuts(assignment)
        sizes[key] = min(sizes.get(key, inf), local)
    return sizes


def _leaves(storage: Storage, inside: AbstractSet[fx.Node]) -> bool:
    """Whether a floating point tensor that a block makes is read outside it, views of it included."""
    waiting = list(storage[0].users)
    if not tensor_results(storage[0])[storage[1]].is_floating_point():
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


def _backward_op(
    node: fx.Node,
    uses: Sequence[Saved],
    results: Sequence[Saved],
    rules: Callable[[fx.Node], FactorRule],
    batches: Mapping[fx.Node, str | None],
    inside: AbstractSet[fx.Node],
    shared: AbstractSet[fx.Node],
    differentiable: Callable[[fx.Node], bool] | None,
) -> BackwardOp:
    outgoing, passes, weights = [], [], []
    shape = tensor_results(node)[0].shape
    operands = tensor_operands(node)
    for position, (tensor, use) in enumerate(zip(operands, uses, strict=True)):
        value = tensor.meta["val"]
        if not value.is_floating_point() or not (differentiable is None or differentiable(tensor)):
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
            factors = rules(producer).results[result]
            produced = _saved(producer, use.storage, use.num_bytes, (factors,), batches.get(producer), use.itemsize)
        outgoing.append((use, produced))
        passes.append(op_name(node) in _PASSING and value.shape == shape and not (op_name(node) == "sub" and position))
    logits = None
    if "cross_entropy" in op_name(node):
        rule = rules(node)
        own, other = ({f for dim in rule.operands[position] for f in dim} for position in (0, 1))
        logits = uses[0], frozenset(own - other)
    return BackwardOp(
        node=node,
        incoming=tuple(results) if differentiable is None or differentiable(node) else (),
        outgoing=tuple(outgoing),
        passes=tuple(passes),
        weights=tuple(weights),
        logits=logits,
    )


def _saved(
    node: fx.Node,
    storage: Storage,
    num_bytes: float,
    tensors: Sequence[TensorFactors],
    batch_factor: str | None,
    itemsize: int = 1,
) -> Saved:
    names = frozenset(factor for tensor in tensors for dim in tensor for factor in dim)
    return Saved(
        node=node,
        storage=storage,
        num_bytes=float(num_bytes),
        factors=names,
        carries_batch=batch_factor is not None and batch_factor in names,
        itemsize=itemsize,
    )
