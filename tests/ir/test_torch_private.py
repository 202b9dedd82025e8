"""What is private in torch is still there and does what is relied on: a case for each name of ``ir.torch_private``."""

from __future__ import annotations

import pytest

from autopar.ir import torch_private as private
from tests.ir import torch_private_ops, torch_private_traces
from tests.private_names import public_names

CASES = torch_private_ops.cases | torch_private_traces.cases


def test_every_name_has_a_case() -> None:
    assert set(CASES) == public_names(private)
    assert not set(torch_private_ops.cases) & set(torch_private_traces.cases)


@pytest.mark.parametrize("name", sorted(public_names(private)))
def test_torch_has(name: str) -> None:
    CASES[name]()
