"""Blocks and roles of models as users write them, through capture and normalisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.analysis.batch_and_sequence import find_roles, microbatch_obstacle
from autopar.ir.analysis.blocks import BlockRepetition, find_repetition
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise


def with_repetition(model: nn.Module, inputs: dict[str, Any]) -> tuple[CapturedModel, BlockRepetition]:
    captured = normalise(capture(model, inputs))
    return captured, find_repetition(captured)


def kinds(repetition: BlockRepetition) -> list[tuple[str, int]]:
    return [(kind.name, kind.repeats) for kind in repetition.kinds]


def tokens(rows: int = 4, columns: int = 16) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.long)


def test_t5_position_bias_is_made_once_and_every_layer_is_alike() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    captured, repetition = with_repetition(model, {"input_ids": tokens(), "labels": tokens()})
    assert kinds(repetition) == [
        ("encoder.embed_tokens", 1),
        ("encoder.block.*", 2),
        ("decoder.embed_tokens", 1),
        ("decoder.block.*", 2),
        ("lm_head", 1),
    ]
    assert microbatch_obstacle(captured, find_roles(captured)) is None
    # The residual stream, the position bias and the encoder's output.
    assert len(repetition.crossing(5)) == 3


def test_resnet_stages_repeat_after_their_first_block() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[3, 3], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    inputs = {"pixel_values": torch.zeros(4, 3, 16, 16), "labels": torch.zeros(4, dtype=torch.long)}
    captured, repetition = with_repetition(model, inputs)
    assert kinds(repetition) == [
        ("resnet.embedder", 1),
        ("resnet.encoder.stages.0.layers.*", 3),
        ("resnet.encoder.stages.1.layers.0", 1),
        ("resnet.encoder.stages.1.layers.*", 2),
        ("classifier.1", 1),
    ]
    assert all(len(repetition.crossing(cut)) == 1 for cut in range(1, len(repetition.blocks)))
    updated = {name for name, buffer in captured.buffers.items() if buffer.updated_by}
    assert updated, "batch norms update their running statistics"
    obstacle = microbatch_obstacle(captured, find_roles(captured))
    assert obstacle is not None and "statistics over the whole batch" in obstacle
