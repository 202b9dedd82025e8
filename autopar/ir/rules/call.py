"""The structural signature of an op: all that its rule may depend on.

Two nodes with equal signatures have equal rules, so rules are cached by signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import is_tensor
from autopar.ir.precision import compute_dtype
from autopar.ir.torch_private import OpOverload, overload_of, schema_of

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand: its position in ``graph.tensor_operands``, global shape and dtype."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor result: global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One op with its arguments. Lists are tuples and tensors ``Operand`` in ``args`` and ``kwargs``.

    Arguments that are nodes without a tensor value (symbolic sizes) are not described: ``opaque`` is set.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Result, ...]
    opaque: bool = False

    @property
    def name(self) -> str:
        """Namespace and name of the op, such as ``aten::add``."""
        return op_name(self.target)

    @property
    def overload(self) -> str:
        """Overload of an ATen op, such as ``Tensor``; empty for other callables."""
        return overload_of(self.target) if isinstance(self.target, OpOverload) else ""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All tensor operands, in the order of ``graph.tensor_operands``."""
        return tuple(_operands((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all operands, then of all results."""
        return [*(operand.shape for operand in self.operands), *(result.shape for result in self.results)]

    def bound(self) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        bound = {
            name: self.args[number] if number < len(self.args) else default
            for number, (name, default) in enumerate(parameters(self.target))
        }
        bound.update(self.kwargs)
        return bound


def call_of(node: fx.Node, precision: str = "fp32") -> Call:
    """The signature of a ``call_function`` node, from the shapes in ``meta["val"]`` and the dtypes of compute."""
    encoder = _Encoder(precision)
    args = tuple(encoder.encode(a) for a in node.args)
    kwargs = tuple((name, encoder.encode(value)) for name, value in node.kwargs.items())
    results = tuple(Result(tuple(t.shape), compute_dtype(t.dtype, precision)) for t in _tensors(node.meta.get("val")))
    return Call(node.target, args, kwargs, results, encoder.opaque)


@dataclass(slots=True)
class _Encoder:
    precision: str
    count: int = 0
    opaque: bool = False

    def encode(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if not is_tensor(value):
                self.opaque = True
                return None
            val = value.meta["val"]
            operand = Operand(self.count, tuple(val.shape), compute_dtype(val.dtype, self.precision))
            self.count += 1
            return operand
        if isinstance(value, (list, tuple)):
            return tuple(self.encode(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self.encode(item)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", self.encode(value.start), self.encode(value.stop), self.encode(value.step))
        return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _operands(item)


@cache
def op_name(target: Callable[..., Any]) -> str:
    """``aten::linear`` for an ATen op, ``autopar::attention`` for a composite op."""
    if isinstance(target, OpOverload):
        return str(schema_of(target).name)
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    return f"autopar::{name}" if module == "autopar.ir.ops.composite" else f"{module}::{name}"


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def parameters(target: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an op's parameters; the default is ``REQUIRED`` where there is none."""
    if isinstance(target, OpOverload):
        return tuple(
            (a.name, _hashable(a.default_value) if a.has_default_value() else REQUIRED)
            for a in schema_of(target).arguments
        )
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # builtins have none
        return ()
    return tuple((p.name, p.default) for p in signature.parameters.values())
