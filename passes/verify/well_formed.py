"""Checks that a captured model is well formed, after the passes and, to find the one at fault, after each.

Each op is run again on the fake values of its operands: the result must have the shapes and dtypes that its
``meta["val"]`` claims. Ops that look alike (80 equal layers) are run once, and those that no pass has touched since the
last check are not looked at again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.building import fake_call, fake_mode_of
from autopar.ir.graph import CapturedModel
from autopar.ir.torch_private import pytree


@dataclass(slots=True)
class Memo:
    """Results of earlier checks, handed from one check to the next.

    results: signatures of ops -> shapes and dtypes of their results. seen: ops that were right, with all that this
    depends on.
    """

    results: dict[Any, Any] = field(default_factory=dict)
    seen: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)

    def has_seen(self, node: fx.Node) -> bool:
        """Whether ``node`` was right and is as it was."""
        known = self.seen.get(node)
        now = _state_of(node)
        return known is not None and len(known) == len(now) and all(a is b for a, b in zip(known, now, strict=True))

    def add(self, node: fx.Node) -> None:
        """Record that ``node`` was right as it is."""
        self.seen[node] = _state_of(node)


def _state_of(node: fx.Node) -> tuple[Any, ...]:
    return (node.target, node.args, node.kwargs, node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes))


def verify(captured: CapturedModel, *, after: str = "capture", memo: Memo | None = None) -> None:
    """Raise AssertionError, naming the pass and the node, if the graph is not well formed.

    memo: what earlier checks found out about ops; filled by this one.
    """
    graph = captured.graph
    try:
        graph.lint()
    except RuntimeError as error:
        raise AssertionError(f"after {after}: {error}") from error
    known = {*captured.parameters, *captured.buffers, *captured.inputs, *captured.constants}
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    assert set(names) == known, f"after {after}: placeholders {sorted(set(names) ^ known)} are not accounted for"
    memo = Memo() if memo is None else memo
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node.op != "call_function":
            assert node.op in ("placeholder", "output"), f"after {after}: {node.op} {node.name} is not allowed"
            continue
        assert "val" in node.meta, f"after {after}: {node.format_node()} has no value"
        if memo.has_seen(node):
            continue
        signature = (node.target, signature_of(node.args), signature_of(node.kwargs))
        claimed = summary_of(node.meta["val"])
        found = memo.results.get(signature)
        if found is None:
            found = memo.results[signature] = summary_of(fake_call(node.target, node.args, node.kwargs, mode))
        where = node.meta.get("source")
        assert found == claimed, (
            f"after {after}: {node.format_node()}\n  gives {found}, its meta says {claimed}\n  at {where}"
        )
        memo.add(node)
    _verify_outputs(captured, after)


def _verify_outputs(captured: CapturedModel, after: str) -> None:
    outputs = captured.output_args()
    updated = [b.updated_by for b in captured.buffers.values() if b.updated_by is not None]
    expected = captured.has_loss + captured.num_outputs + len(updated)
    assert len(outputs) == expected, f"after {after}: {len(outputs)} outputs, expected {expected}"
    tail = outputs[len(outputs) - len(updated) :]
    found = [value.name if isinstance(value, fx.Node) else None for value in tail]
    assert found == updated, f"after {after}: buffers are updated by {updated}, the graph returns {found}"
    loss = captured.loss_node()
    assert loss is None or loss.meta["val"].numel() == 1, f"after {after}: the loss is not a scalar"


def signature_of(argument: Any) -> Any:
    """Shapes and dtypes of the tensors in an argument of an op, and its other values, as one hashable value."""
    if isinstance(argument, fx.Node):
        return _operand(argument.meta["val"])
    if isinstance(argument, (list, tuple)):
        return tuple(signature_of(a) for a in argument)
    if isinstance(argument, dict):
        return tuple((k, signature_of(v)) for k, v in argument.items())
    return (type(argument), str(argument))


def _operand(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_operand(v) for v in value)
    return value


def summary_of(value: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of the tensors of a result."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(value)
    )
