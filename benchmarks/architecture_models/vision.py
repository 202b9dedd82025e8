"""Models of images."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, image_batch

from .building import NO_DROPOUT, hugging_face

_VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 8, **NO_DROPOUT,
}  # fmt: skip


def _segmented(step: int) -> dict[str, Any]:
    """Images with a class of every pixel."""
    labels = torch.randint(0, 8, (BATCH, 32, 32), generator=torch.Generator().manual_seed(6100 + step))
    return {"pixel_values": image_batch(step)["pixel_values"], "labels": labels}


def _large(step: int) -> dict[str, Any]:
    """For networks that make images small: statistics over few pixels that are all but equal are rounding noise."""
    pixels = torch.randn(BATCH, 3, 64, 64, generator=torch.Generator().manual_seed(6200 + step))
    return {**image_batch(step), "pixel_values": pixels}


VISION = (
    # Relative positions as biases of scores, of tables indexed by constants; layers scaled.
    hugging_face("beit", "BeitForImageClassification", image_batch, **_VIT, drop_path_rate=0.0,
                 use_relative_position_bias=True, use_shared_relative_position_bias=False),
    hugging_face("deit", "DeiTForImageClassification", image_batch, **_VIT),
    hugging_face("dinov2", "Dinov2ForImageClassification", image_batch, **_VIT, mlp_ratio=2, drop_path_rate=0.0),
    # Keys and values of images made smaller by strided convolutions.
    hugging_face(
        "pvt", "PvtForImageClassification", image_batch, image_size=32, num_encoder_blocks=2, depths=[1, 1],
        sequence_reduction_ratios=[4, 1], hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[2, 4], mlp_ratios=[2, 2], num_labels=8, drop_path_rate=0.0, **NO_DROPOUT,
    ),
    # Segmentation: features of several scales made one, a loss over pixels.
    hugging_face(
        "segformer", "SegformerForSemanticSegmentation", _segmented, num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[4, 2], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
        mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=8, drop_path_rate=0.0, classifier_dropout_prob=0.0,
        **NO_DROPOUT,
    ),
    # Convolutions of grouped channels, squeeze and excitation, batch statistics.
    hugging_face("regnet", "RegNetForImageClassification", image_batch, learning_rate=0.02, embedding_size=8,
                 hidden_sizes=[16, 32], depths=[1, 1], groups_width=8, num_labels=8, layer_type="y"),
    # Depthwise convolutions in inverted bottlenecks.
    hugging_face(
        "efficientnet", "EfficientNetForImageClassification", image_batch, learning_rate=0.02, image_size=32,
        width_coefficient=1.0, depth_coefficient=1.0, kernel_sizes=[3, 3], in_channels=[32, 16], out_channels=[16, 16],
        strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 2], hidden_dim=1280, num_labels=8, dropout_rate=0.0,
        drop_connect_rate=0.0, depthwise_padding=[],
    ),
    # Convolutions, then attention over unfolded patches.
    hugging_face(
        "mobilevit", "MobileViTForImageClassification", _large, learning_rate=0.02, image_size=64, patch_size=2,
        hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4, mlp_ratio=2.0,
        expand_ratio=2.0, num_labels=8, classifier_dropout_prob=0.0, initializer_range=0.2, **NO_DROPOUT,
    ),
    # Pooling in place of attention.
    hugging_face(
        "poolformer", "PoolFormerForImageClassification", image_batch, hidden_sizes=[16, 32], depths=[1, 1],
        num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0, drop_path_rate=0.0,
        num_labels=8,
    ),
    # Focal modulation: context of several widths, gated.
    hugging_face("focalnet", "FocalNetForImageClassification", image_batch, image_size=32, patch_size=4, embed_dim=16,
                 depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], drop_path_rate=0.0, hidden_dropout_prob=0.0,
                 num_labels=8, mlp_ratio=2.0),
)  # fmt: skip
