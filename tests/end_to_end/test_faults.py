"""Twelve faults at random moments: all losses are those of an undisturbed run, and no reported step is lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from benchmarks.faults import OTHER_PLAN, SETTINGS, soak

KINDS = {
    "gpt-dp-tp": ["kill-one", "stop", "kill-two", "damage", "kill-launcher", "term-rank"],
    "gpt-pp": ["kill-two", "kill-launcher", "kill-one", "stop", "term-rank", "kill-one"],
}


@pytest.mark.parametrize("setting", ["gpt-dp-tp", pytest.param("gpt-pp", marks=pytest.mark.slow)])
def test_a_run_survives_what_happens_to_it(setting: str, tmp_path: Path) -> None:
    draw = random.Random(setting)
    (tmp_path / "disk").mkdir()
    try:
        faults, difference = soak(SETTINGS[setting], KINDS[setting], draw, tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert [fault.kind for fault in faults] == KINDS[setting]
    assert difference <= OTHER_PLAN
    assert not [fault for fault in faults if fault.lost and fault.partner_left]
    assert all(fault.resumed >= fault.saved for fault in faults)
    assert all(fault.said for fault in faults)
