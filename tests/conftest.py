"""Settings of all tests."""

import pytest
from hypothesis import settings

from autopar.ir.rules import repeat_warnings

# How long an example takes says more about the machine than about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    """Ops without a rule are named in each test, whatever earlier ones had to do with them."""
    repeat_warnings()
