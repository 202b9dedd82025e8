"""Delayed scaling: scales of the largest magnitudes of the steps before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.ir.errors import InvalidInput
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.maxima_history import roll, running_of, shape_of_history
from autopar.ir.ops.scalings import E4M3, E5M2, SCALINGS, Format

DELAYED = SCALINGS["fp8-delayed"]


def rounded(matrix: Tensor, largest: float, form: Format) -> Tensor:
    """What a matrix is in 8-bit floats, if the largest magnitude of earlier steps was ``largest``."""
    scale = form.limit / largest
    return (matrix * scale).clamp(-form.limit, form.limit).to(form.dtype).to(matrix.dtype) / scale


def test_a_product_has_the_scales_of_the_steps_before() -> None:
    torch.manual_seed(0)
    history, largest = torch.zeros(shape_of_history(DELAYED)), [1.0 * E4M3.limit, 1.0 * E4M3.limit, 1.0 * E5M2.limit]
    for step in range(3):
        # Larger from step to step, so that there are numbers beyond the largest of the steps before.
        x, weight = (torch.randn(16, 16) * 3**step).requires_grad_(), torch.randn(32, 16).requires_grad_()
        grad = torch.randn(16, 32) * 3**step
        y = scaled_linear(x, weight, recipe="fp8-delayed", history=history)
        y.backward(grad)
        a, b = (rounded(own.detach(), largest[n], E4M3) for n, own in enumerate((x, weight)))
        g = rounded(grad, largest[2], E5M2)
        torch.testing.assert_close(y, a @ b.t(), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(x.grad, g @ b, rtol=1e-4, atol=1e-3 * 3**step)
        torch.testing.assert_close(weight.grad, g.t() @ a, rtol=1e-4, atol=1e-2 * 9**step)
        seen = [float(own.detach().abs().max()) for own in (x, weight, grad)]
        assert running_of(history).tolist() == seen
        roll(history, running_of(history).clone())
        largest = seen if step == 0 else [max(own, new) for own, new in zip(largest, seen, strict=True)]
    assert running_of(history).tolist() == [0.0] * 3


def test_a_history_forgets_and_leaves_out_what_is_not_finite() -> None:
    history = torch.zeros(shape_of_history(DELAYED))
    roll(history, torch.tensor([5.0, 5.0, 5.0]))
    roll(history, torch.tensor([1.0, float("inf"), float("nan")]))
    assert history[:, 1].tolist() == [5.0, 5.0, 5.0]
    assert history[:, 2].tolist() == [1.0, 5.0, 5.0]
    for _ in range(DELAYED.steps - 1):
        roll(history, torch.tensor([2.0, 2.0, 2.0]))
    assert history[:, 1].tolist() == [2.0, 5.0, 5.0]
    roll(history, torch.tensor([2.0, 2.0, 2.0]))
    assert history[:, 1].tolist() == [2.0, 2.0, 2.0]


def test_without_gradients_nothing_is_noted() -> None:
    history = torch.zeros(shape_of_history(DELAYED))
    with torch.no_grad():
        scaled_linear(torch.ones(16, 16), torch.ones(16, 16), recipe="fp8-delayed", history=history)
    assert not history.any()


def test_experts_are_refused() -> None:
    pytest.importorskip("transformers")
    from benchmarks.models import CASES, build

    case = CASES["mixtral"]
    with pytest.raises(InvalidInput, match=r"of experts, which have no histories.*\n.*\n  try: fp8-tensor"):
        autopar.search(
            build(case), 1, example_inputs=case.batch(0), recipe_pins={"*experts*": "fp8-delayed"}, precision="bf16"
        )
