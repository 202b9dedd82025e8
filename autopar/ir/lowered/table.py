"""Ops that, sharded on a lowered factor, are more than the op on local shards.

``FactorRule.lowered`` names the lowering of a factor. ``LOWERINGS[name](node, rule, assignment, mesh)`` gives
``(function, args, kwargs)``: the call that replaces ``node`` (whose arguments are already local), with mesh axes
in the keywords that end in ``groups``, major axis first; ``collectives.bind_groups`` puts process groups in
their place. Each function equals the whole op, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from autopar.ir.lowered import (
    attention,
    batch_norm,
    cross_entropy,
    embedding,
    embedding_bag,
    moe,
    random,
    reductions,
    ring,
    scales,
)
from autopar.ir.lowered.inside import Inside, LocalSizes
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule

Lowered = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Builder = Callable[[fx.Node, FactorRule, Assignment, Mesh], Lowered]

LOWERINGS: dict[str, Builder] = {
    "attention": attention.build,
    "batch_norm": batch_norm.build,
    "bias": reductions.build_bias,
    "cross_entropy": cross_entropy.build,
    "embedding": embedding.build,
    "embedding_bag": embedding_bag.build,
    "moe": moe.build,
    "mean": reductions.build_mean,
    "random": random.build,
    "ring": ring.build,
    "scaled_moe": moe.build,
    "scales": scales.build,
}

# What shards exchange inside; the other lowerings exchange nothing: their results are summands, or draw by their place.
INSIDE: dict[str, Callable[[fx.Node, FactorRule, LocalSizes], Iterator[Inside]]] = {
    "batch_norm": batch_norm.inside,
    "cross_entropy": cross_entropy.inside,
    "moe": moe.inside,
    "ring": ring.inside,
    "scaled_moe": moe.inside,
    "scales": scales.inside,
}

__all__ = ["INSIDE", "LOWERINGS", "Builder", "Lowered", "lowering_of"]


def lowering_of(rule: FactorRule, assignment: Assignment) -> str | None:
    """Name of the lowering of an op under ``assignment``, None if it is the op itself on shards.

    The lowering of a joint choice knows what to do with each of its factors alone, too.
    """
    joint = {rule.lowered[choice] for choice in assignment if choice in rule.joint}
    names = {rule.lowered[choice] for choice in assignment if choice is not None and choice in rule.lowered}
    names |= {name for factor, name in rule.lowered.items() if factor == "*"}
    chosen = joint or names
    assert len(chosen) <= 1, f"several lowerings at once: {sorted(chosen)}"
    return next(iter(chosen), None)
