"""torch's ``scan`` and ``associative_scan`` in a trace: one step of theirs is traced, which becomes the body of one op.

    states, outs = scan(step, start, xs)

    in the trace:  slot(start), slot(xs[0]) -> the ops of one step -> steps(.., number of states)
    afterwards:    scan(body)(start, xs)                                         (``ir.scan``, ``functionalise``)

What the step reads beside its arguments, parameters too, becomes an operand of the op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.autograd.replacing import replaced
from autopar.ir.capture.simplify import simplify
from autopar.ir.errors import CaptureError
from autopar.ir.lowered.random import is_random
from autopar.ir.op_graph import between, op_graph
from autopar.ir.ops.scan import AssociativeScan, Scan, body_of, one_of_its_kind
from autopar.ir.rules import rule_for
from autopar.ir.rules.scan import compose
from autopar.ir.source import user_line
from autopar.ir.torch_private import ASSOCIATIVE_SCAN, GENERIC_ASSOCIATIVE_SCAN, SCAN, pytree


@torch.library.custom_op("autopar::slot", mutates_args=())
def _slot(x: Tensor) -> Tensor:
    return x.clone()


@_slot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@torch.library.custom_op("autopar::steps", mutates_args=())
def _steps(
    outs: Sequence[Tensor], slots: Sequence[Tensor], given: Sequence[Tensor], num_states: int, associates: bool
) -> list[Tensor]:
    raise AssertionError("this op stands for the steps of a scan in a trace and is never run")


@_steps.register_fake
def _(
    outs: Sequence[Tensor], slots: Sequence[Tensor], given: Sequence[Tensor], num_states: int, associates: bool
) -> list[Tensor]:
    if associates:
        return [torch.empty_like(x) for x in given]
    length = given[num_states].shape[0]
    states = [torch.empty_like(state) for state in outs[:num_states]]
    return [*states, *(out.new_empty((length, *out.shape)) for out in outs[num_states:])]


def _zeros(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    made = [[torch.zeros(s, dtype=d) if needs else None for s, d, needs in tensors] for tensors in ctx.given]
    return (*made, None, None)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.given = [[(t.shape, t.dtype, t.requires_grad) for t in tensors] for tensors in inputs[:3]]


# A trace asks whether a tensor has a gradient, and never for its values.
_slot.register_autograd(lambda ctx, grad: grad)
_steps.register_autograd(_zeros, setup_context=_remember)

SLOT = torch.ops.autopar.slot.default
STEPS = torch.ops.autopar.steps.default


@contextmanager
def scans_recorded() -> Iterator[None]:
    """Within, ``scan`` and ``associative_scan`` trace one step."""
    with ExitStack() as stack:
        stack.enter_context(replaced(*SCAN, _scanned))
        stack.enter_context(replaced(*ASSOCIATIVE_SCAN, _combined))
        stack.enter_context(replaced(*GENERIC_ASSOCIATIVE_SCAN, _combined_flat))
        yield


def _scanned(_: Any, step: Callable[..., Any], states: Sequence[Tensor], xs: Sequence[Tensor]) -> tuple[Any, Any]:
    slots = [*map(_changing, states), *(_changing(x[0]) for x in xs)]
    after, outs = step(*slots)
    flat_after, spec_after = pytree.tree_flatten(after)
    flat_outs, spec = pytree.tree_flatten(outs)
    described = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (states, flat_after)]
    if described[0] != described[1]:
        raise _refused("scans with a step that changes shape or dtype of its state", "a state that stays as it starts")
    if not all(isinstance(out, Tensor) for out in flat_outs):
        raise _refused("scans with a step that returns what is no tensor", "tensors")
    made = STEPS([*flat_after, *flat_outs], slots, [*states, *xs], len(states), False)
    return pytree.tree_unflatten(made[: len(states)], spec_after), pytree.tree_unflatten(made[len(states) :], spec)


def _combined(_: Any, combine: Callable[..., Any], xs: Sequence[Tensor]) -> Any:
    return _whole(lambda *slots: torch.vmap(combine)(*slots), xs, spec=True)


def _combined_flat(
    combine: Callable[..., Any], xs: Sequence[Tensor], dim: int = 0, additional_inputs: Sequence[Tensor] = ()
) -> list[Tensor]:
    found: list[Tensor] = _whole(lambda *slots: combine(*slots, *additional_inputs), xs, spec=False)
    return found


def _whole(combine: Callable[..., Any], xs: Sequence[Tensor], *, spec: bool) -> Any:
    length = xs[0].shape[0]
    if length < 2:
        return list(xs)
    slots = [*(_changing(x[: length - 1 : 2]) for x in xs), *(_changing(x[1::2]) for x in xs)]
    outs, structure = pytree.tree_flatten(combine(*slots))
    made = STEPS(outs, slots, list(xs), 0, True)
    return pytree.tree_unflatten(made, structure) if spec else made


def _changing(x: Tensor) -> Tensor:
    """A tensor of one step. Another step's may have a gradient, as that of a state that starts as zeros."""
    slot: Tensor = SLOT(x)
    if torch.is_grad_enabled() and slot.dtype.is_floating_point and not slot.requires_grad:
        slot.requires_grad_()
    return slot


def scan_op(node: fx.Node, steps: tuple[Any, ...], call: Callable[..., fx.Node]) -> list[fx.Node]:
    """Add, by ``call(target, args)``, the op of a scan whose step is in the graph; one node for each result.

    steps: arguments of ``STEPS`` in the functional graph.
    """
    outs, slots, given, num_states, associates = steps
    nodes = _between(slots, outs)
    drawing = next((n for n in nodes if is_random(n)), None)
    if drawing is not None:
        raise _refused_at(drawing, "draws random numbers in a step of a scan", "drawing them before, as a sequence")
    graph, constants = body_of(nodes, slots, outs)
    simplify(graph, differentiable=set(graph.nodes))
    places = [n for n in graph.nodes if n.op == "placeholder"]
    results: Any = graph.output_node().args[0]
    op: Any
    if associates:
        count = len(given)
        same = [*zip(places, places[count : 2 * count]), *zip(places, results)]
        op = AssociativeScan(body=compose(graph, rule_for, same), num_sequences=count)
    else:
        op = Scan(
            body=compose(graph, rule_for, list(zip(places[:num_states], results))),
            num_states=num_states,
            sequence_dims=(0,) * (len(given) - num_states),
            out_dims=(0,) * (len(outs) - num_states),
        )
    made = call(one_of_its_kind(op), (*given, *constants))
    return [call(operator.getitem, (made, number)) for number in range(len(made.meta["val"]))]


def writes_outside(start: fx.Node, before: Mapping[fx.Node, int], after: Mapping[fx.Node, int]) -> bool:
    """Whether a step that starts at ``start`` wrote to what was there. before, after: writes that tensors have seen."""
    return any(base < start and count != before.get(base, 0) for base, count in after.items())


def refuse_open(graph: fx.Graph) -> None:
    """Raise CaptureError if anything outside of a scan reads what one of its steps computes."""
    for node in graph.nodes:
        if node.target is SLOT:
            raise _refused_at(node, "uses a tensor of one step outside of its scan", "returning it from the step")


def _between(slots: Sequence[fx.Node], outs: Sequence[fx.Node]) -> list[fx.Node]:
    """The ops of the step: those that depend on its slots, in order."""
    nodes = list(dropwhile(lambda node: node is not slots[0], slots[0].graph.nodes))
    found = between(op_graph(nodes), slots, outs).difference(slots)
    return [node for node in nodes if node in found]


def _refused(what: str, remedy: str) -> CaptureError:
    return CaptureError(f"the model cannot be captured: it {what}.\n  at {user_line()}\n  try: {remedy}")


def _refused_at(node: fx.Node, what: str, remedy: str) -> CaptureError:
    return CaptureError(f"the model cannot be captured: it {what}.\n  at {node.meta['source']}\n  try: {remedy}")
