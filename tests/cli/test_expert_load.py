"""How many tokens experts got, from a run or a file, to the search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.api import constraints_of
from autopar.cli.request import read_loads
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan, InvalidInput
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from tests.search.test_outer import Chain


def test_what_a_module_counted_is_a_constraint() -> None:
    counted = {"layers.0.mlp": torch.tensor([3, 1]), "layers.1.mlp": torch.tensor([2, 2])}
    found = constraints_of({"expert_load": counted})
    assert found.expert_load == ((3, 1), (2, 2))
    assert constraints_of({"expert_load": [[3, 1]]}).expert_load == ((3, 1),)
    with pytest.raises(InvalidInput, match="expert_load: int does not say how many tokens experts got"):
        constraints_of({"expert_load": 7})
    with pytest.raises(InfeasiblePlan, match="negative counts"):
        constraints_of({"expert_load": [[3, -1]]}).check(1, 1)


def test_counts_of_another_model_are_refused() -> None:
    inputs = torch.zeros(4, 8, 16, device="meta"), torch.zeros(4, 8, 16, device="meta")
    with torch.device("meta"):
        captured = normalise(capture(Chain((16, 16)), inputs, name="chain"))
    with pytest.raises(InfeasiblePlan, match="expert_load has layers of 2 experts; those of chain have no experts"):
        search_captured(captured, make_cluster("cpu", 2), Constraints(expert_load=((3, 1),)))


def test_a_file_of_counts(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"layers.0.mlp": [3, 1], "layers.1.mlp": [2, 2]}))
    assert read_loads(path) == ((3, 1), (2, 2))
    for text in ("[3, 1]", '{"layer": ["many"]}'):
        path.write_text(text)
        with pytest.raises(InfeasiblePlan, match=r"does not say how many tokens experts got\n  expected \{"):
            read_loads(path)
    path.write_text("{")
    with pytest.raises(InfeasiblePlan, match="is not JSON"):
        read_loads(path)
    with pytest.raises(InfeasiblePlan, match="cannot read expert load"):
        read_loads(tmp_path / "none.json")
