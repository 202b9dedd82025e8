"""Which tensors move where a compiler, or a kernel written for it, computes several pointwise ops at once.

Ops that follow each other are in one kernel if both are pointwise (or views, concatenations, and reductions that the
stack fuses) and as many other ops are before both: an addition to the residual stream and the next one are not, since
products lie between them. A kernel reads each tensor that it does not make once, however many of its ops and views use
it, writes what ops outside of it use, and is launched once. Backward does the same with gradients, and makes again what
it needs of the inside.

    rotary     x1, x2 = split(x); cat(-x2, x1) * sin + x * cos      reads x, writes the result
    gate       silu(gate) * up                                      reads two tensors, writes one
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import networkx as nx
from torch import fx

from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.stacks.known import NORMS
from autopar.ir.analysis.views import is_view
from autopar.ir.graph import is_getitem, source, tensor_operands, tensor_results
from autopar.ir.ops.op_recipes import scaling_of
from autopar.ir.rules.call import call_of
from autopar.ir.rules.pointwise import RULES, is_pointwise

# Copies that a kernel of pointwise ops does while it reads or writes.
_COPIES = frozenset({"cat", "stack", "repeat", "expand", "slice", "select"})
_DROPOUT = frozenset({"dropout", "native_dropout"})


@dataclass(frozen=True, slots=True)
class Fused:
    """What of an op goes through memory: positions of operands that it reads, numbers of results that it writes.

    leads: whether the launch of the kernel is counted with this op.
    """

    read: frozenset[int]
    written: frozenset[int]
    leads: bool

    @classmethod
    def alone(cls, num_operands: int, num_results: int) -> Fused:
        """An op that is a kernel of its own."""
        return cls(frozenset(range(num_operands)), frozenset(range(num_results)), leads=True)


def merged_products(nodes: Iterable[fx.Node]) -> dict[fx.Node, Fused]:
    """Products of one tensor with several weights, as of queries, keys and values, which are one product: it reads the
    tensor once, and backward sums its gradient inside."""
    found: dict[fx.Node, Fused] = {}
    for node in _after_the_first(nodes, lambda node: None):
        every = Fused.alone(len(tensor_operands(node)), 1)
        found[node] = Fused(every.read - {0}, every.written, leads=False)
    return found


def cast_before(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Products whose input another product of the block before them needs in the same narrow floats."""
    return frozenset(_after_the_first((node for node in nodes if scaling_of(node) is not None), scaling_of))


def made_by_norm(tensor: fx.Node) -> bool:
    """Whether a norm makes a tensor, whatever views of it there are between."""
    maker = source(tensor)[0]
    while maker.op == "call_function" and is_view(maker):
        maker = source(tensor_operands(maker)[0])[0]
    return maker.op == "call_function" and op_name(maker) in NORMS


def _after_the_first(nodes: Iterable[fx.Node], kind: Callable[[fx.Node], Hashable]) -> Iterator[fx.Node]:
    """Products of a tensor that one of the same kind before them reads."""
    known: set[tuple[fx.Node, Hashable]] = set()
    for node in nodes:
        if op_name(node) in ("linear", "scaled_linear"):
            key = tensor_operands(node)[0], kind(node)
            if key in known:
                yield node
            known.add(key)


def fused_ops(nodes: Iterable[fx.Node], reductions: AbstractSet[str]) -> dict[fx.Node, Fused]:
    """The ops of a block that share a kernel with others. reductions: names of those that may, beside pointwise ops."""
    able = {}
    depth: dict[fx.Node, int] = {}
    own = list(nodes)
    for node in own:
        able[node] = _is_pointwise(node) or op_name(node) in reductions
        before = [source(operand)[0] for operand in tensor_operands(node)]
        depth[node] = max((depth[b] + (not able[b]) for b in before if b in depth), default=0)
    together: nx.Graph[fx.Node] = nx.Graph()
    for node in own:
        if able[node]:
            together.add_node(node)
            for operand in tensor_operands(node):
                maker = source(operand)[0]
                if able.get(maker) and depth[maker] == depth[node]:
                    together.add_edge(maker, node)
    found: dict[fx.Node, Fused] = {}
    for kernel in nx.connected_components(together):
        ops = [node for node in own if node in kernel]
        working = [node for node in ops if not is_view(node)]
        if len(working) > 1:
            found.update(_one_kernel(ops, working))
    return found


def _is_pointwise(node: fx.Node) -> bool:
    name = op_name(node)
    return (
        is_view(node) or name in _COPIES or name in _DROPOUT or is_pointwise(node.target) or call_of(node).name in RULES
    )


def _one_kernel(ops: list[fx.Node], working: list[fx.Node]) -> dict[fx.Node, Fused]:
    inside = set(ops)
    # Tensor made outside -> the operands that are it or a view of it, with the op and position that reads each first.
    reads: dict[tuple[fx.Node, int], dict[fx.Node, tuple[fx.Node, int]]] = {}
    for node in working:
        for position, operand in enumerate(tensor_operands(node)):
            made = source(operand)
            while made[0] in inside and is_view(made[0]):
                made = source(tensor_operands(made[0])[0])
            if made[0] not in inside:
                reads.setdefault(made, {}).setdefault(operand, (node, position))
    read: dict[fx.Node, set[int]] = {node: set() for node in ops}
    for (maker, number), operands in reads.items():
        largest = max(operands, key=_numel)
        whole = _numel(largest) >= tensor_results(maker)[number].numel()
        for operand, (node, position) in operands.items():
            if operand is largest or not whole:
                read[node].add(position)
    return {
        node: Fused(
            read=frozenset(read[node]),
            written=frozenset(
                ()
                if is_view(node)
                else (n for n in range(len(tensor_results(node))) if _is_used_outside(node, n, inside))
            ),
            leads=node is working[-1],
        )
        for node in ops
    }


def _numel(operand: fx.Node) -> int:
    return int(operand.meta["val"].numel())


def _is_used_outside(node: fx.Node, number: int, inside: set[fx.Node]) -> bool:
    """Whether an op outside of a kernel uses result ``number`` of ``node``, perhaps through views of it."""
    for user in node.users:
        if is_getitem(user):
            outside = source(user)[1] == number and _is_used_outside(user, 0, inside)
        elif user in inside:
            numbers = range(len(tensor_results(user))) if is_view(user) else ()
            outside = any(_is_used_outside(user, own, inside) for own in numbers)
        else:
            outside = True
        if outside:
            return True
    return False
