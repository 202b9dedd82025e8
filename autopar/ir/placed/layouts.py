"""The layouts that tensors are made in and needed in, read off the factor rules of the ops that make and need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.derived_parameters import Passing, left_to_sum, passing_axes
from autopar.ir.placement import Layout, Placement, Replicate
from autopar.ir.rule import Assignment, Choice


class Need(NamedTuple):
    """Layouts that an op needs an operand in: of the value, and of its gradient."""

    value: Layout
    grad: Layout


def made_on_axis(analysis: Analysis, producer: fx.Node, result: int, choice: Choice) -> Placement:
    """Placement on one axis of result ``result`` of ``producer``, an op or a placeholder that is no parameter.

    choice: of the op along the axis, or of the step inputs, which buffers and constants ignore: they are whole.
    """
    if producer.op == "call_function":
        return analysis.rule(producer).result(result, choice)
    if producer in analysis.clusters.input_dims:
        return analysis.clusters.input_placement(producer, choice)
    return Replicate()


@dataclass(frozen=True, kw_only=True, eq=False)
class Layouts:
    """The layouts of a model's tensors on a stage mesh.

    assignments: of every op, or of representative ops alone, which stand for the others. inputs: choices of the step
    inputs, which divide their batch.
    """

    analysis: Analysis
    assignments: Mapping[fx.Node, Assignment]
    inputs: Assignment

    @cached_property
    def passing(self) -> Passing:
        """Axes on which summands pass through derived ops, by representative op; see ``derived_parameters``."""
        return passing_axes(self.analysis.derived, self.assignments, self.analysis.roles)

    def passes(self, producer: fx.Node) -> frozenset[int]:
        """Axes on which summands pass through ``producer``."""
        return self.passing.get(self.analysis.representative(producer), frozenset())

    def made(self, producer: fx.Node, result: int = 0) -> Layout:
        """Layout that result ``result`` of ``producer`` is made in; ``producer`` is no parameter."""
        choices = self.assignments[producer] if producer.op == "call_function" else self.inputs
        return tuple(made_on_axis(self.analysis, producer, result, choice) for choice in choices)

    def need(self, user: fx.Node, position: int) -> Need:
        """Layouts that ``user`` needs operand ``position`` in."""
        return Need(*self.analysis.rule(user).operand_layout(position, self.assignments[user], self.passes(user)))

    def need_of(self, producer: fx.Node, user: fx.Node, position: int) -> Need:
        """``need`` for a result of ``producer``, as its redistribution sees it: partial sums that pass are not
        reduced."""
        value, grad = self.need(user, position)
        return Need(value, left_to_sum(grad, self.passes(producer)))
