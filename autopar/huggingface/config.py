"""Models from a local Hugging Face config: ``hf:path/to/config.json``. No weights, no network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.ir.bounded_text import parse_json, read_text
from autopar.ir.errors import AutoparError, InvalidModelFile
from autopar.model_file import ModelFile

_DEFAULT_BATCH = 8
_LONGEST_DEFAULT_SEQUENCE = 4096
# What transformers makes as many things of in Python, by names in configs, and more of it than any model has.
_LAYERS, _MAX_LAYERS = re.compile(r"(layers|n_layer|depths?|(num|n)_\w*(blocks|stages|levels))$"), 512
_COUNTS, _MAX_COUNT = re.compile(r"(^|_)(num|experts)_"), 1 << 20
_MAX_MODULES = 30_000

T = TypeVar("T")


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
    values = parse_json(read_text(file, "config", InvalidModelFile), str(file), InvalidModelFile)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise InvalidModelFile(f"{file}: transformers {transformers.__version__} knows no model_type {kind!r:.80}")
    _check_counts(values, str(file))
    named = values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str):
        raise InvalidModelFile(f'{file} names no class.\n  add "architectures": ["LlamaForCausalLM"], for example')
    model_class = asked_of_transformers(file, "import", lambda: getattr(transformers, architecture, None))
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise InvalidModelFile(
            f"{file}: transformers {transformers.__version__} has no class {architecture!r:.80} of models"
        )
    return asked_of_transformers(file, "read", lambda: transformers.CONFIG_MAPPING[kind].from_dict(values)), model_class


def asked_of_transformers(file: Path, what: str, work: Callable[[], T]) -> T:
    """``work()`` with what a config says. Raises InvalidModelFile for whatever transformers raises on it."""
    try:
        with _bounded_modules(file):
            return work()
    except AutoparError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise InvalidModelFile(f"{file}: transformers cannot {what} it: {said:.600}") from error


def _check_counts(value: Any, where: str) -> None:
    """Raise InvalidModelFile for a config that says so many layers, labels or experts that they would fill memory."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            _check_counts(inner, f"{where}: {name}")
        most = _MAX_LAYERS if _LAYERS.search(name) else _MAX_COUNT if _COUNTS.search(name) else None
        for count in inner if isinstance(inner, list) else [inner]:
            if most is not None and isinstance(count, (int, float)) and count > most:
                raise InvalidModelFile(f"{where}: {name:.80} is {count:,}; expected {most:,} at most")


@contextmanager
def _bounded_modules(file: Path) -> Iterator[None]:
    """Raise InvalidModelFile once more modules are made than any model has."""
    count = 0

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            raise InvalidModelFile(f"{file} is of a model of more than {_MAX_MODULES:,} modules, which is not built")

    handle = nn.modules.module.register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def load_hf_config(path: str) -> ModelFile:
    """The architecture that a config names, with random weights. Raises InvalidModelFile."""
    config, model_class = read_config(path)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache is for inference; training outputs would carry it
    folder = Path(path) if Path(path).is_dir() else Path(path).parent

    def build() -> nn.Module:
        return asked_of_transformers(Path(path), "build a model of", lambda: model_class(config))

    def inputs(batch_size: int | None, seq_len: int | None) -> dict[str, torch.Tensor]:
        size = batch_size or _DEFAULT_BATCH
        return asked_of_transformers(Path(path), "make inputs of", lambda: _inputs(config, model_class, size, seq_len))

    return ModelFile(
        name=folder.name or model_class.__name__,
        build=build,
        inputs=inputs,
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
