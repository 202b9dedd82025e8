"""Kinds of models that went wrong once, under seven plans: exact, or refused with a message that says why.

``tests.cases`` holds the models, ``tests.parity`` says what is compared. One group of processes runs all cells of a
number of ranks, so the first test of each waits for all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import EXPERT_PLANS, PLANS, Cell, expected, run_cells

# Kinds that differ most; the further ones are marked slow.
FIRST = (
    "adapters", "backward_of_its_own", "hook_on_a_tensor", "parameter_only_loss", "recurrent", "spectral",
    "state_python", "torch_encoder", "unused_parameter",
)  # fmt: skip
ALL = sorted(p.stem for p in (Path(__file__).parents[1] / "cases").glob("*.py") if not p.stem.startswith("_"))
FURTHER = tuple(name for name in ALL if name not in FIRST)

_cells: dict[tuple[str, str], Cell] = {}


def _cell(cases: tuple[str, ...], case: str, plan: str) -> Cell:
    """The cell, run with all others of ``cases`` that have as many ranks."""
    if (case, plan) not in _cells:
        plans = [name for name in PLANS if PLANS[name][0] == PLANS[plan][0]]
        _cells.update({(cell.case, cell.plan): cell for cell in run_cells(cases, plans)})
    return _cells[case, plan]


def _check(cell: Cell) -> None:
    verdict, text = expected(cell.case, cell.plan)
    assert cell.verdict == verdict, f"expected {verdict}: {cell}\n{cell.text}"
    assert text in cell.text, f"expected {text!r}: {cell}"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", FIRST)
def test_first_case_of_a_kind(case: str, plan: str) -> None:
    _check(_cell(FIRST, case, plan))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", FURTHER)
def test_further_case_of_a_kind(case: str, plan: str) -> None:
    _check(_cell(FURTHER, case, plan))


@pytest.mark.slow
def test_stacks_of_matrices_on_an_axis_for_experts() -> None:
    cells = list(run_cells(["stacked_experts"], list(EXPERT_PLANS)))
    assert len(cells) == len(EXPERT_PLANS)
    for cell in cells:
        _check(cell)
