"""What a module that wraps private names of torch offers, and a case for each, which fails under its name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType


class Cases(dict[str, Callable[[], None]]):
    """Name -> what checks it."""

    def of(self, *names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """The decorated function is the case of ``names``."""

        def register(check: Callable[[], None]) -> Callable[[], None]:
            assert not self.keys() & set(names)
            self.update(dict.fromkeys(names, check))
            return check

        return register


def public_names(module: ModuleType) -> set[str]:
    """What a module defines without an underscore in front, and what it hands on in ``__all__``."""
    found = set(getattr(module, "__all__", ()))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
    return {name for name in found if not name.startswith("_")}
