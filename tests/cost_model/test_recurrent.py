"""Recurrent layers: their products counted by hand, and what dividing the batch is predicted to bring."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import op_nodes
from autopar.ir.rules import rule_for
from tests.cases.recurrent import Model

WIDTH, STEPS, BATCH, CLASSES = 512, 128, 64, 64
_PASSES = 3  # forward, and backward the gradients of both operands of each product


def test_flops_of_a_step_and_what_eight_ranks_save() -> None:
    """LSTM: two layers of four gates; GRU: one of three; each of the input and of the state. One linear."""
    tokens = torch.randint(CLASSES, (BATCH, STEPS))
    rows = BATCH * STEPS
    of_lstm = _PASSES * 2 * rows * (2 * 4 * 2 * WIDTH * WIDTH)
    assert of_lstm == pytest.approx(206e9, rel=0.005)
    by_hand = of_lstm + _PASSES * 2 * rows * (3 * 2 * WIDTH * WIDTH + WIDTH * CLASSES)

    model = Model(WIDTH)
    ops = {str(node.target): rule_for(node) for node in op_nodes(capture(model, (tokens, tokens)).graph)}
    assert _PASSES * ops["aten.lstm.input"].flops == of_lstm

    seconds = {}
    for num_ranks in (1, 8):
        plan = autopar.search(
            model, make_cluster("h100-sxm", num_ranks), example_inputs=(tokens, tokens), dp=num_ranks, precision="bf16"
        )
        prediction = plan.prediction
        assert prediction is not None
        seconds[num_ranks] = prediction.step_time_s
        predicted = prediction.model_tflops_per_gpu * 1e12 * num_ranks * prediction.step_time_s
        assert predicted == pytest.approx(by_hand, rel=0.05)
    assert seconds[8] < seconds[1]
