"""Models of images and text, most with a frozen tower."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from models import BATCH, SEQ, VOCAB, Case, random_images, random_tokens
from torch import nn

from .building import NO_DROPOUT, SMALL, from_config, frozen, hugging_face

IMAGE_TOKEN = VOCAB - 1
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _llava() -> nn.Module:
    """A vision tower, two linear layers, and a decoder in whose sequence the patches stand."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**_TOWER), text_config=LlamaConfig(**SMALL), image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1, image_seq_length=16,
        )
    )  # fmt: skip


def _paligemma() -> nn.Module:
    """Images and the prompt before the answer attend to each other in both directions."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    tower = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
    text = {"model_type": "gemma", **SMALL, "head_dim": 8}
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=tower, text_config=text, image_token_index=IMAGE_TOKEN, projection_dim=32, hidden_size=32
        )
    )


def _vision_text_pair(step: int) -> dict[str, Any]:
    return {"input_ids": random_tokens(step), "pixel_values": random_images(step), "return_loss": True}


def _captions(step: int) -> dict[str, Any]:
    tokens = random_tokens(step)
    return {"pixel_values": random_images(step), "input_ids": tokens, "labels": tokens.clone()}


def _patches_in_text(step: int) -> dict[str, Any]:
    """A sequence that begins with the 16 patches of an image; they are not predicted."""
    tokens = random_tokens(step, vocab=IMAGE_TOKEN)
    image = torch.full((BATCH, 16), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([image, tokens], dim=1),
        "attention_mask": torch.ones(BATCH, 16 + SEQ, dtype=torch.long),
        "pixel_values": random_images(step),
        "labels": torch.cat([torch.full_like(image, -100), tokens], dim=1),
    }


def _patches_and_types(step: int) -> dict[str, Any]:
    batch = _patches_in_text(step)
    return {**batch, "token_type_ids": (batch["labels"] != -100).long()}


def _answers(step: int) -> dict[str, Any]:
    """A question about an image, with how good each answer is."""
    generator = torch.Generator().manual_seed(8000 + step)
    tokens = random_tokens(step)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": torch.zeros_like(tokens),
        "pixel_values": random_images(step),
        "labels": torch.rand(BATCH, 8, generator=generator),
    }


MULTIMODAL = (
    Case(name="llava", build=frozen(_llava, "model.vision_tower"), batch=_patches_in_text),
    Case(name="paligemma", build=frozen(_paligemma, "model.vision_tower"), batch=_patches_and_types),
    # A contrast of sigmoids between all images and all texts of the batch.
    Case(
        name="siglip", batch=_vision_text_pair, learning_rate=0.01,
        build=frozen(
            partial(from_config, "SiglipModel", text_config={**_TEXT, "projection_size": 32}, vision_config=_TOWER),
            "vision_model",
        ),
    ),
    Case(
        name="blip", batch=_captions,
        build=frozen(
            partial(from_config, "BlipForConditionalGeneration", vision_config={**_TOWER, "attention_dropout": 0.0},
                    text_config={**_TEXT, **NO_DROPOUT, "encoder_hidden_size": 32, "is_decoder": True,
                                 "sep_token_id": 2, "label_smoothing": 0.0, "use_cache": False},
                    projection_dim=32),
            "vision_model",
        ),
    ),
    # A decoder that reads the image before the text.
    Case(
        name="git", batch=_captions,
        build=frozen(partial(from_config, "GitForCausalLM", vision_config=_TOWER, **_TEXT, **NO_DROPOUT,
                             use_cache=False), "git.image_encoder"),
    ),
    # One encoder over words and patches together.
    hugging_face("vilt", "ViltForQuestionAnswering", _answers, **{**_TOWER, "vocab_size": VOCAB}, **NO_DROPOUT,
                 max_position_embeddings=32, num_labels=8, max_image_length=-1),
)  # fmt: skip
