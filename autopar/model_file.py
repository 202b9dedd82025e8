"""MODEL of the command line: what to train, and on inputs of which shape.

    gpt.py            the function model() of gpt.py, with its example_inputs(batch_size, seq_len)
    gpt.py:large      the function large() of gpt.py, with the same example_inputs
    hf:configs/llama  a local Hugging Face config.json (or its folder), with inputs made from the config

An optional ``batches(batch_size, seq_len, seed)`` yields training data for ``autopar train``; an optional
``from_tokens(tokens)`` makes inputs of the rows of tokens that ``--data`` holds (``autopar.data.inputs``).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from autopar.ir.errors import InvalidModelFile

Inputs = Any
"""A tensor, a tuple of positional arguments, or a dict of keyword arguments."""

_EXPECTED = """\
  expected a file like:
    def model() -> nn.Module: ...
    def example_inputs(batch_size=8, seq_len=1024): ...   # a tuple of arguments, or a dict of keyword arguments"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model that can be built on any device, and inputs for it.

    name: short, for reports and plans.
    build: returns a new model, on the current default device.
    inputs: example inputs of a global batch; None stands for the model's own default.
    batches: endless training data, or None.
    from_tokens: inputs of (batch, seq_len + 1) token ids, or None.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int | None, int | None], Inputs]
    batches: Callable[[int | None, int | None, int], Iterator[Inputs]] | None = None
    from_tokens: Callable[[torch.Tensor], Inputs] | None = None

    def meta_model(self) -> nn.Module:
        """The model on the meta device: shapes only, no memory for weights."""
        with torch.device("meta"):
            return self.build()

    def meta_inputs(self, batch_size: int | None = None, seq_len: int | None = None) -> Inputs:
        """Example inputs without memory for them."""
        with torch.device("meta"):
            return self.inputs(batch_size, seq_len)


def model_of_file(model: str) -> ModelFile:
    """The model of ``file.py`` or ``file.py:name``. Raises InvalidModelFile, which says how the file should look."""
    path, _, name = model.partition(":")
    module = _import_file(Path(path), model)
    build = _function(module, name or "model", path)
    example_inputs = getattr(module, "example_inputs", None)
    if not callable(example_inputs):
        raise InvalidModelFile(f"{path} has no function example_inputs(batch_size, seq_len).\n{_EXPECTED}")
    batches = getattr(module, "batches", None)
    return ModelFile(
        name=name or Path(path).stem,
        build=lambda: _checked(build(), path, name or "model"),
        inputs=lambda batch_size, seq_len: _call(example_inputs, path, batch_size, seq_len),
        batches=None
        if batches is None
        else lambda batch_size, seq_len, seed: _call(batches, path, batch_size, seq_len, seed=seed),
        from_tokens=getattr(module, "from_tokens", None),
    )


def _import_file(path: Path, model: str) -> ModuleType:
    if path.suffix != ".py":
        raise InvalidModelFile(
            f"MODEL {model!r} is not understood.\n  expected file.py, file.py:name, or hf:path/to/config.json"
        )
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"\n  {path.parent}/ has: {', '.join(Path(p).name for p in near[:8])}" if near else ""
        raise InvalidModelFile(f"there is no file {path}.{hint}")
    spec = importlib.util.spec_from_file_location(f"autopar_model_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    # As when Python runs a script: the files beside it can be imported. It stays there, since functions of the
    # file may import later.
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        missing = error.name or "a module"
        extra = f"\n  try: pip install {missing.partition('.')[0]}" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidModelFile(f"{path} cannot be imported: {error}{extra}") from error
    except SyntaxError as error:
        raise InvalidModelFile(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from error
    return module


def _function(module: ModuleType, name: str, path: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if callable(found):
        return cast(Callable[[], Any], found)
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    has = f"\n  its functions: {', '.join(own)}; name one as {path}:{own[0]}" if own else ""
    raise InvalidModelFile(f"{path} has no function {name}().{has}\n{_EXPECTED}")


def _checked(model: Any, path: str, name: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidModelFile(f"{name}() of {path} returned {type(model).__name__}, expected an nn.Module")
    return model


def _call(function: Callable[..., Any], path: str, batch_size: int | None, seq_len: int | None, **more: Any) -> Any:
    """Calls with those of the arguments that are given and accepted; refuses to drop one that the user gave."""
    given = {"batch_size": batch_size, "seq_len": seq_len, **more}
    accepted = inspect.signature(function).parameters
    any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {k: v for k, v in given.items() if v is not None and (any_keyword or k in accepted)}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in accepted.values() if p.default is p.empty and p.kind in named]
    flags = {"batch_size": "--global-batch", "seq_len": "--seq"}
    for name in required:
        if name not in arguments:
            ask = f"pass {flags[name]} N" if name in flags else "give it a default"
            raise InvalidModelFile(f"{function.__name__} of {path} needs {name}, which has no default: {ask}")
    for name, flag in flags.items():
        if given.get(name) is not None and name not in arguments:
            raise InvalidModelFile(
                f"{flag} has no effect: {function.__name__} of {path} takes no argument {name}.\n"
                f"  expected def {function.__name__}(batch_size, seq_len)"
            )
    return function(**arguments)
