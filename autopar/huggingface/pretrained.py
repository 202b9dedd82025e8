"""A checkpoint folder of transformers as a model without weights, and the weights to be read in slices."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.huggingface.adapters import AdapterFormat
from autopar.huggingface.config import asked_of_transformers, read_config
from autopar.huggingface.keys import file_tensors, model_tensors
from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.pretrained import PretrainedFolder, save_pretrained
from autopar.runtime.checkpoint.safetensors_files import TensorFiles
from autopar.runtime.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from autopar.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Pretrained:
    """model: on the meta device. values: of its state dict, each read when it is used, while ``files`` are open."""

    model: nn.Module
    values: Mapping[str, torch.Tensor]
    files: TensorFiles
    form: HuggingFaceFormat


def open_pretrained(path: str, dtype: torch.dtype) -> Pretrained:
    """Read the config and the headers of the files in the folder ``path``; no weights.

    dtype: of the model's parameters, whatever that of the files is. Raises InvalidModelFile or CheckpointError.
    """
    folder = Path(path)
    config, model_class = read_config(path)
    from transformers import GenerationConfig

    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{folder} holds quantised weights, which are not trained.\n  try: the checkpoint that they were made from"
        )
    original = copy.deepcopy(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache is for inference; training outputs would carry it
    model = asked_of_transformers(folder, "build a model of", lambda: _on_meta(model_class, config, dtype))
    files = TensorFiles(folder)
    values = model_tensors(model, files.tensors, str(folder))
    generation = getattr(model, "generation_config", None)
    if (folder / "generation_config.json").is_file():
        generation = asked_of_transformers(
            folder / "generation_config.json", "read", lambda: GenerationConfig.from_pretrained(folder)
        )
    return Pretrained(model, values, files, HuggingFaceFormat(model_class, original, generation))


def format_of(model: nn.Module) -> PretrainedFolder | None:
    """How transformers keeps ``model``, or peft, if it is one of theirs."""
    adapters = sys.modules.get("peft")
    if adapters is not None and isinstance(model, adapters.PeftModel):
        return AdapterFormat.of(model)
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    generation = getattr(model, "generation_config", None)
    return HuggingFaceFormat(type(model), copy.deepcopy(model.config), copy.deepcopy(generation))


@dataclass(frozen=True, slots=True)
class HuggingFaceFormat:
    """A folder that ``from_pretrained`` of transformers reads: config.json, weights, and generation_config.json."""

    model_class: Any
    config: Any
    generation_config: Any

    def save(self, engine: Engine, path: str | os.PathLike[str], max_shard_size: int | str) -> None:
        """Write the folder ``path``. All ranks call together."""
        save_pretrained(engine, self, path, max_shard_size)

    def file_tensors(self, tensors: Mapping[str, LazyTensor]) -> Mapping[str, torch.Tensor]:
        """By name in the files; tied ones once."""
        dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float32)
        return file_tensors(_on_meta(self.model_class, copy.deepcopy(self.config), dtype), tensors)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """The configs, for weights of ``dtype``."""
        config = copy.deepcopy(self.config)
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [self.model_class.__name__]
        config.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)


def _on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"), _default_dtype(dtype):
        return model_class(config)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
