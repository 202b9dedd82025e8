"""Between the names of a checkpoint's files and those of a model.

Some architectures of transformers rename tensors as they load, or make one out of several (the experts of a mixture
are stacked). What does so is transformers' own conversion, applied to lazy tensors: nothing is read here, and what is
stacked, concatenated, split or transposed is later read in slices. Other conversions read the whole of the tensors
that they convert, one parameter at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.pretrained import kept_names
from autopar.runtime.lazy_tensor import LazyTensor


def model_tensors(model: Any, files: Mapping[str, LazyTensor], source: str) -> dict[str, torch.Tensor]:
    """The tensors of ``model``'s state dict that a checkpoint holds, by their names in the model.

    model: a PreTrainedModel on the meta device. files: the tensors of the files. source: what to call them in errors.
    Raises CheckpointError if tensors are missing, unknown or of another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    # First of the names that a conversion gives -> what it is and what it has collected.
    collected: dict[str, Any] = {}
    unknown: list[str] = []
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unknown.append(key)
            continue
        plain = WeightRenaming(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
        collected.setdefault(name, plain).add_tensor(name, key, key if pattern is None else pattern, files[key])
    found: dict[str, torch.Tensor] = {}
    for name, transform in collected.items():
        found.update(_converted(transform, name, model, source))
    _check(model, expected, found, _not_ignored(unknown, model._keys_to_ignore_on_load_unexpected), source)
    return found


def file_tensors(model: Any, tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of ``model``, by name in its files, from its state dict.

    model: a PreTrainedModel on the meta device, alike to that whose tensors these are. Raises CheckpointError.
    """
    from transformers.core_model_loading import revert_weight_conversion

    _check(model, model.state_dict(), tensors, [], "the parallel module")
    groups: dict[int, list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(id(value), []).append(name)
    kept = kept_names(map(tuple, groups.values()), model.all_tied_weights_keys)
    ignored = model._keys_to_ignore_on_save or ()
    own = {name: value for name, value in tensors.items() if name in kept and name not in ignored}
    try:
        converted: dict[str, torch.Tensor] = revert_weight_conversion(model, own)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot bring the tensors of {type(model).__name__} back into the form of its checkpoints: "
            f"{error}\n  try: autopar.save, or full_state_dict()"
        ) from error
    return converted


def _converted(transform: Any, name: str, model: Any, source: str) -> dict[str, torch.Tensor]:
    try:
        found = transform.convert(name, model=model, config=model.config)
    except Exception as error:
        raise CheckpointError(
            f"{source}: transformers cannot make {name} out of what is there: {error}\n  try: load the checkpoint with "
            f"{type(model).__name__}.from_pretrained of transformers, and save it again"
        ) from error
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _check(
    model: Any, expected: Mapping[str, Any], found: Mapping[str, torch.Tensor], unknown: list[str], source: str
) -> None:
    """Raise CheckpointError unless ``found`` has all tensors of ``model``, tied ones under one name at least."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    absent = [tied[0] for tied in names.values() if not any(name in found for name in tied)]
    absent = _not_ignored(absent, model._keys_to_ignore_on_load_missing)
    problems = [f"{name} is missing" for name in absent]
    problems += [
        f"{name} has shape {tuple(value.shape)}, expected {tuple(expected[name].shape)}"
        for name, value in found.items()
        if name in expected and value.shape != expected[name].shape
    ]
    problems += [f"{name} is not in the model" for name in (*unknown, *(n for n in found if n not in expected))]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__} as its config describes it:\n{listed}{more}\n"
            "  try: the config.json that belongs to these weights; or load them with transformers, change the model "
            "there, and save it"
        )


def _not_ignored(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
