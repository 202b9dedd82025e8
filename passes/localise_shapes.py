"""Localise-shapes: values and arguments of a program have the sizes of one rank and one microbatch.

x (8, 64), up (256, 64), tp of 4 ranks:          v = view(h, [8, 256])         ->     v = view(h, [8, 64])
x (batch, 64), 2 microbatches:                   v = view(h, [batch, 256])     ->     v = view(h, [rows, 64])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.building import shape_of, sizes_of
from autopar.ir.capture.symbols import BATCH
from autopar.ir.graph import is_getitem
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placement import Layout, local_shape
from autopar.ir.program_sizes import ROWS, ProgramSizes
from autopar.ir.rules.sizes import local_arguments, map_sizes
from autopar.ir.sizes import Size, expressed
from autopar.ir.torch_private import pytree
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class LocaliseShapes(Pass[PlacedProgram]):
    """Replace global sizes of values and arguments by those of one rank and one microbatch."""

    name: ClassVar[str] = "localise-shapes"
    requires: ClassVar[frozenset[str]] = frozenset({"redistributions"})
    provides: ClassVar[frozenset[str]] = frozenset({"local shapes"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"local shapes", "collectives", "lowered ops"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        placed = program.placed
        pieces = _Pieces.of(placed)
        values: dict[fx.Node, tuple[Any, list[tuple[int, ...]]]] = {}
        for node in program.graph.nodes:
            captured = program.origin.get(node)
            if captured is None or is_getitem(captured):
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    shape = pieces.shape(shape_of(node), (node.meta["over_time"], *node.meta["layout"]))
                    values[node] = value.new_empty(shape), [shape]
                continue
            choices = (placed.time_choice(captured), *placed.layouts.assignments[captured])
            rule = placed.analysis.rule(captured)
            shapes = [
                pieces.shape(whole, rule.result_layout(number, choices))
                for number, whole in enumerate(sizes_of(captured))
            ]
            if shapes:
                # Sizes are those of global values, which all operands have until the end.
                node.args, node.kwargs = local_arguments(node, shapes[0])
            node.args, node.kwargs = map_sizes(node, pieces.of_rank)
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            fresh = iter(shapes)
            own = [leaf.new_empty(next(fresh)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            values[node] = pytree.tree_unflatten(own, spec), shapes
        for node, (local, shapes) in values.items():
            node.meta.pop("symbolic", None)
            node.meta.update(val=local, shapes=tuple(shapes))
        return replace(program, sizes=pieces.sizes())


@dataclass(slots=True)
class _Pieces:
    """Sizes of one rank and one microbatch.

    rows: what the batch of the capture is in rows of these. divides: what has to divide for them to be whole.
    """

    placed: PlacedModel
    symbols: dict[str, sympy.Symbol]
    rows: dict[sympy.Symbol, sympy.Expr]
    divides: set[tuple[sympy.Expr, int]] = field(default_factory=set)

    @classmethod
    def of(cls, placed: PlacedModel) -> _Pieces:
        symbols, rows = dict(placed.captured.symbols), dict[sympy.Symbol, sympy.Expr]()
        if BATCH in symbols:
            symbols[ROWS] = sympy.Symbol(ROWS, integer=True, nonnegative=True)
            rows[symbols[BATCH]] = symbols[ROWS] * (placed.plan.data_parallel_size * placed.num_microbatches)
        found = cls(placed, symbols, rows)
        zigzag = placed.zigzag
        if zigzag is not None and isinstance(zigzag.length, Size):
            found.divides.add((zigzag.length.expression, zigzag.divisor(placed.zigzag_ranks)))
        return found

    def shape(self, whole: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """The part that one rank has in one microbatch. layout: over the microbatches first."""
        found = []
        for size, part in zip(whole, local_shape(whole, layout, self.placed.time_and_mesh), strict=True):
            own = self.of_rank(part)
            if isinstance(size, Size) and size != part:
                expression, divisor = size.expression.xreplace(self.rows), size // part
                if not (expression / int(divisor)).is_integer:
                    self.divides.add((expression, int(divisor)))
            found.append(own)
        return tuple(found)

    def of_rank(self, size: int) -> int:
        """A size with the rows of this rank in place of the batch."""
        if not isinstance(size, Size):
            return size
        value: int = expressed(int(size), size.expression.xreplace(self.rows))
        return value

    def sizes(self) -> ProgramSizes | None:
        """The symbols of the program; None if there are none."""
        return ProgramSizes(self.symbols, frozenset(self.divides)) if self.symbols else None
