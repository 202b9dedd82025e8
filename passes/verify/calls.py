"""Types of the calls of a block: ops, collectives, and what stands around them.

read_parameter(w)           the stored piece of w; its gradient ends here
whole_batch(count)          the sum over the microbatches of a step
div.Scalar(loss, 4.0)       of a mean over one of four microbatches: a summand of that over all
_to_copy(x, dtype=bf16)     x, in the dtype of compute
clone(x)                    x, whose memory is its own
to_zigzag(x, ..)            x in zigzag order; to_document_order(x, documents, ..) in that of packed documents
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from autopar.ir.analysis.zigzag import from_zigzag, to_zigzag
from autopar.ir.mesh import Mesh
from autopar.ir.packed_order import from_document_order, to_document_order
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.primitives.whole_batch import whole_batch
from autopar.ir.torch_private import TO_COPY
from autopar.passes.verify.collectives import Move, move_of
from autopar.passes.verify.inference import Inference, Inferred
from autopar.passes.verify.lowered_calls import LocalCall, read_call
from autopar.passes.verify.terms import CapturedOp, Term, Terms, flatten
from autopar.passes.verify.types import TIME, WHOLE, Mistyped, Sequence, Summands, Type, Zigzag
from autopar.passes.verify.values import Derivation, Same, Value

aten = torch.ops.aten

# Ops through which autograd hands no gradient back.
_CUTS = frozenset({aten.detach.default})


@dataclass(slots=True)
class CallTyper:
    """Types calls on ``mesh``, which has the microbatch in front.

    compute: the narrow dtype of compute, None for that of the model. drawn: how often ops were computed that draw
    random numbers.
    """

    terms: Terms
    mesh: Mesh
    compute: torch.dtype | None
    inference: Inference = field(init=False)
    drawn: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inference = Inference(self.mesh)

    def derive(
        self, node: fx.Node, operands: dict[fx.Node, Value]
    ) -> tuple[tuple[Value, ...], tuple[Derivation, ...], bool]:
        """The operands of a call in order, every way to type it, and whether a gradient flows through it.

        Raises Mistyped, saying why, if there is none.
        """
        move = move_of(node, self.mesh)
        if move is not None:
            return self._alone(node, operands, lambda given: move.apply(given, self.mesh), move)
        if node.target in (to_document_order, from_document_order):
            return self.reorder_rows(node, operands, back=node.target is from_document_order)
        special = _SPECIAL.get(node.target)  # type: ignore[arg-type]  # a target of another kind is not in the table
        if special is not None:
            return self._alone(node, operands, lambda given: special(self, node, given), Same())
        found: list[Derivation] = []
        reasons: list[str] = []
        values = tuple(operands[operand] for operand in node.all_input_nodes)
        for _, derivations in self._as_op(node, operands, reasons):
            found += derivations
        for rest in (self._share, self._cast_or_copy):
            found += rest(node, values)
        if not found:
            raise Mistyped(self._why(node, values, reasons))
        flows = node.target not in _CUTS and any(value.needs_gradient for value in values)
        return values, tuple(dict.fromkeys(found)), flows

    def _alone(
        self, node: fx.Node, operands: dict[fx.Node, Value], apply: Callable[[Type], Type], way: Move | Same
    ) -> tuple[tuple[Value, ...], tuple[Derivation, ...], bool]:
        """A call of one operand, whatever type of it fits."""
        (value,) = (operands[operand] for operand in node.all_input_nodes)
        found, reasons = [], []
        for given in value.types:
            try:
                found.append(Derivation(operands=(given,), results=(apply(given),), way=way))
            except Mistyped as error:
                reasons.append(str(error))
        if not found:
            raise Mistyped(reasons[0])
        return (value,), tuple(found), value.needs_gradient

    # Ops of the captured program.

    def _as_op(
        self, node: fx.Node, operands: dict[fx.Node, Value], reasons: list[str]
    ) -> Iterator[tuple[CapturedOp, list[Derivation]]]:
        """The captured ops that a call computes, each with the ways in which it does."""
        call = read_call(node)
        leaves = flatten(call.arguments)
        constants = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, fx.Node)}
        inputs = node.all_input_nodes
        choices = [operands[operand].types for operand in inputs]
        for kinds in product(*choices):
            types = dict(zip(inputs, kinds, strict=True))
            for op in self.terms.using.get(frozenset(kind.term for kind in kinds), ()):
                slots = self.inference.slots(op, call)
                if slots is None or slots.keys() | constants.keys() != leaves.keys():
                    continue
                given = [
                    leaf
                    for _, leaf in sorted(((slot, leaves[path]) for path, slot in slots.items()), key=itemgetter(0))
                ]
                if [types[leaf].term if leaf in types else None for leaf in given] != list(op.operands):
                    continue
                if not self._is_next(op, node):
                    continue
                try:
                    yield op, self._ways(op, call, constants, [inputs.index(leaf) for leaf in given], kinds)
                except Mistyped as error:
                    reasons.append(f"as {op.node.name} of the model: {error}")

    def _ways(
        self, op: CapturedOp, call: LocalCall, constants: dict[Any, Any], places: list[int], kinds: tuple[Type, ...]
    ) -> list[Derivation]:
        """places: which of the distinct operands, of types ``kinds``, is where in the order of the rule."""
        tensors, plain = places[: op.num_tensors], places[op.num_tensors :]
        for place in plain:
            if any(not placement.is_replicate() for placement in kinds[place].layout):
                raise Mistyped(f"a number that ranks do not share: {kinds[place].show(self.mesh)}")
        found = []
        for inferred in self.inference.infer(op, call, constants, tuple(kinds[place] for place in tensors)):
            typed = iter(inferred.results)
            results = tuple(next(typed) if term.shape is not None else self.plain(term) for term in op.results)
            way = _OfOperands(inferred, tuple(tensors), len(kinds))
            found.append(Derivation(operands=kinds, results=results, way=way))
        return found

    def plain(self, term: Term) -> Type:
        """The type of what every rank has alike."""
        return Type(term, (Replicate(),) * len(self.mesh))

    def _is_next(self, op: CapturedOp, node: fx.Node) -> bool:
        """Of ops that draw random numbers, which look alike, each is computed once, in order."""
        if not op.draws:
            return True
        alike = [other for other in self.terms.using[frozenset(op.operands)] if self._draws_alike(op, other)]
        key = tuple(alike)
        if (key, node) not in self.drawn:
            count = self.drawn.get(key, 0)
            self.drawn[key, node] = count
            self.drawn[key] = count + 1
        number = self.drawn[key, node]
        return number < len(alike) and alike[number] is op

    def _draws_alike(self, op: CapturedOp, other: CapturedOp) -> bool:
        return other.operands == op.operands and self.inference.signature(op) == self.inference.signature(other)

    # What stands around the ops.

    def _share(self, node: fx.Node, values: Items[Value]) -> list[Derivation]:
        """A division by the number of microbatches: of a mean over one of them, or of what all of them have alike."""
        count = self.mesh.sizes[TIME]
        if node.target is not aten.div.Scalar or count == 1 or node.kwargs or node.args[1] != count:
            return []
        found = []
        for given in values[0].types:
            if given.scale == count:
                found.append(Derivation(operands=(given,), results=(replace(given, scale=1),), way=Same()))
            elif given.layout[TIME].is_replicate():
                shared = given.on(TIME, Partial())
                found.append(Derivation(operands=(given,), results=(shared,), way=Same(frozenset({TIME}))))
        return found

    def _cast_or_copy(self, node: fx.Node, values: Items[Value]) -> list[Derivation]:
        """A cast to the dtype of compute, or a copy of a value's own: the value itself."""
        is_copy = node.target is aten.clone.default and not node.kwargs
        is_cast = node.target is TO_COPY and node.kwargs == {"dtype": self.compute} and self.compute
        if not (is_copy or is_cast):
            return []
        return [
            Derivation(operands=(given,), results=(given,), way=Same())
            for given in values[0].types
            if is_copy or given.term.carries_gradient
        ]

    def reorder(self, node: fx.Node, given: Type, *, back: bool) -> Type:
        """A sequence put in zigzag order, or back."""
        options: dict[str, Any] = dict(node.kwargs)
        return self._ordered(given, Zigzag(options["dim"], options["inner"]), _sequence(options), back=back)

    def _ordered(self, given: Type, order: Zigzag, sequence: Sequence, *, back: bool) -> Type:
        if self.inference.sequence not in (None, sequence):
            raise Mistyped(f"a sequence of {sequence}; others are of {self.inference.sequence}")
        shape = given.shape(self.mesh)
        if shape[order.dim] % (sequence.length * order.inner):
            raise Mistyped(
                f"its operand is {given.show(self.mesh)}, a part of a sequence of {sequence.length} positions"
            )
        if (order in given.zigzag) != back:
            raise Mistyped(f"its operand is in {given.zigzag or 'natural'} order along dimension {order.dim}")
        self.inference.sequence = sequence
        rest = tuple(other for other in given.zigzag if other != order)
        return replace(given, zigzag=rest if back else tuple(sorted((*rest, order))))

    def reorder_rows(
        self, node: fx.Node, operands: dict[fx.Node, Value], *, back: bool
    ) -> tuple[tuple[Value, ...], tuple[Derivation, ...], bool]:
        """A sequence put in the order of the documents of each row, or back."""
        x, documents = node.args
        assert isinstance(x, fx.Node) and isinstance(documents, fx.Node)
        found, reasons = [], []
        for given, told in product(operands[x].types, operands[documents].types):
            try:
                result = self._in_order_of(dict(node.kwargs), given, told, back=back)
                kinds = (given,) if x is documents else (given, told)
                found.append(Derivation(operands=kinds, results=(result,), way=_OfFirst(len(kinds))))
            except Mistyped as error:
                reasons.append(str(error))
        if not found:
            raise Mistyped(reasons[0])
        return tuple(operands[own] for own in node.all_input_nodes), tuple(found), operands[x].needs_gradient

    def _in_order_of(self, options: dict[str, Any], given: Type, documents: Type, *, back: bool) -> Type:
        rows, shape = options["rows"], given.term.shape
        sequence = _sequence(options, documents.term)
        order = Zigzag(options["dim"], options["inner"], rows)
        assert shape is not None
        if documents.zigzag or documents.term.shape != (sequence.num_rows, sequence.length):
            raise Mistyped(f"the documents are {documents.show(self.mesh)}; expected whole rows in natural order")
        merged = sequence.length * order.inner if rows == order.dim else 1
        if (rows is None) != (sequence.num_rows == 1) or (
            rows is not None and shape[rows] != sequence.num_rows * merged
        ):
            raise Mistyped(f"dimension {rows} of its operand does not have the rows of the documents")
        for axis, (own, told) in enumerate(zip(given.layout, documents.layout, strict=True)):
            if (rows is not None and own == Shard(rows)) != told.is_shard() or told not in (Replicate(), Shard(0)):
                raise Mistyped(
                    f"the documents are {documents.show(self.mesh)}, of other rows on {self.mesh.names[axis]} than its "
                    f"operand {given.show(self.mesh)}"
                )
        return self._ordered(given, order, sequence, back=back)

    def total(self, given: Type) -> Type:
        """The sum over the microbatches of a step, which the runtime makes of what each contributes."""
        if not given.layout[TIME].is_partial() and self.mesh.sizes[TIME] > 1:
            raise Mistyped(f"its operand is {given.show(self.mesh)}; expected what adds up over the microbatches")
        return given.on(TIME, Replicate())

    def _why(self, node: fx.Node, values: Items[Value], reasons: Items[str]) -> str:
        if reasons:
            return reasons[0]
        shown = "; ".join(kind.show(self.mesh) for value in values for kind in value.types[:1])
        return f"no op of the model is this call on these operands ({shown or 'none'})"


@dataclass(frozen=True, slots=True)
class _OfOperands:
    """The backward of an op, by distinct operands: one that it takes at several places gets the sum of all."""

    inferred: Inferred
    places: tuple[int, ...]
    count: int

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        found: list[Summands | None] = [None] * self.count
        for place, own in zip(self.places, self.inferred.backward(summands, mesh), strict=True):
            if found[place] not in (None, own):
                raise Mistyped("it takes one operand at two places, and only one of the two gradients is a summand")
            found[place] = own
        return tuple(WHOLE if own is None else own for own in found)


@dataclass(frozen=True, slots=True)
class _OfFirst:
    """The backward of what is the first operand in another order: no other gets a gradient."""

    count: int

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        """The axes of the result's gradient."""
        return (summands, *(WHOLE,) * (self.count - 1))


def _sequence(options: dict[str, Any], documents: Term | None = None) -> Sequence:
    num_ranks = options["zigzag_ranks" if documents is None else "num_ranks"]
    return Sequence(int(options["length"]), num_ranks, documents)


_SPECIAL: dict[Any, Callable[[CallTyper, fx.Node, Type], Type]] = {
    to_zigzag: lambda typer, node, given: typer.reorder(node, given, back=False),
    from_zigzag: lambda typer, node, given: typer.reorder(node, given, back=True),
    whole_batch: lambda typer, node, given: typer.total(given),
}
