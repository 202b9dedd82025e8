"""The forward of a block as a graph of what can be kept for its backward and what can run again there.

    x ── redistribution ── x'   gathered or reduced: a tensor of its own, made by the redistribution
    x' ── op ── y               y and what only views it are one tensor
    what an op keeps that is no tensor of the graph (statistics, log probabilities) is made with its results

Backward needs some of the tensors. Each of them is kept, or made again by the op that made it, for which all that this
op reads has to be kept or made again in its turn.

Parameters, step inputs and what depends on no parameter are there for nothing. What else comes from outside the block
is kept. A loss in chunks runs once. Code of several kernels runs again with true numbers, even where nothing reads
its results. How the results of an op are kept, ``keeping`` says: not at all of an op of several
kernels, as each of them would keep what it makes; of experts those of the products and all-to-alls inside, from which
the rest is computed again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from autopar.ir.analysis.matrix_products import is_product
from autopar.ir.analysis.views import is_view, storage_of
from autopar.ir.graph import is_getitem, source, tensor_operands, tensor_results
from autopar.ir.lowered.attention import is_attention
from autopar.ir.lowered.random import is_random
from autopar.ir.rules.saved import Saved, saved_for_backward
from autopar.ir.torch_private import OpOverload

Tensor = Hashable
Op = Hashable

# The numbers of what an op makes beside its results: what it keeps that is no tensor, and products inside it.
BESIDE, INSIDE = -1, -2

_OPERAND = re.compile(r"(.+)\(([0-9]{1,6})\)")

# Ops that are a single kernel, beside views: by tag, and by name where ATen composes them.
_ONE_KERNEL = frozenset(
    {torch.Tag.core, torch.Tag.pointwise, "contiguous", "group_norm", "layer_norm", "log_softmax", "softmax", "to"}
)


def operand_name(key: str, position: int) -> str:
    """The name that a plan has for an operand of an op, as the op reads it after a redistribution."""
    return f"{key}({position})"


def op_and_operand(name: str) -> tuple[str, int | None]:
    """The key of the op that a name of a plan is of, and the number of its operand, None of its results."""
    found = _OPERAND.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


class Keeping(Enum):
    """How the results of an op are kept: all that its kernel makes, the results of products and attentions (and their
    collectives) alone, those inside the op, or not."""

    KERNEL = "kernel"
    PRODUCT = "product"
    INSIDE = "inside"
    NEVER = "never"

    @property
    def is_kept(self) -> bool:
        """Whether the results are kept."""
        return self in (Keeping.KERNEL, Keeping.PRODUCT)

    @property
    def is_whole(self) -> bool:
        """Whether everything is kept that the op makes."""
        return self is Keeping.KERNEL


def keeping(node: fx.Node, saved: Saved, *, lowered: bool) -> Keeping:
    """How the results of an op are kept. lowered: it runs as another one, with collectives inside."""
    if is_product(node.target) or is_attention(node):
        return Keeping.PRODUCT
    if saved.product_bytes or saved.dispatched_bytes:
        return Keeping.INSIDE
    if lowered or is_random(node) or not isinstance(node.target, OpOverload):
        return Keeping.NEVER
    single = not _ONE_KERNEL.isdisjoint((*node.target.tags, node.target.overloadpacket.__name__))
    return Keeping.KERNEL if single else Keeping.NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp:
    """once: it may not run again."""

    reads: frozenset[Tensor]
    makes: frozenset[Tensor]
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """needed: the tensors that backward reads. unkept: those that can only be made again. outside: those that no op of
    the block makes, and that are kept. names: of each tensor that can be kept, as a plan lists them. keeping:
    how the results of an op of the model are kept."""

    ops: Mapping[Op, ForwardOp]
    needed: frozenset[Tensor]
    unkept: frozenset[Tensor] = frozenset()
    outside: frozenset[Tensor] = frozenset()
    names: Mapping[Tensor, Sequence[str]] = field(default_factory=dict)
    keeping: Mapping[Op, Keeping] = field(default_factory=dict)

    def named(self, listed: Container[str]) -> frozenset[Tensor]:
        """The tensors that a plan keeps which lists these names."""
        return frozenset(tensor for tensor, names in self.names.items() if any(name in listed for name in names))

    @property
    def makers(self) -> dict[Tensor, Op]:
        """The op that makes each tensor."""
        return {tensor: name for name, op in self.ops.items() for tensor in op.makes}

    def recomputed(self, kept: Container[Tensor]) -> frozenset[Op]:
        """The ops that run again where no more than ``kept`` is kept, and ``outside``."""
        makers = self.makers
        found: set[Op] = set()
        wanted = list(self.needed)
        while wanted:
            tensor = wanted.pop()
            name = makers.get(tensor)
            if name is None or name in found or (tensor in kept and tensor not in self.unkept) or self.ops[name].once:
                continue
            found.add(name)
            wanted += self.ops[name].reads
        return frozenset(found)

    def held(self, recomputed: Container[Op]) -> frozenset[Tensor]:
        """What is kept where ``recomputed`` run again: all that backward or one of them reads and none of them makes.
        An op that is kept keeps all that it makes."""
        makers = self.makers
        read = self.needed.union(self.outside, *(op.reads for name, op in self.ops.items() if name in recomputed))
        kept = {makers[tensor] for tensor in read if tensor in makers}
        made = (self.ops[name].makes for name in kept if name not in recomputed)
        return frozenset(tensor for tensor in read if tensor not in makers).union(*made)


class ForwardBuilder(ABC):
    """Builds the graph of a block from its ops."""

    def __init__(
        self,
        key: Mapping[fx.Node, str],
        *,
        differentiable: Container[fx.Node],
        free: Container[fx.Node],
        once: Container[fx.Node],
    ) -> None:
        """key: of each op in a plan. differentiable: what has a gradient. free: ops whose results are there for
        nothing. once: ops that run once."""
        self.ops: dict[Op, ForwardOp] = {}
        self.needed: set[Tensor] = set()
        self.unkept: set[Tensor] = set()
        self.outside: set[Tensor] = set()
        self._key, self._differentiable, self._free, self._once = key, differentiable, free, once
        self._names: dict[Tensor, list[str]] = {}
        self._keeping: dict[Op, Keeping] = {}
        self._lies: dict[tuple[fx.Node, int], Tensor | None] = {}
        """Result of an op -> the tensor that its memory is; None of what is there for nothing."""

    def graph(self, nodes: Iterable[fx.Node]) -> ForwardGraph:
        """The graph of the ops ``nodes``, in order."""
        for node in nodes:
            if not is_getitem(node):
                self._add(node)
        return ForwardGraph(
            ops=self.ops,
            needed=frozenset(self.needed | self.outside),
            unkept=frozenset(self.unkept),
            outside=frozenset(self.outside),
            names=self._names,
            keeping=self._keeping,
        )

    @abstractmethod
    def is_lowered(self, node: fx.Node) -> bool:
        """Whether an op runs as another one, with collectives inside."""

    @abstractmethod
    def redistributed(self, node: fx.Node, position: int, made: Tensor) -> Tensor:
        """The tensor that ``node`` reads as operand ``position``, which lies in ``made``. Adds what makes it."""

    @abstractmethod
    def arriving(self, node: fx.Node, position: int) -> Tensor:
        """The tensor that comes from outside the block for ``node`` to read, as it comes."""

    def _add(self, node: fx.Node) -> None:
        reads = [self._read(node, position, operand) for position, operand in enumerate(tensor_operands(node))]
        results = [(node, number) for number in range(len(tensor_results(node)))]
        if is_view(node):
            self._lies.update((result, reads[0]) for result in results)
            return
        self._lies.update((result, result) for result in results)
        read, made = frozenset(tensor for tensor in reads if tensor is not None), set[Tensor](results)
        if node in self._once:
            self.ops[node] = ForwardOp(reads=read, makes=frozenset(made), once=True)
            return
        saved = saved_for_backward(node, self._differentiable.__contains__)
        needs = [reads[position] for position in saved.operands]
        needs += [results[position] for position in saved.results if position < len(results)]
        if saved.extra_bytes:
            made.add((node, BESIDE))
            needs.append((node, BESIDE))
        how = self._keeping[node] = keeping(node, saved, lowered=self.is_lowered(node))
        if not (how.is_kept and isinstance(node.target, OpOverload)):
            # Its own code runs again, whether or not anything is read of it: with true numbers.
            needs += [*reads, *(made if not how.is_kept else ())]
        self.needed.update(tensor for tensor in needs if tensor is not None)
        named = made if how.is_kept else set[Tensor]()
        if not how.is_kept:
            self.unkept |= made
        if how is Keeping.INSIDE:
            named = {(node, INSIDE)}
            self.ops[node, INSIDE] = ForwardOp(reads=read, makes=frozenset(named))
            read |= named
        self.ops[node] = ForwardOp(reads=read, makes=frozenset(made))
        self._names.update((tensor, [self._key[node]]) for tensor in named)

    def _read(self, node: fx.Node, position: int, operand: fx.Node) -> Tensor | None:
        made = source(operand)
        maker = storage_of(operand)[0]
        if maker.op != "call_function" or maker in self._free:
            return None
        if made not in self._lies:
            self._lies[made] = tensor = self.arriving(node, position)
            self.outside.add(tensor)
        lies = self._lies[made]
        if lies is None:
            return None
        found = self.redistributed(node, position, lies)
        if found != lies:
            self._names.setdefault(found, []).append(operand_name(self._key[node], position))
        return found
