"""The meaning of an op of a local program: its captured op, the factor on every axis, and the types of its results.

    linear(x, w)     x: rows on dp, w: Shard(0) on tp      b on dp, n on tp: the result is rows on dp, Shard(2) on tp

The assignment is inferred from the placements of the operands: on each axis those choices are left under which the rule
wants every operand as it is. Where nothing is left the op has no type. Several are left only for what an operand cannot
tell (an axis on a dimension that ``full`` or ``expand`` makes), and then the sizes in the call decide; if two axes are
of one size both types are right, and each user takes the one that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import fx

from autopar.ir.lowered.attention import QUERIES
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Placement
from autopar.ir.rule import Assignment, Choice, FactorRule, factors_of_choice
from autopar.ir.rules.call import parameters
from autopar.ir.rules.sizes import local_arguments
from autopar.ir.torch_private import pytree
from autopar.passes.verify.lowered_calls import LocalCall, Sharded, expected_call, lowering_of
from autopar.passes.verify.sequence_order import Order, Orders, free_orders, is_positional, orders_of, through
from autopar.passes.verify.terms import CapturedOp, Path, Slot, bind, flatten
from autopar.passes.verify.types import TIME, WHOLE, Mistyped, Sequence, Summands, Type, spell


@dataclass(frozen=True, slots=True)
class Inferred:
    """One way in which a captured op is split.

    assignment: the factor on every axis, microbatch first. results: types of its tensor results. gives: of each tensor
    operand, the axes on which its gradient is a summand whatever that of the results is.
    """

    op: CapturedOp
    assignment: Assignment
    results: tuple[Type, ...]
    gives: tuple[Summands, ...]

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        """Where the gradients of the tensor operands are summands, if that of the results is so on ``summands``.

        Raises Mistyped where the op would have to be given a whole gradient.
        """
        rule = self.op.rule
        passing = set()
        for axis in summands:
            choice = self.assignment[axis]
            if choice is not None:
                raise Mistyped(
                    f"the gradient of its result is a summand (Partial()) on {mesh.names[axis]}, which is on factor "
                    f"{choice!r} of the op; expected a gradient that is whole there"
                )
            if rule.nonlinear:
                raise Mistyped(
                    f"the gradient of its result is a summand (Partial()) on {mesh.names[axis]}, and its backward is "
                    "not linear; expected a gradient that is summed"
                )
            passing.add(axis)
        return tuple(own | passing for own in self.gives) if passing else self.gives


def operand_summands(rule: FactorRule, assignment: Assignment, position: int, mesh: Mesh) -> Summands:
    """The axes on which an op gives operand ``position`` a gradient that is a summand."""
    found = frozenset(
        axis
        for axis, choice in enumerate(assignment)
        if choice is not None and mesh.sizes[axis] > 1 and rule.operand(position, choice)[1].is_partial()
    )
    return found or WHOLE


@dataclass(frozen=True, slots=True)
class _Split:
    """``Inferred`` of every op that looks alike. results: layout, order and scale of each."""

    assignment: Assignment
    results: tuple[tuple[Layout, Order, int], ...]
    gives: tuple[Summands, ...]


@dataclass(slots=True)
class Inference:
    """Infers types of ops on ``mesh``, which has the microbatch in front. Ops that look alike are looked at once.

    sequence: that is in zigzag order; None in natural order.
    """

    mesh: Mesh
    sequence: Sequence | None = None
    _memo: dict[Any, list[_Split]] = field(default_factory=dict)
    _slots: dict[Any, dict[Path, int] | None] = field(default_factory=dict)
    _signatures: dict[Any, int] = field(default_factory=dict)
    _numbers: dict[CapturedOp, int] = field(default_factory=dict)

    def slots(self, op: CapturedOp, call: LocalCall) -> dict[Path, int] | None:
        """Where a call that is ``op`` has the operands of ``op``; None if the call is never this op."""
        key = (op, call.wrapper, call.target)
        if key not in self._slots:
            self._slots[key] = self._find_slots(op, call)
        return self._slots[key]

    def _find_slots(self, op: CapturedOp, call: LocalCall) -> dict[Path, int] | None:
        nothing: Assignment = (None,) * (len(self.mesh) - 1)
        sharded = Sharded(op=op, arguments=op.arguments, assignment=nothing, names=self.mesh.names[1:])
        for lowering in (None, *dict.fromkeys(op.rule.lowered.values())):
            form = expected_call(sharded, lowering)
            if form is not None and form.target is call.target and form.wrapper is call.wrapper:
                leaves = flatten(form.arguments)
                return {path: leaf.position for path, leaf in leaves.items() if isinstance(leaf, Slot)}
        return None

    def infer(
        self, op: CapturedOp, call: LocalCall, constants: Mapping[Path, Any], operands: tuple[Type, ...]
    ) -> list[Inferred]:
        """Every way in which ``call``, with ``constants`` beside its operands, is ``op`` on operands of these types.

        operands: of the tensor operands of ``op``. Raises Mistyped, saying what is wrong, if there is none.
        """
        if any(operand.scale != 1 for operand in operands):
            raise Mistyped("an operand is a mean over one microbatch, to be divided by their number first")
        given = tuple((operand.layout, operand.zigzag) for operand in operands)
        self._check_documents(op, given)
        key = (self.signature(op), call.target, call.wrapper, call.own, frozenset(constants.items()), given)
        if key not in self._memo:
            self._memo[key] = self._infer(op, call, constants, given)
        terms = op.tensor_results
        return [
            Inferred(op, split.assignment, tuple(Type(t, *kind) for t, kind in zip(terms, split.results)), split.gives)
            for split in self._memo[key]
        ]

    def _check_documents(self, op: CapturedOp, given: tuple[tuple[Layout, Order], ...]) -> None:
        """Raise Mistyped if an attention whose rows are in the order of documents is within others, or none."""
        if self.sequence is None or self.sequence.documents is None or not is_positional(op):
            return
        own = op.arguments.get("documents")
        within = op.operands[own.position] if isinstance(own, Slot) else None
        if within is not self.sequence.documents and any(order for _, order in given):
            raise Mistyped(f"it is within documents {within}; its rows are in the order of {self.sequence.documents}")

    def signature(self, op: CapturedOp) -> int:
        """A number that ops have in common that differ in their operands' terms alone."""
        number = self._numbers.get(op)
        if number is None:
            shapes = tuple((term.shape, term.dtype) for term in (*op.operands, *op.results))
            key = (op.node.target, id(op.rule), shapes, frozenset(flatten(op.arguments).items()))
            number = self._numbers[op] = self._signatures.setdefault(key, len(self._signatures))
        return number

    def _infer(
        self, op: CapturedOp, call: LocalCall, constants: Mapping[Path, Any], given: tuple[tuple[Layout, Order], ...]
    ) -> list[_Split]:
        rule, mesh = op.rule, self.mesh
        possible = []
        for axis, name in enumerate(mesh.names):
            placements = tuple(layout[axis] for layout, _ in given)
            choices = tuple(c for c in fitting_choices(rule, placements) if axis != TIME or self._in_time(rule, c))
            if not choices:
                raise Mistyped(_misfit(rule, placements, name))
            possible.append(choices)
        found = []
        reason = "no factor of its rule divides by the axes that its operands have on it"
        for assignment in product(*possible):
            if not rule.allows(assignment, mesh, TIME):
                continue
            for inners in self._orders(op, tuple(order for _, order in given)):
                try:
                    self._check(op, call, constants, assignment, inners)
                except Mistyped as error:
                    reason = str(error)
                    continue
                gives = tuple(operand_summands(rule, assignment, p, mesh) for p in range(len(rule.operands)))
                found.append(_Split(assignment, self._results(op, assignment, inners), gives))
        if not found:
            raise Mistyped(reason)
        return found

    def _in_time(self, rule: FactorRule, choice: Choice) -> bool:
        """Whether a factor may be cut into microbatches: no lowering but a mean's, which is divided afterwards."""
        if choice is None or choice.startswith("+"):
            return True
        name = rule.lowered.get(choice)
        if self.mesh.sizes[TIME] == 1 or choice in rule.couples:
            return False
        return (
            name in (None, "moe", "scaled_moe", "scales")
            or (name == "attention" and choice != QUERIES)
            or self._is_mean(rule, choice)
        )

    def _is_mean(self, rule: FactorRule, choice: Choice) -> bool:
        return choice is not None and rule.lowered.get(choice) == "mean" and choice in rule.summed

    def _orders(self, op: CapturedOp, orders: tuple[Order, ...]) -> list[Orders]:
        """The factors that may be in zigzag order. A factor that no operand has may be so or not."""
        if self.sequence is None:
            return [{}]
        found: list[Orders] = []
        refusal = None
        for free in free_orders(op, self.sequence):
            try:
                found.append(through(op, orders, self.sequence, free))
            except Mistyped as error:
                refusal = refusal or error
        if refusal is not None and not found:
            raise refusal
        return found

    def _check(
        self,
        op: CapturedOp,
        call: LocalCall,
        constants: Mapping[Path, Any],
        assignment: Assignment,
        inners: Orders,
    ) -> None:
        """Raise Mistyped unless ``call`` is what ``op`` has to be under ``assignment``."""
        chunks = self.sequence.num_ranks if self.sequence is not None and inners else 1
        lowering = lowering_of(op.rule, assignment[1:])
        if chunks > 1 and is_positional(op) and QUERIES in inners:
            lowering = "ring"
        expected = self._expected(op, assignment, lowering, chunks)
        if expected is None:
            raise Mistyped(f"no call is known to be it under the factors {self._show(assignment)}")
        form, wanted = expected
        if (form.target, form.wrapper, form.own) != (call.target, call.wrapper, call.own):
            raise Mistyped(
                f"under the factors {self._show(assignment)} it is a call of {_title(form)}; got {_title(call)}"
            )
        if wanted != constants:
            different = [path for path in wanted.keys() | constants.keys() if wanted.get(path) != constants.get(path)]
            path = min(different, key=str)
            raise Mistyped(
                f"under the factors {self._show(assignment)} its argument {'.'.join(map(str, path))} is "
                f"{wanted.get(path)}; got {constants.get(path)}"
            )
        self._check_made(op, assignment, lowering, chunks, wanted)

    def _check_made(
        self, op: CapturedOp, assignment: Assignment, lowering: str | None, chunks: int, wanted: Mapping[Path, Any]
    ) -> None:
        """An axis on a factor that no operand has is told by a size in the call, or nothing tells the op of it."""
        held = {factor for tensor in op.rule.operands for dim in tensor for factor in dim}
        for axis, choice in enumerate(assignment):
            factors = factors_of_choice(choice)
            if not factors or held.intersection(factors) or self.mesh.sizes[axis] == 1:
                continue
            without = (*assignment[:axis], None, *assignment[axis + 1 :])
            other = self._expected(op, without, lowering, chunks)
            if other is None or other[1] == wanted:
                raise Mistyped(f"nothing tells the op that {self.mesh.names[axis]} is on {choice!r}")

    def _expected(
        self, op: CapturedOp, assignment: Assignment, lowering: str | None, chunks: int
    ) -> tuple[LocalCall, dict[Path, Any]] | None:
        """The call that the op has to be, and its constants."""
        arguments = op.arguments
        results = op.tensor_results
        if results:
            shape = Type(results[0], op.rule.result_layout(0, assignment)).shape(self.mesh)
            args, kwargs = local_arguments(op.node, shape)
            if args != op.node.args or kwargs != op.node.kwargs:
                arguments = _with_slots(op, args, kwargs)
        by_documents = chunks > 1 and self.sequence is not None and self.sequence.documents is not None
        sharded = Sharded(
            op=op, arguments=arguments, assignment=assignment[1:], names=self.mesh.names[1:], chunks=chunks,
            by_documents=by_documents,
        )  # fmt: skip
        form = expected_call(sharded, lowering)
        if form is None:
            return None
        leaves = flatten(form.arguments)
        return form, {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Slot)}

    def _results(self, op: CapturedOp, assignment: Assignment, inners: Orders) -> tuple[tuple[Layout, Order, int], ...]:
        rule = op.rule
        scale = self.mesh.sizes[TIME] if self._is_mean(rule, assignment[TIME]) else 1
        return tuple(
            (rule.result_layout(number, assignment), orders_of(rule.results[number], rule, inners), scale)
            for number in range(len(op.tensor_results))
        )

    def _show(self, assignment: Assignment) -> str:
        named = (f"{n}={c}" for n, c in zip(self.mesh.names, assignment, strict=True) if c is not None)
        return f"({', '.join(named) or 'none'})"


def _with_slots(op: CapturedOp, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments for one rank, with the slots of the captured ones for operands."""
    slots = iter([leaf for leaf in pytree.tree_leaves(_ordered(op)) if isinstance(leaf, Slot)])
    local_args, local_kwargs = pytree.tree_map_only(fx.Node, lambda _: next(slots), (args, kwargs))
    return bind(op.node.target, local_args, local_kwargs)


def _ordered(op: CapturedOp) -> list[Any]:
    """The arguments of the captured call in the order in which they are written there."""
    names = [name for name, _ in parameters(op.node.target)]  # type: ignore[arg-type]
    written = [op.arguments[name] for name in names[: len(op.node.args)]]
    written += [op.arguments[str(number)] for number in range(len(names), len(op.node.args))]
    return written + [op.arguments[name] for name in op.node.kwargs]


def fitting_choices(rule: FactorRule, placements: tuple[Placement, ...]) -> tuple[Choice, ...]:
    """The choices of one axis under which a rule wants its operands in ``placements`` there."""
    return tuple(
        choice
        for choice in rule.choices()
        if all(rule.operand(position, choice)[0] == placement for position, placement in enumerate(placements))
    )


def _misfit(rule: FactorRule, placements: tuple[Placement, ...], name: str) -> str:
    got = ", ".join(map(spell, placements))
    wanted = [
        f"{choice or 'none'}: " + ", ".join(spell(rule.operand(p, choice)[0]) for p in range(len(placements)))
        for choice in rule.choices()
    ]
    return (
        f"its operands are ({got}) on {name}, which no factor of the op allows.\n"
        f"  expected one of (factor: operands): {'; '.join(wanted)}"
    )


def _title(call: LocalCall) -> str:
    target = getattr(call.target, "__name__", str(call.target))
    own = ", ".join(f"{name}={value}" for name, value in call.own)
    return f"{call.wrapper.__name__}({target}, {own})" if call.wrapper is not None else str(target)
