"""The contract of a pass: a rewrite, with the properties of a program that it requires, provides and excludes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

Program = TypeVar("Program")


class Pass(ABC, Generic[Program]):
    """A rewrite of a program. A subclass is a frozen dataclass, its options fields; ``apply`` may edit in place.

    requires: what passes before it have to provide; conflicts: what they must not. provides: what it makes true.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def apply(self, program: Program) -> Program:
        """The rewritten program."""


def check_order(passes: Iterable[Pass[Any]], provided: frozenset[str] = frozenset()) -> None:
    """Raise AssertionError, naming the pass, where one would run without what it requires or after what it excludes."""
    for step in passes:
        missing, excluded = step.requires - provided, step.conflicts & provided
        assert not missing, f"{step.name} requires {', '.join(sorted(missing))}, which no pass before it provides"
        assert not excluded, f"{step.name} cannot run after {', '.join(sorted(excluded))}"
        provided |= step.provides
