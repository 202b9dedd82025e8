"""Value numbering of the captured program: which tensors of it are the same, whatever rank or stage computes them.

    mul = mul(x, cos)                       a term: the op ``mul`` of the terms of x and cos
    mul_1 = mul(x, cos)                     the same term
    dropout_1 = dropout(x, 0.1)             another one at each call, since it draws anew

A value of a local program stands for one of these terms, the *global tensor*, of which a rank holds a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import CapturedModel, is_getitem, is_tensor
from autopar.ir.rule import FactorRule
from autopar.ir.rules import rule_for
from autopar.ir.rules.call import REQUIRED, parameters
from autopar.ir.sizes import plain

# Where a value is in the arguments of a call: the name of the parameter, then indices into lists.
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One global tensor of the captured program, or a plain value of it (``shape`` and ``dtype`` are None).

    node: the first captured node that computes it. Terms are interned: equal ones are one object.
    """

    node: fx.Node
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None

    @property
    def carries_gradient(self) -> bool:
        """Whether its dtype is of real or complex numbers."""
        return self.dtype is not None and (self.dtype.is_floating_point or self.dtype.is_complex)

    def __str__(self) -> str:
        return self.node.name


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of operand ``position`` of a captured op, in the order of its rule, in the arguments of a call."""

    position: int


@dataclass(frozen=True, slots=True, eq=False)
class CapturedOp:
    """A captured op on terms.

    arguments: parameter -> value, defaults filled in; operands are ``Slot``. operands: terms, the tensors first in the
        order of the rule, then plain values. results: terms, one of each item that the op returns.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    operands: tuple[Term, ...]
    num_tensors: int
    results: tuple[Term, ...]
    rule: FactorRule
    draws: bool

    @property
    def tensor_results(self) -> tuple[Term, ...]:
        """The results that the rule speaks of."""
        return tuple(term for term in self.results if term.shape is not None)


@dataclass(slots=True)
class Terms:
    """The captured program, numbered. of: node -> term. using: terms of the operands of an op -> ops of them."""

    of: dict[fx.Node, Term] = field(default_factory=dict)
    using: dict[frozenset[Term], list[CapturedOp]] = field(default_factory=dict)

    @classmethod
    def number(cls, captured: CapturedModel) -> Terms:
        """Number every value. Linear in the graph."""
        terms = cls()
        known: dict[Any, CapturedOp] = {}
        made: dict[fx.Node, CapturedOp] = {}
        draws: dict[Any, int] = {}
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                terms.of[node] = _term(node, node.meta.get("val"))
            elif is_getitem(node):
                terms.of[node] = made[node.args[0]].results[node.args[1]]
            elif node.op == "call_function":
                made[node] = terms._op(node, known, draws)
                terms.of[node] = made[node].results[0]
        return terms

    def _op(self, node: fx.Node, known: dict[Any, CapturedOp], draws: dict[Any, int]) -> CapturedOp:
        """The op of a call, a known one if it is the same on the same terms."""
        rule = rule_for(node)
        bound, operands = _slotted(node)
        operand_terms = tuple(self.of[operand] for operand in operands)
        key: Any = (node.target, operand_terms, frozenset(flatten(bound).items()))
        if "*" in rule.lowered:
            draws[key] = draws.get(key, -1) + 1
            key = (key, draws[key])
        if key not in known:
            value = node.meta.get("val")
            known[key] = CapturedOp(
                node=node,
                arguments=bound,
                operands=operand_terms,
                num_tensors=sum(map(is_tensor, operands)),
                results=tuple(_term(node, item) for item in (value if isinstance(value, (tuple, list)) else (value,))),
                rule=rule,
                draws="*" in rule.lowered,
            )
            self.using.setdefault(frozenset(operand_terms), []).append(known[key])
        return known[key]


def _term(node: fx.Node, value: Any) -> Term:
    if isinstance(value, torch.Tensor):
        return Term(node, tuple(value.shape), value.dtype)
    return Term(node, None, None)


def _slotted(node: fx.Node) -> tuple[dict[str, Any], list[fx.Node]]:
    """The arguments of a call with slots for its operands, and these: tensors first, as the rule counts them."""
    found: list[fx.Node] = []
    _collect((*node.args, *node.kwargs.values()), found)
    order = sorted(range(len(found)), key=lambda number: not is_tensor(found[number]))
    position = {number: Slot(place) for place, number in enumerate(order)}
    counter = iter(range(len(found)))

    def replace(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return position[next(counter)]
        if isinstance(value, (tuple, list)):
            return [replace(item) for item in value]
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        return value

    args = replace(node.args)
    kwargs = replace(dict(node.kwargs))
    return bind(node.target, args, kwargs), [found[number] for number in order]


def _collect(values: Iterable[Any], found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def bind(target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by parameter, defaults filled in; those beyond the parameters by their number."""
    known = parameters(target)
    bound: dict[str, Any] = {name: default for name, default in known if default is not REQUIRED}
    for number, value in enumerate(args):
        bound[known[number][0] if number < len(known) else str(number)] = value
    bound.update(kwargs)
    return bound


def flatten(bound: Mapping[str, Any]) -> dict[Path, Any]:
    """Every leaf of bound arguments by its path: nodes and slots as they are, constants in a form to compare."""
    flat: dict[Path, Any] = {}
    for name, value in bound.items():
        _flatten((name,), value, flat)
    return flat


def _flatten(path: Path, value: Any, flat: dict[Path, Any]) -> None:
    if isinstance(value, (fx.Node, Slot)):
        flat[path] = value
    elif isinstance(value, (tuple, list)):
        flat[path] = ("list", len(value))
        for number, item in enumerate(value):
            _flatten((*path, number), item, flat)
    elif isinstance(value, dict):
        flat[path] = ("dict", tuple(value))
        for key, item in value.items():
            _flatten((*path, key), item, flat)
    elif value is None or isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) or callable(value):
        flat[path] = value
    else:  # 1, 1.0 and True are equal, and no number is not equal to itself
        flat[path] = (type(plain(value)).__name__, str(value))
