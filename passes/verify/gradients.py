"""Types of gradients: from the loss back to every parameter, through all stages.

Autograd runs the calls in reverse. What users of a value hand back is added up, so it has to be of one kind: whole, or
a summand, on every axis. Where a gradient reaches a stored parameter it has to be what the runtime sums, which
``parameters`` checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.mesh import Mesh
from autopar.passes.verify.stages import Unplaced, located
from autopar.passes.verify.types import Mistyped, Summands, Type
from autopar.passes.verify.values import Call, Derivation


def type_gradients(calls: Sequence[Call], mesh: Mesh) -> None:
    """Type the gradient of every value that has one. Raises Unplaced. Results of the program have theirs already."""
    for call in reversed(calls):
        try:
            _backward(call, mesh)
        except Mistyped as error:
            raise Unplaced(located(call.node, call.place, str(error))) from error


def _backward(call: Call, mesh: Mesh) -> None:
    found: dict[int, tuple[Type, Summands]] = {}
    for number, result in enumerate(call.results):
        gradient = result.gradient(mesh) if result.needs_gradient else None
        if gradient is not None:
            found[number] = gradient
    if not found:
        return
    kinds = {number: kind for number, (kind, _) in found.items()}
    summands = {summands for _, summands in found.values()}
    if len(summands) > 1:
        raise Mistyped("of the gradients of its results one is a summand where another is whole")
    possible = [d for d in call.derivations if all(d.results[n] == kind for n, kind in kinds.items())]
    reason: Mistyped | None = None
    for derivation in sorted(possible, key=lambda d: _clashes(call, d)):
        try:
            handed = derivation.way.backward(next(iter(summands)), mesh)
        except Mistyped as error:
            reason = reason or error
            continue
        for value, kind, own in zip(call.operands, derivation.operands, handed, strict=True):
            if value.needs_gradient and kind.term.carries_gradient:
                value.gradients.append((kind, own, call.node.name))
        return
    raise reason or Mistyped("its users take it for types that no one way to compute it gives")


def _clashes(call: Call, derivation: Derivation) -> int:
    """Operands that other users take for another type: of several ways the one with the fewest is right, if any is."""
    return sum(
        bool(value.gradients) and value.gradients[0][0] != kind
        for value, kind in zip(call.operands, derivation.operands, strict=True)
    )
