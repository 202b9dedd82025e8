"""Placements that ops may not have: ruled out by a person, or to find the cost of doing without them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from autopar.ir.analysis.op_clusters import OpCluster
from autopar.ir.errors import InvalidInput
from autopar.ir.rule import Choice
from autopar.search.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A placement of the ops that ``pattern`` matches.

    pattern: of ``OP`` or ``BLOCK/OP`` as plans name them, with ``*`` and ``?`` as in file names. placement: (mesh axis,
    factor, or None for replicated); an op may not have all of them at once.
    """

    pattern: str
    placement: tuple[tuple[str, str | None], ...]

    def renamed(self, axes: Mapping[str, str]) -> Forbidden:
        """With other names for the axes."""
        return Forbidden(
            pattern=self.pattern, placement=tuple((axes.get(axis, axis), factor) for axis, factor in self.placement)
        )

    def __str__(self) -> str:
        return f"{self.pattern}: " + " ".join(f"{axis}={factor or '*'}" for axis, factor in self.placement)


def parse_forbidden(text: str) -> Forbidden:
    """``OP: AXIS=FACTOR ...``, with ``*`` for replicated. Raises InvalidInput."""
    pattern, colon, rest = text.rpartition(": ")
    placement: list[tuple[str, str | None]] = []
    for word in rest.split():
        axis, equals, factor = word.partition("=")
        if not axis or not equals or not factor:
            colon = ""
            break
        placement.append((axis, None if factor == "*" else factor))
    if not colon or not pattern or not placement:
        raise InvalidInput(
            f"--forbid {text!r}: expected OP: AXIS=FACTOR, as in 'mlp.up/linear: tp=n', or tp=* for replicated on tp"
        )
    return Forbidden(pattern=pattern, placement=tuple(placement))


def deciding_ops(workload: Workload) -> Iterator[tuple[str, str, fx.Node]]:
    """(block, op, its representative) of every op that plans place; all other ops follow one of them."""
    repetition = workload.repetition
    for group in workload.clusters.clusters:
        block = None if group.leader is None else repetition.block_of.get(group.leader)
        if group.leader is not None and block is not None:
            kind = repetition.kinds[repetition.blocks[block].kind]
            yield kind.name, repetition.key[group.leader], group.leader


def named_ops(workload: Workload, pattern: str) -> list[fx.Node]:
    """Deciding ops that ``pattern`` means: those of just this name, or else those that it matches."""
    known = list(deciding_ops(workload))
    exact = [node for block, op, node in known if pattern in (op, f"{block}/{op}")]
    return exact or [
        node for block, op, node in known if fnmatchcase(op, pattern) or fnmatchcase(f"{block}/{op}", pattern)
    ]


def check_forbidden(workload: Workload, forbidden: tuple[Forbidden, ...], axes: tuple[str, ...]) -> None:
    """Raise InvalidInput for an op, an axis or a factor that is not there."""
    for one in forbidden:
        found = named_ops(workload, one.pattern)
        if not found:
            raise InvalidInput(f"{one}: {unknown_op(workload, one.pattern)}")
        for axis, factor in one.placement:
            if axis not in axes:
                raise InvalidInput(
                    f"{one}: there is no mesh axis {axis!r}; the pinned ones are {', '.join(axes) or 'none'}.\n"
                    f"  try: pin the degree, as in --{axis} 2, or --like with a plan that has the axis"
                )
            choices = {choice for node in found for choice in workload.cluster_of(node).choices}
            if factor not in choices:
                raise InvalidInput(
                    f"{one}: {factor!r} is no factor that it can be divided along.\n"
                    f"  expected one of {', '.join(sorted(c or '*' for c in choices))}"
                )


def unknown_op(workload: Workload, name: str) -> str:
    """The error for a name that no deciding op has."""
    repetition = workload.repetition
    for group in workload.clusters.clusters:
        for member in group.members[1:]:
            if group.leader is not None and repetition.key.get(member) == name:
                return f"{name!r} is placed as {repetition.key[group.leader]!r} is.\n  try: that one"
    names = list(dict.fromkeys(key for block, op, _ in deciding_ops(workload) for key in (op, f"{block}/{op}")))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
    return f"the plan places no op {name!r}.\n  names like it: {', '.join(close) or 'none'}"


def forbidden_choices(
    workload: Workload, forbidden: tuple[Forbidden, ...], group: OpCluster, axes: tuple[str, ...]
) -> tuple[tuple[tuple[int, Choice], ...], ...]:
    """Joint choices on mesh axes, by position, that the leader of a cluster may not make."""
    return tuple(
        tuple((axes.index(axis), factor) for axis, factor in one.placement)
        for one in forbidden
        if group.leader in named_ops(workload, one.pattern) and all(axis in axes for axis, _ in one.placement)
    )
