"""Models from a local Hugging Face config: ``hf:path/to/config.json``. No weights, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.ir.errors import InvalidModelFile
from autopar.model_file import ModelFile

_DEFAULT_BATCH = 8
_LONGEST_DEFAULT_SEQUENCE = 4096


def read_config(path: str) -> tuple[Any, Any]:
    """The config at ``path`` (a config.json or its folder), and the class of transformers that it names.

    Raises InvalidModelFile.
    """
    try:
        import transformers
    except ImportError as error:
        raise InvalidModelFile(
            "Hugging Face models need transformers.\n  try: pip install 'autopar[transformers]'"
        ) from error
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise InvalidModelFile(f"there is no Hugging Face config at {path}.\n  expected a config.json, or its folder")
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise InvalidModelFile(f"{file} is not JSON: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        raise InvalidModelFile(f"{file}: transformers {transformers.__version__} knows no model_type {kind!r}")
    config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    architecture = (config.architectures or [None])[0]
    if architecture is None:
        raise InvalidModelFile(f'{file} names no class.\n  add "architectures": ["LlamaForCausalLM"], for example')
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise InvalidModelFile(f"{file}: transformers {transformers.__version__} has no class {architecture}")
    return config, model_class


def load_hf_config(path: str) -> ModelFile:
    """The architecture that a config names, with random weights. Raises InvalidModelFile."""
    config, model_class = read_config(path)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache is for inference; training outputs would carry it
    folder = Path(path) if Path(path).is_dir() else Path(path).parent

    def build() -> nn.Module:
        return model_class(config)  # type: ignore[no-any-return]

    return ModelFile(
        name=folder.name or model_class.__name__,
        build=build,
        inputs=lambda batch_size, seq_len: _inputs(config, model_class, batch_size or _DEFAULT_BATCH, seq_len),
    )


def _inputs(config: Any, model_class: Any, batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Inputs of the model's main modality, with labels where the class computes a loss from them."""
    if model_class.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(batch_size, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(batch_size, dtype=torch.long)}
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1024
    length = seq_len or min(longest, _LONGEST_DEFAULT_SEQUENCE)
    tokens = torch.zeros(batch_size, length, dtype=torch.long)
    per_sample = model_class.__name__.endswith("ForSequenceClassification")
    return {"input_ids": tokens, "labels": torch.zeros(batch_size, dtype=torch.long) if per_sample else tokens.clone()}
