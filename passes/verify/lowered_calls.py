"""Calls that stand for a captured op whose lowered factor is sharded, written down from what each function promises.

    embedding(weight, ids)  with v on tp      embedding(weight, ids, padding_idx=-1, groups=('tp',))

The call that an op has to be, with slots for its operands, follows from the op and from the factors on the axes. That
is all: an op is replaced exactly where its rule says that the op itself on shards would be wrong, by a function that is
told exactly the axes of the factor, major first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
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
)
from autopar.ir.ops import composite
from autopar.ir.primitives.group_communication import joint_groups
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice
from autopar.ir.rules.call import op_name, parameters
from autopar.ir.rules.moe import EXPERTS
from autopar.passes.verify.terms import CapturedOp, bind

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """A captured op under an assignment of the axes ``names`` of a stage mesh.

    arguments: of the local op, sizes being local ones. chunks: ranks that a sequence in zigzag order is for, 1 in
        natural order. by_documents: each row is in the order of its documents for as many ranks.
    """

    op: CapturedOp
    arguments: Mapping[str, Any]
    assignment: Assignment
    names: tuple[str, ...]
    chunks: int = 1
    by_documents: bool = False

    def axes(self, factors: Collection[str]) -> tuple[str, ...]:
        """The axes on which one of ``factors`` is, major first."""
        return tuple(
            name
            for name, choice in zip(self.names, self.assignment, strict=True)
            if not set(factors).isdisjoint(factors_of_choice(choice))
        )

    def lowered(self, name: str) -> tuple[str, ...]:
        """The axes on which a factor with the lowering ``name`` is."""
        return self.axes({factor for factor, lowering in self.op.rule.lowered.items() if lowering == name})

    @property
    def every(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts."""
        return self.axes(self.op.rule.sizes)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call of a local program: what it computes, apart from its wrapper. own: arguments of the wrapper."""

    target: Any
    arguments: Arguments
    wrapper: Any = None
    own: tuple[tuple[str, Any], ...] = ()


# Functions that call another with one thing changed, and the keywords that are their own.
_WRAPPERS: dict[Any, tuple[str, ...]] = {
    reductions.local_mean: ("groups",),
    reductions.split_bias: ("groups", "bias"),
    random.seeded: ("groups",),
}


def read_call(node: fx.Node) -> LocalCall:
    """A ``call_function`` node as the call that it is."""
    own = _WRAPPERS.get(node.target)  # type: ignore[arg-type]  # a target of another kind is not in the table
    if own is None:
        return LocalCall(node.target, bind(node.target, node.args, node.kwargs))
    target, *args = node.args
    kwargs = {name: value for name, value in node.kwargs.items() if name not in own}
    options = tuple((name, _plain(node.kwargs.get(name))) for name in own)
    return LocalCall(target, bind(target, args, kwargs), node.target, options)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


def lowering_of(rule: FactorRule, assignment: Assignment) -> str | None:
    """Name of the lowering that the op needs; None if the op itself on shards is right. Several are never put together.

    That of a joint choice goes before those of single factors.
    """
    joint = {rule.lowered[choice] for choice in assignment if choice in rule.joint}
    single = {rule.lowered[choice] for choice in assignment if choice is not None and choice in rule.lowered}
    always = {rule.lowered["*"]} if "*" in rule.lowered else set()
    names = joint or single | always
    return "several" if len(names) > 1 else next(iter(names), None)


def expected_call(sharded: Sharded, lowering: str | None) -> LocalCall | None:
    """The call that the op has to be, with slots for its operands; None if nothing is known to be right."""
    target = sharded.op.node.target
    if lowering is None:
        return LocalCall(target, dict(sharded.arguments))
    make = _LOWERED.get((lowering, op_name(target))) or _LOWERED.get((lowering, ""))  # type: ignore[arg-type]
    return None if make is None else make(sharded)


def _attention(sharded: Sharded) -> LocalCall | None:
    given = _attention_arguments(sharded)
    groups = sharded.every if given["dropout_p"] > 0 else ()
    own = {"query_groups": sharded.axes({attention.QUERIES}), "random_groups": groups}
    return LocalCall(attention.attention, {**given, **own})


def _ring(sharded: Sharded) -> LocalCall | None:
    given = _attention_arguments(sharded)
    if given.pop("dropout_p") or given.pop("sinks") is not None:
        return None
    rule = sharded.op.rule
    queries, keys = (rule.operands[position][-2] for position in (0, 1))
    own = {
        "lengths": tuple(prod(rule.sizes[factor] for factor in dim) for dim in (queries, keys)),
        "zigzag_ranks": sharded.chunks,
        "by_documents": sharded.by_documents,
        "query_groups": sharded.axes(queries),
        "key_groups": sharded.axes(keys),
    }
    return LocalCall(ring.ring_attention, {**given, **own})


def _attention_arguments(sharded: Sharded) -> Arguments:
    """Arguments of ``composite.attention`` of an op that is one, or ATen's."""
    given = dict(sharded.arguments)
    if sharded.op.node.target is composite.attention:
        return given
    scale = given["scale"]
    if scale is None:
        query = sharded.op.operands[0].shape
        assert query is not None
        scale = query[-1] ** -0.5
    kind = "causal" if given["is_causal"] else "full" if given["attn_mask"] is None else "mask"
    operands = {
        "q": given["query"],
        "k": given["key"],
        "v": given["value"],
        "mask": given["attn_mask"],
        "sinks": None,
        "documents": None,
    }
    return {**operands, "kind": kind, "window": None, "scale": scale, "dropout_p": given["dropout_p"]}


def _batch_norm(sharded: Sharded) -> LocalCall | None:
    given = sharded.arguments
    if not given["training"]:
        return None
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    operands = {("x" if name == "input" else name): given.get(name) for name in names}
    return LocalCall(batch_norm.batch_norm, {**operands, "groups": sharded.lowered("batch_norm")})


def _mean(sharded: Sharded) -> LocalCall | None:
    return _wrapped(sharded, reductions.local_mean, groups=sharded.lowered("mean"))


def _random(sharded: Sharded) -> LocalCall | None:
    return _wrapped(sharded, random.seeded, groups=sharded.every)


def _bias(sharded: Sharded) -> LocalCall | None:
    names = [name for name, _ in parameters(sharded.op.node.target)]  # type: ignore[arg-type]
    number = names.index("bias") if "bias" in names else 0  # addmm adds its first operand
    return _wrapped(sharded, reductions.split_bias, groups=sharded.lowered("bias"), bias=number)


def _columns_bias(sharded: Sharded) -> LocalCall | None:
    given = sharded.arguments
    operands = {"x": given["input"], "matrix": given["weight"], "bias": given["bias"]}
    return LocalCall(reductions.columns_split_bias, {**operands, "groups": sharded.lowered("bias")})


def _wrapped(sharded: Sharded, wrapper: Any, **own: Any) -> LocalCall:
    options = tuple((name, own[name]) for name in _WRAPPERS[wrapper])
    return LocalCall(sharded.op.node.target, dict(sharded.arguments), wrapper, options)


def _cross_entropy(sharded: Sharded) -> LocalCall | None:
    given = sharded.arguments
    logits, target = sharded.op.rule.operands[:2]
    classes = {factor for dim in logits for factor in dim} - {factor for dim in target for factor in dim}
    kept = {name: given[name] for name in ("ignore_index", "label_smoothing")}
    own = {**kept, "vocab_groups": sharded.axes(classes)}
    if sharded.op.node.target is composite.cross_entropy:
        operands = {"logits": given["logits"], "target": given["target"], "reduction": given["reduction"]}
        return LocalCall(cross_entropy.cross_entropy, {**operands, **own})
    operands = {"scores": given["self"], "target": given["target"]}
    reduction = ("none", "mean", "sum")[given["reduction"]]
    return LocalCall(cross_entropy.class_dim_cross_entropy, {**operands, "reduction": reduction, **own})


def _embedding(sharded: Sharded) -> LocalCall | None:
    given = sharded.arguments
    if given["sparse"] or given["scale_grad_by_freq"]:
        return None
    operands = {name: given[name] for name in ("weight", "indices", "padding_idx")}
    return LocalCall(embedding.embedding, {**operands, "groups": sharded.lowered("embedding")})


def _embedding_bag(sharded: Sharded) -> LocalCall | None:
    return LocalCall(embedding_bag.embedding_bag, {**sharded.arguments, "groups": sharded.lowered("embedding_bag")})


def _moe(sharded: Sharded) -> LocalCall | None:
    experts = sharded.axes({EXPERTS})
    joint = {
        name for name, choice in zip(sharded.names, sharded.assignment, strict=True) if choice in sharded.op.rule.joint
    }
    limited = sharded.arguments["capacity_factor"] is not None
    tokens = sharded.axes(sharded.op.rule.results[0][0]) if limited else ()
    rows: tuple[str, ...] = ()
    if sharded.arguments["recipe"] is not None:
        every = sharded.axes({factor for dim in sharded.op.rule.results[0][:-1] for factor in dim})
        rows = tuple(name for name in every if name not in joint)
    own = {
        "expert_groups": experts,
        "dispatched": tuple(name in joint for name in experts),
        "dispatch_groups": joint_groups([name for name in experts if name in joint]),
        "inner_groups": sharded.axes({"f"}),
        "token_groups": tokens,
        "row_groups": rows,
    }
    return LocalCall(moe.moe, {**sharded.arguments, **own})


def _scales(sharded: Sharded) -> LocalCall | None:
    rule = sharded.op.rule
    *lead, depth = rule.operands[0]
    own = {
        "row_groups": sharded.axes({factor for dim in lead for factor in dim}),
        "depth_groups": sharded.axes(depth),
        "column_groups": sharded.axes(rule.results[0][-1]),
    }
    return LocalCall(composite.scaled_linear, {**sharded.arguments, **own})


# (lowering, op) -> the call; an empty name for every other op with the lowering.
_LOWERED: dict[tuple[str, str], Callable[[Sharded], LocalCall | None]] = {
    ("attention", ""): _attention,
    ("ring", ""): _ring,
    ("batch_norm", ""): _batch_norm,
    ("mean", ""): _mean,
    ("random", ""): _random,
    ("bias", ""): _bias,
    ("bias", "autopar::columns_linear"): _columns_bias,
    ("cross_entropy", ""): _cross_entropy,
    ("embedding", ""): _embedding,
    ("embedding_bag", ""): _embedding_bag,
    ("moe", ""): _moe,
    ("scaled_moe", ""): _moe,
    ("scales", ""): _scales,
}
