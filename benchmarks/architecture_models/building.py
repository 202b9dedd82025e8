"""How an architecture of Hugging Face becomes a case: the class that its name says, from a small configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from models import BATCH, DECODER, Case, language_batch
from torch import nn

# Decoders of two layers; dropout is 0 throughout, since one process draws other numbers than many.
SMALL = DECODER | {"num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def from_config(architecture: str, **config: Any) -> nn.Module:
    """The class ``architecture`` of transformers, with a configuration of its own class."""
    made = getattr(importlib.import_module("transformers"), architecture)
    model: nn.Module = made(made.config_class(**config))
    return model


def hugging_face(
    name: str,
    architecture: str,
    batch: Callable[[int], dict[str, Any]] = language_batch,
    *,
    learning_rate: float = 0.1,
    **config: Any,
) -> Case:
    return Case(name=name, build=partial(from_config, architecture, **config), batch=batch, learning_rate=learning_rate)


def frozen(build: Callable[[], nn.Module], *parts: str) -> Callable[[], nn.Module]:
    """``build`` with the parameters whose names begin with one of ``parts`` frozen."""

    def made() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(parts))
        return model

    return made


__all__ = ["BATCH", "NO_DROPOUT", "SMALL", "from_config", "frozen", "hugging_face"]
