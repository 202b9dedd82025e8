"""``autopar check`` finds what is planted in a plan of Llama-3-8B for 1,024 GPUs, and nothing in the plan as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.plan import Plan
from benchmarks.check import FAULTS, LIMITS, MODEL, run, searched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return searched(str(MODEL), LIMITS, tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, plan: Plan, tmp_path: Path) -> None:
    right, _, status, said = run(fault, str(MODEL), plan, tmp_path)
    assert right, (status, said)
