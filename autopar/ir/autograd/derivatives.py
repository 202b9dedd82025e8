"""``torch.autograd.grad`` inside forward, as the plain ops of the derivative.

    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)

    in the trace:  derivative((sum,), (x,), ())          one node for the call
    afterwards:    x' , .. -> out' -> sum' -> slope      the ops between x and the sum once more, with their derivative

The derivative is traced below autograd from the functional graph, so that gradients of higher order flow through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.autograd.plain import traced
from autopar.ir.autograd.recording import current_recording
from autopar.ir.autograd.trial import apart, is_apart
from autopar.ir.errors import CaptureError
from autopar.ir.graph import call_nodes
from autopar.ir.op_graph import between, op_graph
from autopar.ir.source import user_line

aten = torch.ops.aten

_gradients: Callable[..., tuple[Any, ...]] = torch.autograd.grad


@torch.library.custom_op("autopar::derivative", mutates_args=())
def _derivative(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], create: bool
) -> list[Tensor]:
    raise AssertionError("this op stands for a derivative in a trace and is never run")


@_derivative.register_fake
def _(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], create: bool) -> list[Tensor]:
    return [torch.empty_like(t) for t in inputs]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.given = [[(t.shape, t.dtype, t.requires_grad) for t in tensors] for tensors in inputs[:3]]


def _zeros(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    made = [[torch.zeros(s, dtype=d) if needs else None for s, d, needs in tensors] for tensors in ctx.given]
    return (*made, None)


# A trace asks whether a tensor has a gradient, and never for its values.
_derivative.register_autograd(_zeros, setup_context=_remember)

DERIVATIVE = torch.ops.autopar.derivative.default


def recorded_gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """In place of ``torch.autograd.grad`` while a model is traced."""
    if is_apart():
        return _gradients(
            outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched,
            materialize_grads,
        )  # fmt: skip
    if is_grads_batched:
        raise CaptureError(
            "the model cannot be captured: torch.autograd.grad(is_grads_batched=True) is in forward.\n"
            f"  at {user_line()}\n  try: torch.func.vjp under torch.vmap"
        )
    ends, starts = _tuple(outputs), _tuple(inputs)
    grads = _tuple(grad_outputs) if grad_outputs is not None else (None,) * len(ends)
    with apart():
        # Which of them there are, and torch's own errors.
        found = _gradients(ends, starts, grads, retain_graph=True, allow_unused=allow_unused or materialize_grads)
    present = [start for start, grad in zip(starts, found, strict=True) if grad is not None]
    current_recording().differentiates |= create_graph
    own = [torch.ones(e.shape, dtype=e.dtype) if g is None else g for e, g in zip(ends, grads, strict=True)]
    made = DERIVATIVE(ends, present, own, create_graph) if present else []
    supply = iter(made if create_graph else [grad.detach() for grad in made])
    results = [None if grad is None else next(supply) for grad in found]
    if materialize_grads:
        return tuple(torch.zeros_like(s) if r is None else r for s, r in zip(starts, results, strict=True))
    return tuple(results)


def _tuple(values: Any) -> tuple[Any, ...]:
    if isinstance(values, Tensor):
        return (values,)
    for value in values:
        if value is not None and not isinstance(value, Tensor):
            raise CaptureError(
                "the model cannot be captured: torch.autograd.grad in forward is given what is no tensor.\n"
                f"  at {user_line()}\n  try: tensors"
            )
    return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """A derivative in a functional graph: nodes of the outputs, of the inputs, and of the gradients of the outputs."""

    outputs: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    grads: Sequence[fx.Node]
    create: bool
    refuse: Callable[[str, str], CaptureError]

    def emit(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], fx.Node]) -> list[Any]:
        """Add its ops by ``call``; one node for each input."""
        between = self._between()
        self._check(between)
        inside = set(between)
        operands = [operand for node in between for operand in node.all_input_nodes if operand not in inside]
        boundary = list(dict.fromkeys((*self.inputs, *operands, *self.outputs, *self.grads)))
        boundary = [node for node in boundary if node not in inside]
        module = self._traced(between, boundary)
        values: dict[fx.Node, Any] = dict(zip(_placeholders(module.graph), boundary, strict=True))
        result: Any = None
        for node in module.graph.nodes:
            if node.op == "output":
                result = fx.node.map_arg(node.args[0], lambda n: values[n])
            elif node.op == "get_attr":
                raise self.refuse("needs a constant that only its values give", "a derivative written out")
            elif node.op == "call_function":
                values[node] = self._emit_one(call, node, values)
        return list(result)

    def _emit_one(
        self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], fx.Node], node: fx.Node, values: dict[fx.Node, Any]
    ) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target is aten.detach.default:
            return args[0]  # what autograd keeps
        return call(node.target, args, dict(kwargs))

    def _between(self) -> list[fx.Node]:
        """The ops through which the outputs depend on the inputs, in order. What is detached is not followed."""
        inputs, graph = set(self.inputs), self.outputs[0].graph
        ops = [node for node in call_nodes(graph) if node not in inputs and node.target is not aten.detach.default]
        found = between(op_graph(ops), inputs, self.outputs)
        return [node for node in ops if node in found]

    def _check(self, between: Sequence[fx.Node]) -> None:
        for node in between:
            if isinstance(node.target, FunctionOp) and (self.create or node.target.draws):
                raise self.refuse(
                    f"differentiates twice through the autograd function {node.target.__name__}",
                    "create_graph=False, or plain ops in its place",
                )
            tags = getattr(node.target, "tags", ())
            if torch.Tag.nondeterministic_seeded in tags and not _is_idle(node):
                raise self.refuse(
                    f"differentiates through {node.target}, which would draw other random numbers",
                    "drawing a mask before and multiplying by it",
                )

    def _traced(self, between: Sequence[fx.Node], boundary: Sequence[fx.Node]) -> fx.GraphModule:
        places = {node: place for place, node in enumerate(boundary)}

        def differentiated(*values: Tensor) -> list[Tensor]:
            leaves = [values[places[node]].detach().requires_grad_() for node in self.inputs]
            known: dict[fx.Node, Any] = dict(zip(boundary, values, strict=True))
            known.update(zip(self.inputs, leaves, strict=True))
            for node in between:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # of a call_function
            grads = [known[n] for n in self.grads]
            return list(_gradients([known[n] for n in self.outputs], leaves, grads, create_graph=True))

        fakes = [node.meta["val"] for node in boundary]
        with apart(), torch.enable_grad(), fakes[0].fake_mode:
            return traced(differentiated, fakes)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _is_idle(node: fx.Node) -> bool:
    """Whether it could drop something, and does not."""
    if node.target is aten.scaled_dot_product_attention.default:
        return not (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return node.target is aten.dropout.default and bool(node.args[1] == 0 or not node.args[2])
