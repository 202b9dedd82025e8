"""Public functions say what they return, and identifiers use the field's words."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
import types
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.test_layering import PACKAGE, ROOT, modules

# Packages that are extras: a module that needs one is read only where it is installed.
EXTRAS = ("plotly", "ray", "transformers", "peft", "safetensors")

# Retired words, as parts of identifiers, and the words in their place.
RETIRED = {
    "calm": "noise_free",
    "dearer": "a Lagrange multiplier",
    "exchanged": "dispatched",
    "fold": "zigzag layout, block repetition",
    "folded": "zigzag layout, block repetition",
    "folding": "block repetition",
    "folds": "zigzag layout",
    "fullest": "peak",
    "glance": "relaxed solve",
    "hope": "estimate",
    "hopeless": "pruned",
    "leaders": "assignment",
    "mixture": "mixture of experts, moe",
    "mixtures": "mixture of experts, moe",
    "moment": "memory profile, peak",
    "moments": "memory profile, peak",
    "outlook": "estimate",
    "pace": "partial configuration",
    "paces": "partial configuration",
    "theta": "unaries",
}
# Retired in the search alone: elsewhere a leaf is one of a tree of arguments, a unit one of measure, a load one of
# tokens.
RETIRED_IN_SEARCH = {
    "again": "retry, recomputed",
    "flows": "factors",
    "leaf": "configuration",
    "leaves": "configurations",
    "load": "workload",
    "selection": "labelling",
    "unit": "variable",
    "units": "variables",
    "waits": "delays",
}
# Names of others, and words with another meaning: identifier -> where it comes from.
EXCEPTIONS = {
    "MixtureOfExperts": "the field's own word",
    "_check_expert_load": "tokens per expert",
    "expert_load": "tokens per expert",
    "fold": "torch.nn.functional.fold",
}


CODE = (types.FunctionType, classmethod, staticmethod, property, cached_property)


def undocumented(name: str, value: Any) -> Iterator[str]:
    """The public code under ``value`` without a docstring. A method inherits that of the method it overrides."""
    if isinstance(value, type):
        text = vars(value).get("__doc__")
        # Dataclasses and named tuples write their own.
        if not text or text.startswith(f"{value.__name__}("):
            yield name
        for own, member in vars(value).items():
            if not own.startswith("_") and isinstance(member, CODE) and not inspect.getdoc(member):
                yield f"{name}.{own}"
    elif callable(value) and not inspect.getdoc(value):
        yield name


def test_every_public_function_is_documented() -> None:
    missing: list[str] = []
    for name, path in modules():
        extras = [extra for extra in EXTRAS if re.search(rf"^(import|from) {extra}\b", path.read_text(), re.MULTILINE)]
        if name.endswith("__main__") or not all(map(find_spec, extras)):
            continue
        for own, value in vars(import_module(name)).items():
            if not own.startswith("_") and getattr(value, "__module__", None) == name:
                missing += undocumented(f"{name}.{own}", value)
    assert not missing


def words_of(identifier: str) -> set[str]:
    """The words of an identifier in snake case or camel case."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_"))


@pytest.mark.parametrize("folder", ["autopar", "cost_model", "passes", "runtime", "tests", "benchmarks", "examples"])
def test_no_identifier_has_a_retired_word(folder: str) -> None:
    found: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        retired = RETIRED | (RETIRED_IN_SEARCH if PACKAGE / "search" in path.parents else {})
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and token.string not in EXCEPTIONS:
                for word in words_of(token.string) & retired.keys():
                    where = f"{path.relative_to(ROOT)}:{token.start[0]}"
                    found.append(f"{where} {token.string}: say {retired[word]} in place of {word}")
    assert not found
