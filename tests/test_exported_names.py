"""``autopar`` exports what its ``__all__`` promises, whatever is imported first."""

from __future__ import annotations

import types

import pytest

import autopar
import autopar.search.assign.instance
from autopar.ir import errors


@pytest.mark.parametrize("name", sorted(autopar.__all__))
def test_every_name_resolves(name: str) -> None:
    assert getattr(autopar, name) is not None
    assert name in dir(autopar)


def test_search_is_a_package_and_a_function() -> None:
    assert isinstance(autopar.search, types.ModuleType)
    assert callable(autopar.search)
    assert autopar.search.assign.instance.Instance is not None


def test_every_error_is_exported_and_in_the_tree() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    for error in classes:
        assert getattr(autopar, error.__name__) is error
        assert error.__name__ in autopar.__all__
        assert error in (errors.AutoparError, *errors.AutoparError.__subclasses__()), "the tree has one level"
    tree = [line.strip(" ├└─").partition(" ")[0] for line in (errors.__doc__ or "").splitlines() if line[:4] == "    "]
    assert tree == [error.__name__ for error in classes]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018
