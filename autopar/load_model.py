"""The model that MODEL of the command line names: a function of a Python file, or a Hugging Face config."""

from __future__ import annotations

from autopar.huggingface.config import load_hf_config
from autopar.model_file import ModelFile, model_of_file

_CONFIG = "hf:"


def load_model_file(model: str) -> ModelFile:
    """The model that ``model`` names. Raises InvalidModelFile, which says what is expected."""
    if model.startswith(_CONFIG):
        return load_hf_config(model.removeprefix(_CONFIG))
    return model_of_file(model)
