"""The capture of another batch and other lengths, from one whose sizes are symbols: nothing is traced again.

captured, batch 8, length 16                   captured_at(captured, {"batch": 2, "length": 100})
view(x, [8, 16, 4, 64])                        view(x, [2, 100, 4, 64])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from autopar.ir.building import fake_call, fake_mode_of
from autopar.ir.capture.simplify import simplify
from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel, module_of
from autopar.ir.sizes import Point, at, evaluated, moved_to
from autopar.ir.torch_private import FakeTensorMode, pytree
from autopar.ir.torch_private_symbols import expression_of_symbol


def captured_at(captured: CapturedModel, sizes: Mapping[str, int], *, keep_symbols: bool = False) -> CapturedModel:
    """The capture with other ``sizes``, by name of their symbols; those left out keep their sizes.

    keep_symbols: its integers still know their expressions; else they are plain ones, and there are no symbols.

    Raises CaptureError if the capture holds for its own sizes alone, or has no such symbol.
    """
    unknown = sizes.keys() - captured.symbols.keys()
    if unknown:
        fixed = sorted(unknown & captured.fixed.keys())
        lines = "".join(f"\n  {name} is of one size: {captured.fixed[name]}" for name in fixed)
        raise CaptureError(
            f"{captured.name} is captured for one size of {sorted(unknown)}; what may change is "
            f"{sorted(captured.symbols)}.{lines}\n  try: a capture at that size, or tensor.size(dim) in place of "
            "what makes a number of it, as len(tensor)"
        )
    values = {**sizes_of_inputs(captured), **sizes}
    point = {symbol: values[name] for name, symbol in captured.symbols.items()}
    graph, copied, memo = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, Any]()
    mode = fake_mode_of(captured.graph)
    for node in captured.graph.nodes:
        new = copied[node] = graph.node_copy(node, lambda operand: copied[operand])
        if node.op == "output":
            continue
        moved = partial(moved_to if keep_symbols else at, point=point)
        new.args, new.kwargs = pytree.tree_map(moved, (new.args, new.kwargs))
        symbolic = new.meta.get("symbolic")
        if not keep_symbols:
            new.meta.pop("symbolic", None)
        if node.op == "call_function":
            new.meta["val"] = _value(new, mode, memo)
            _check(captured, node, new.meta["val"], point)
        elif symbolic is not None:
            new.meta["val"] = node.meta["val"].new_empty([_size(size, point) for size in symbolic.shape])
    batch = values.get(BATCH, captured.batch_size)
    if keep_symbols:
        return replace(captured, graph_module=module_of(graph), batch_size=batch)
    # What differs in a symbol alone may be the same now.
    trained = {n for n in graph.nodes if n.name in captured.parameters and captured.parameters[n.name].requires_grad}
    simplify(graph, differentiable=trained)
    return replace(captured, graph_module=module_of(graph), batch_size=batch, symbols={})


def holds_at(symbolic: CapturedModel, sizes: Mapping[str, int], expected: CapturedModel) -> bool:
    """Whether a capture with symbols gives at ``sizes`` the program of ``expected``, which was captured there."""
    try:
        return same_program(captured_at(symbolic, sizes), expected)
    except CaptureError:
        return False


def same_program(a: CapturedModel, b: CapturedModel) -> bool:
    """Whether two captures run the same ops on the same shapes with the same numbers, in the same order."""
    return described_program(a) == described_program(b)


def described_program(captured: CapturedModel) -> list[Any]:
    """All that the ops of a capture do, in plain values that another process can be sent."""
    graph = captured.graph
    number = {node: place for place, node in enumerate(graph.nodes)}
    described = []
    for node in graph.nodes:
        given, spec = pytree.tree_flatten((node.args, node.kwargs))
        made = pytree.tree_leaves(node.meta.get("val"))
        described.append(
            (
                node.op,
                str(node.target) if node.op == "call_function" else "",
                str(spec),
                [("operand", number[leaf]) if isinstance(leaf, fx.Node) else (type(leaf), leaf) for leaf in given],
                [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in made],
            )
        )
    return described


def sizes_of_inputs(captured: CapturedModel) -> dict[str, int]:
    """The size that each symbol stands for in a capture."""
    names = {symbol: name for name, symbol in captured.symbols.items()}
    found: dict[str, int] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and "symbolic" in node.meta:
            for size, symbol in zip(node.meta["val"].shape, node.meta["symbolic"].shape, strict=True):
                name = names.get(expression_of_symbol(symbol))
                if name is not None:
                    found[name] = size
    return found


def _size(size: Any, point: Point) -> int:
    return int(evaluated(expression_of_symbol(size), tuple(point.items())))


def _value(node: fx.Node, mode: FakeTensorMode, memo: dict[Any, Any]) -> Any:
    """The fake result of an op; of one that was seen before on the same shapes, that."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    key = (node.target, spec, tuple(map(_described, leaves)))
    if key not in memo:
        memo[key] = fake_call(node.target, node.args, node.kwargs, mode)  # type: ignore[arg-type]  # an op
    return memo[key]


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return type(leaf), leaf
    values, spec = pytree.tree_flatten(leaf.meta["val"])
    tensors = (
        (tuple(v.shape), v.stride(), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values
    )
    return spec, tuple(tensors)


def _check(captured: CapturedModel, node: fx.Node, value: Any, point: Point) -> None:
    """Raise CaptureError where an op does not make at other sizes what its symbols say."""
    symbolic = node.meta.get("symbolic")
    expected = node.meta["val"] if symbolic is None else symbolic
    for got, wanted in zip(pytree.tree_leaves(value), pytree.tree_leaves(expected), strict=True):
        if isinstance(got, torch.Tensor) and [_size(size, point) for size in wanted.shape] != list(got.shape):
            names = {symbol: sympy.Symbol(name) for name, symbol in captured.symbols.items()}
            shape = [expression_of_symbol(size).xreplace(names) for size in wanted.shape]
            raise CaptureError(
                f"{captured.name} is captured at one size: {node.target} makes {tuple(got.shape)} of other sizes, "
                f"where the capture has {tuple(shape)}.\n  at {node.meta.get('source', 'no source')}\n"
                "  try: a capture at that size"
            )
