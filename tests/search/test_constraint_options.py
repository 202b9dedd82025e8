"""Type checkers know the constraints that there are."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

import pytest
import torch
from torch.distributed.tensor import Shard
from typing_extensions import Unpack, get_type_hints

import autopar
from autopar.api import constraints_of
from autopar.ir.offload import Offload
from autopar.ir.recipe_pins import RecipePin
from autopar.search.problem.constraint_options import SHORT, ConstraintOptions
from autopar.search.problem.constraints import Constraints

FIELDS = get_type_hints(Constraints)
OPTIONS = get_type_hints(ConstraintOptions)
WEIGHTS = autopar.constrain("*.weight", {"tp": Shard(0)})
# Options that are taken in other forms than that of their field -> such forms, and what they are read as.
READ: dict[str, list[tuple[Any, Any]]] = {
    "sequence_parallel": [("on", True), ("off", False), (None, None)],
    "annotations": [(WEIGHTS, (WEIGHTS,)), ([WEIGHTS], (WEIGHTS,))],
    "precision": [("bf16", "bf16"), ("fp8-row", "bf16"), ("fp32+fp8-tensor", "fp32"), ("bf16,fp8-row", "bf16")],
    "recipe_pins": [
        ({"*.up.weight": "fp8-row"}, (RecipePin(pattern="*.up.weight", recipe="fp8-row"),)),
        ({"*": "bf16"}, (RecipePin(pattern="*", recipe=None, precision="bf16"),)),
    ],
    "offload": [(True, Offload.HOST), (False, Offload.NONE), ("disk", Offload.DISK), (None, None)],
    "remat": [("full", "full"), ("40%", 0.4), (0.4, 0.4), (None, None)],
    "activation_memory": [("20GiB", 20 * 2**30), (1e9, 1e9), (None, None)],
    "expert_load": [({"layer": torch.tensor([1, 2])}, ((1, 2),)), ([[1, 2]], ((1, 2),))],
}


def choices(hint: Any) -> set[Any]:
    return set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}


def test_options_are_the_fields_and_their_short_names() -> None:
    assert OPTIONS.keys() == FIELDS.keys() | SHORT.keys()
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(Constraints)}
    assert not ConstraintOptions.__required_keys__


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - READ.keys()))
def test_an_option_has_the_type_of_its_field(name: str) -> None:
    assert choices(OPTIONS[name]) == choices(FIELDS[name])


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_short_name_has_the_type_of_the_long_one(name: str) -> None:
    assert OPTIONS[name] == OPTIONS[SHORT[name]]


@pytest.mark.parametrize(("name", "form", "value"), [(name, *one) for name, own in READ.items() for one in own])
def test_other_forms_are_read(name: str, form: Any, value: Any) -> None:
    assert getattr(constraints_of({name: form}), name) == value


@pytest.mark.parametrize("function", [autopar.parallelize, autopar.from_pretrained, autopar.api.search])
def test_public_functions_take_them(function: Callable[..., Any]) -> None:
    assert get_type_hints(function, include_extras=True)["constraints"] == Unpack[ConstraintOptions]


def test_unknown_ones_are_refused() -> None:
    with pytest.raises(autopar.InvalidInput, match="unknown constraint 'dtp'"):
        constraints_of({"dtp": 2})


@pytest.mark.parametrize("schedules", [(), ("1f1b", "1f2b"), ("found",)])
def test_schedules_that_no_search_tries_are_refused(schedules: tuple[Any, ...]) -> None:
    with pytest.raises(autopar.InfeasiblePlan, match="the search tries some of 1f1b, zb-h1"):
        constraints_of({"schedules": schedules}).check(4, 8)
