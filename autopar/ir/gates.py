"""The gate of an expert, between its two products: an expression over gate and value.

    mul(silu(gate), value)
    mul(add(clamp(value, -7.0, 7.0), 1), mul(clamp(gate, None, 7.0), sigmoid(mul(clamp(gate, None, 7.0), 1.702))))

Functions are those of ``torch.ops.aten`` that work element by element. Experts without a gate have ``gate`` alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

GATE, VALUE = "gate", "value"

_Evaluate = Callable[[Mapping[str, Tensor]], Any]


@lru_cache(maxsize=256)
def gate_function(expression: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The function of ``{"gate": .., "value": ..}`` that an expression names."""
    return _compiled(ast.parse(expression, mode="eval").body)


def expression_of(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """An expression from a function's name and its arguments: strings are expressions, all else is written out.

    options: keyword arguments, constants.
    """
    words = [argument if isinstance(argument, str) else repr(argument) for argument in arguments]
    words += [f"{key}={value!r}" for key, value in options.items()]
    return f"{name}({', '.join(words)})"


@lru_cache(maxsize=256)
def functions_of(expression: str) -> tuple[str, ...]:
    """Names of the functions that an expression takes of elements, each as often as it does; of a name, that name."""
    calls = [node.func for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Call)]
    return tuple(name.id for name in calls if isinstance(name, ast.Name)) or (expression,)


def _compiled(tree: ast.expr) -> _Evaluate:
    if isinstance(tree, ast.Name):
        name = tree.id
        return lambda values: values[name]
    if isinstance(tree, ast.Call):
        assert isinstance(tree.func, ast.Name)
        function = getattr(torch.ops.aten, tree.func.id)
        arguments = [_compiled(argument) for argument in tree.args]
        options = {word.arg or "": ast.literal_eval(word.value) for word in tree.keywords}
        return lambda values: function(*(argument(values) for argument in arguments), **options)
    constant = ast.literal_eval(tree)
    return lambda values: constant
