"""``autopar`` exports what its ``__all__`` promises, whatever is imported first."""

from __future__ import annotations

import types

import pytest

import autopar
import autopar.search.assign.instance


@pytest.mark.parametrize("name", sorted(autopar.__all__))
def test_every_name_resolves(name: str) -> None:
    assert getattr(autopar, name) is not None
    assert name in dir(autopar)


def test_search_is_a_package_and_a_function() -> None:
    assert isinstance(autopar.search, types.ModuleType)
    assert callable(autopar.search)
    assert autopar.search.assign.instance.Instance is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018
