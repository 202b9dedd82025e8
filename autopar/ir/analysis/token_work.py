"""What a document costs by its length: work along it, and work between all pairs of its positions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.ir.graph import CapturedModel, call_nodes, is_getitem, tensor_operands
from autopar.ir.lowered.attention import is_attention
from autopar.ir.rules import rule_for


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Floating point operations forward: of a token, and of a pair of a query and a key, of all layers together."""

    token: float
    pair: float

    def of(self, length: int) -> float:
        """Those of a document that attends to itself alone."""
        return length * (self.token + length * self.pair)


def token_work(captured: CapturedModel) -> TokenWork:
    """The work of a model. A token is a position of its first input of integers."""
    tokens = next(
        (
            prod(node.meta["val"].shape)
            for node in captured.graph.nodes
            if node.name in captured.inputs and not node.meta["val"].is_floating_point()
        ),
        1,
    )
    along = between = 0.0
    for node in call_nodes(captured.graph):
        if is_getitem(node):
            continue
        flops = rule_for(node).flops
        if is_attention(node):
            q, k = (operand.meta["val"].shape for operand in tensor_operands(node)[:2])
            between += flops / (q[0] * q[-2] * k[-2])
        else:
            along += flops / tokens
    return TokenWork(along, between)
