"""Recurrent layers: one op for all layers, directions and steps.

lstm   b _t i, _l b h, _l b h, n i, n h, .. -> b _t h, _l b h, _l b h

Samples are independent of each other. Steps follow from each other, and every unit of a step from all units of the one
before, so that neither is divided. A packed sequence has its samples one step behind the other in one dimension: the op
is repeated on every rank.

The work is two products for each layer and direction, of all steps with the input weights and, step after step, with
the recurrent ones; a projected LSTM has a third one.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand, op_name
from autopar.ir.rules.factors import Factors, Rule, numel, replicated_rule, table

BATCH = "b"
STEPS = "t"


class Matrix(NamedTuple):
    """A weight matrix of a recurrent layer: its position among the operands, and whether it is applied step by step."""

    position: int
    stepwise: bool


def matrices(call: Call) -> list[Matrix]:
    """The weight matrices of a layer (``params``: for each layer and direction those of input and state, biases, and of
    a projection) or of a single step."""
    bound = call.bound()
    if "params" not in bound:
        return [Matrix(bound["w_ih"].position, False), Matrix(bound["w_hh"].position, True)]
    params: tuple[Operand, ...] = bound["params"]
    num_layers = bound["num_layers"] * (2 if bound["bidirectional"] else 1)
    each = len(params) // num_layers
    return [
        Matrix(operand.position, number % each > 0) for number, operand in enumerate(params) if len(operand.shape) == 2
    ]


def num_steps(call: Call) -> int:
    """Steps of a layer's sequence. Of a packed one: of its longest sample."""
    bound = call.bound()
    if "params" not in bound:
        return 1
    if call.overload == "data":
        return int(bound["batch_sizes"].shape[0])
    return int(bound["input"].shape[1 if bound["batch_first"] else 0])


def layers(call: Call) -> FactorRule | None:
    """``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` on a padded batch or on a packed one."""
    bound = call.bound()
    packed = call.overload == "data"
    x: Operand = bound["data" if packed else "input"]
    flops = 2.0 * numel(x.shape[:-1]) * _weights(call)
    if packed:
        rule = replicated_rule(call)
        return Factors(dict(rule.sizes), set(rule.blocked)).rule(rule.operands, rule.results, flops=flops)
    factors = Factors()
    batch_dim = 0 if bound["batch_first"] else 1
    b = factors.dim(BATCH, x.shape[batch_dim])
    t = factors.dim(STEPS, x.shape[1 - batch_dim], block=True)
    lead = (b, t) if batch_dim == 0 else (t, b)
    i = factors.dim("i", x.shape[-1], block=True)

    def state(shape: tuple[int, ...]) -> TensorFactors:
        return (factors.fresh(shape[0]), b, factors.fresh(shape[2]))

    hx = bound["hx"]
    known: dict[int, TensorFactors] = {x.position: (*lead, i)}
    known |= {o.position: state(o.shape) for o in (hx if isinstance(hx, tuple) else (hx,))}
    first = matrices(call)[0].position
    operands = [
        known[o.position]
        if o.position in known
        else (factors.fresh(o.shape[0]), i)
        if o.position == first
        else factors.whole(o.shape)
        for o in call.operands
    ]
    out, *states = call.results
    random = bool(bound["train"] and bound["dropout"] > 0 and bound["num_layers"] > 1)
    return factors.rule(
        operands,
        [(*lead, factors.fresh(out.shape[-1])), *(state(r.shape) for r in states)],
        lowered={"*": "random"} if random else None,
        flops=flops,
    )


def cell(call: Call) -> FactorRule | None:
    """One step: ``lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell`` on rows of a batch."""
    bound = call.bound()
    x: Operand = bound["input"]
    if len(x.shape) != 2:
        return None
    factors = Factors()
    b, i = factors.dim(BATCH, x.shape[0]), factors.dim("i", x.shape[1], block=True)
    weight: Operand = bound["w_ih"]
    hx = bound["hx"]
    states = {o.position for o in (hx if isinstance(hx, tuple) else (hx,))}

    def describe(operand: Operand) -> TensorFactors:
        if operand.position == x.position:
            return (b, i)
        if operand.position in states:
            return (b, factors.fresh(operand.shape[1]))
        return (
            (factors.fresh(operand.shape[0]), i)
            if operand.position == weight.position
            else factors.whole(operand.shape)
        )

    return factors.rule(
        [describe(o) for o in call.operands],
        [(b, factors.fresh(r.shape[1])) for r in call.results],
        flops=2.0 * x.shape[0] * _weights(call),
    )


def _weights(call: Call) -> float:
    """Elements of all weight matrices."""
    of = {matrix.position for matrix in matrices(call)}
    return sum(numel(operand.shape) for operand in call.operands if operand.position in of)


RULES: dict[str, Rule] = table(layers, "lstm gru rnn_tanh rnn_relu") | table(
    cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)


def is_recurrent(node: fx.Node) -> bool:
    """Whether an op is a recurrent layer or a step of one."""
    return op_name(node.target) in RULES  # type: ignore[arg-type]  # call_function targets are callable
