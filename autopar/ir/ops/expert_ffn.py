"""The feed-forward networks of a mixture of experts, over rows sorted by expert.

Shape suffixes as in ``composite``. Rows are (token, choice) pairs: token t sends row ``t * K + k`` to its k-th expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.gates import GATE, VALUE, gate_function
from autopar.ir.ops.scaled_experts import scaled_grouped_linear
from autopar.ir.ops.scalings import Recipe
from autopar.ir.ops.shared_maxima import Groups
from autopar.ir.primitives.values import has_values
from autopar.ir.torch_private import will_run

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

# (rows sorted by expert, the expert of each) -> each row through its expert
Experts = Callable[[Tensor, Tensor], Tensor]


_loads: ContextVar[list[Tensor] | None] = ContextVar("autopar expert loads", default=None)


@contextmanager
def recorded_loads() -> Iterator[list[Tensor]]:
    """The list gets, of each mixture of experts that runs within, how many of this rank's tokens chose each expert."""
    loads: list[Tensor] = []
    token = _loads.set(loads)
    try:
        yield loads
    finally:
        _loads.reset(token)


def record_load(expert: Tensor, num_experts: int) -> None:
    """Record the experts that rows chose, within ``recorded_loads``. expert: (rows,) integers below E."""
    loads = _loads.get()
    if loads is not None:
        loads.append(rows_of_experts(expert, num_experts))


def rows_of_experts(expert: Tensor, num_experts: int) -> Tensor:
    """(E,): how many of the rows go to each expert. expert: (rows,) integers below E."""
    return torch.zeros(num_experts, dtype=torch.int64, device=expert.device).scatter_add_(
        0, expert, torch.ones_like(expert, dtype=torch.int64)
    )


def capacity_of(num_rows: int, num_experts: int, capacity_factor: float) -> int:
    """Rows that an expert takes at most: ``capacity_factor`` times an even share, rounded up."""
    return ceil(capacity_factor * num_rows / num_experts)


def first_of_experts(expert: Tensor, before: Tensor, capacity: int) -> Tensor:
    """(rows,) boolean: whether a row is among the first ``capacity`` of its expert.

    expert: (rows,). before: (E,), rows of each expert that come before all of these.
    """
    chosen, order = expert.sort(stable=True)
    counts = rows_of_experts(expert, len(before))
    place = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[chosen] + before[chosen]
    return torch.empty_like(place, dtype=torch.bool).index_copy(0, order, place < capacity)


def combine(x: Tensor, expert_weight: Tensor, rows: Tensor, experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Each of ``rows`` through ``experts``; their results summed by token with their weights: (.., h) -> (.., h).

    x: (.., h). expert_weight: (.., K). rows: numbers of (token, choice) pairs, each at most once, in any order.
    """
    tokens = x.reshape(-1, x.shape[-1])
    token = rows // expert_weight.shape[-1]
    weighted = experts(tokens.index_select(0, token)) * expert_weight.reshape(-1)[rows][:, None]
    summed: Tensor = _SumRows.apply(weighted.to(tokens.dtype), token, tokens.shape[0])  # type: ignore[no-untyped-call]
    return summed.reshape(x.shape)


class _SumRows(torch.autograd.Function):
    """``out[t]`` is the sum of the rows r with ``token[r] == t``. Autograd would keep the rows, for their shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        return rows.new_zeros((num_tokens, rows.shape[-1])).index_add_(0, token, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None


def run_experts(
    x: Tensor,
    expert: Tensor,
    *,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool = False,
    recipe: Recipe | None = None,
    row_groups: Groups = (),
    inner_groups: Groups = (),
) -> Tensor:
    """Each row through its expert: (rows, h) -> (rows, h).

    x: (rows, h), sorted by expert. expert: (rows,). The parameters are those of ``composite.moe``. recipe: of narrow
    floats, whose scales are taken over ``row_groups``, which hold other rows of the experts, and ``inner_groups``,
    which hold pieces of the inner width.
    """
    ends = rows_of_experts(expert, w_up.shape[0]).cumsum(0).to(torch.int32)
    up = _grouped_linear(x, w_up, ends, recipe, row_groups, (), inner_groups)
    if b_up is not None:
        up = up + b_up[expert]
    inner = _between(up, activation, gated, interleaved)
    down = _grouped_linear(inner, w_down, ends, recipe, row_groups, inner_groups, ())
    return down if b_down is None else down + b_down[expert]


def _between(up: Tensor, activation: str, gated: bool, interleaved: bool) -> Tensor:
    """The rows that go into the second product: (rows, u) -> (rows, i)."""
    parts = {GATE: up}
    if gated:
        parts = dict(
            zip((GATE, VALUE), (up[..., ::2], up[..., 1::2]) if interleaved else up.chunk(2, dim=-1), strict=True)
        )
    if activation not in ACTIVATIONS:
        return gate_function(activation)(parts)
    inner = ACTIVATIONS[activation](parts[GATE])
    return inner * parts[VALUE] if gated else inner


class _GroupedLinear(torch.autograd.Function):
    """``out[r] = x[r] @ weight[e].T`` for the rows r of expert e, which end before ``ends[e]``."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        # No writes in place: selective rematerialisation keeps the products.
        products = [x[rows] @ weight[expert].t() for expert, rows in _spans(ends)]
        return torch.cat(products) if products else x.new_zeros(0, weight.shape[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight, ends = ctx.saved_tensors  # type: ignore[attr-defined]
        spans = _spans(ends)
        grad_x = torch.empty_like(x) if _is_wanted(ctx, 0) else None
        grad_weight = torch.empty_like(weight) if _is_wanted(ctx, 1) else None
        if grad_x is not None:
            for expert, rows in spans:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
        if grad_weight is not None:
            for expert in set(range(len(weight))) - {expert for expert, _ in spans}:
                grad_weight[expert].zero_()
            for expert, rows in spans:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None


def _is_wanted(ctx: Any, position: int) -> bool:
    """Whether this backward, which may be of inputs or of weights alone, needs the gradient of an operand.

    ``needs_input_grad`` only says what the whole backward would need; the engine knows what this one runs.
    """
    if not ctx.needs_input_grad[position]:
        return False
    node, _ = ctx.next_functions[position]
    return will_run(node)


def _spans(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, rows) of the experts that have rows."""
    limits = [0, *ends.tolist()]
    return [(e, slice(limits[e], limits[e + 1])) for e in range(len(limits) - 1) if limits[e + 1] > limits[e]]


def _grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    recipe: Recipe | None = None,
    rows: Groups = (),
    depth: Groups = (),
    columns: Groups = (),
) -> Tensor:
    """Rows of x, sorted by expert, each through its expert's weight: (rows, h), (E, n, h) -> (rows, n)."""
    if not has_values(x):
        return x.new_empty(x.shape[0], weight.shape[1]) + 0 * (x.sum() + weight.sum())
    if recipe is not None:
        return scaled_grouped_linear(x, weight, ends, recipe, rows, depth, columns)
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0]:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    # Views, as of a leaf autograd does not say whether its gradient is wanted.
    return _GroupedLinear.apply(x.view_as(x), weight.view_as(weight), ends)  # type: ignore[no-any-return, no-untyped-call]
