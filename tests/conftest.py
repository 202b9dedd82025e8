"""Settings of all tests."""

import pytest
from hypothesis import settings

from autopar.ir.rules import repeat_warnings

# How long an example takes says more about the machine than about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Files that take minutes. If one of them starts last, one process runs it and the others idle.
LONGEST = (
    "test_parity.py", "test_faults.py", "test_cases.py", "test_eight_bits.py", "test_torchrun.py",
    "test_other_sizes.py", "test_pretrained.py", "test_placements.py", "test_collectives_issued.py", "test_check.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first, the others as they are."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    """Ops without a rule are named in each test, whatever earlier ones had to do with them."""
    repeat_warnings()
