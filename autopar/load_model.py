"""The model that MODEL of the command line names: a function of a Python file, or a Hugging Face config."""

from __future__ import annotations

import os

from autopar.huggingface.config import load_hf_config
from autopar.ir.errors import InvalidModelFile
from autopar.model_file import ModelFile, model_of_file

_CONFIG = "hf:"


def load_model_file(model: str) -> ModelFile:
    """The model that ``model`` names. Raises InvalidModelFile, which says what is expected."""
    path = model.removeprefix(_CONFIG) if model.startswith(_CONFIG) else model.partition(":")[0]
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or no name
        raise InvalidModelFile(f"MODEL {model[:200]!r}: {getattr(error, 'strerror', None) or error}") from error
    if model.startswith(_CONFIG):
        return load_hf_config(path)
    return model_of_file(model)
