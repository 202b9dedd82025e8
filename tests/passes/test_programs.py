"""The program of one rank after every pass, as text that was read and kept; and the contracts of passes."""

from __future__ import annotations

import pytest

from autopar.passes.contract import check_order
from autopar.passes.localise_shapes import LocaliseShapes
from autopar.passes.lower_ops import LowerOps
from autopar.passes.partition import PASSES
from tests.passes.golden.programs import CASES, path_of, texts, written


@pytest.mark.parametrize("name", CASES)
def test_every_pass_makes_of_a_program_what_it_is_known_to(name: str) -> None:
    assert written(texts(CASES[name])) == path_of(name).read_text()


def test_a_pass_runs_after_those_that_provide_what_it_requires() -> None:
    check_order(PASSES, frozenset({"redistributions"}))
    with pytest.raises(AssertionError, match="lower-ops requires local shapes, which no pass before it provides"):
        check_order((LowerOps(), LocaliseShapes()), frozenset({"redistributions"}))


def test_a_pass_does_not_run_twice() -> None:
    with pytest.raises(AssertionError, match="localise-shapes cannot run after local shapes"):
        check_order((LocaliseShapes(), LocaliseShapes()), frozenset({"redistributions"}))
