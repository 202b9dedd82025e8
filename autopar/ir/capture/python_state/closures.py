"""Functions that a model holds, such as hooks, close over the model: those of its copy have to close over the copy.

    self.act = lambda x: x * self.scale      deepcopy leaves functions as they are: on the copy, the lambda would still
                                             read the scale of the original

Functions are rebuilt whose closure or defaults hold something that was copied, be it in a list or another function.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from typing import Any

from torch import nn

from autopar.ir.capture.python_state.containers import contents


def rebind(twin: nn.Module, copies: dict[int, Any], function: Any = None) -> Any:
    """Have the functions that ``twin`` holds close over ``copies``: id of what was copied -> its copy.

    Returns ``function``, or one in its place that closes over the copies.
    """
    rebinding = _Rebinding(copies)
    for module in twin.modules():
        rebinding.of(vars(module), owned=True)
    return rebinding.of(function)


class _Rebinding:
    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = dict(copies)
        self._seen: dict[int, Any] = {}
        self._cells: dict[int, types.CellType] = {}

    def of(self, value: Any, *, owned: bool = False) -> Any:
        """What takes the place of ``value``. owned: it was copied, and may be changed."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) in self._seen:
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = (self.of(part) for part in parts)
            return value if (function, args, keywords) == parts else functools.partial(function, *args, **keywords)
        if isinstance(value, weakref.ref):
            target = value()
            return value if (copied := self.of(target)) is target else weakref.ref(copied)
        if isinstance(value, tuple):
            items = [self.of(item, owned=owned) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, (dict, list, deque)):
            return self._container(value, owned)
        if owned and isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, nn.Module)):
            self._seen[id(value)] = value
            self.of(vars(value), owned=True)
        return value

    def _container(self, value: Any, owned: bool) -> Any:
        self._seen[id(value)] = value
        entries = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        new = [(key, self.of(item, owned=owned)) for key, item in entries]
        changed = [(key, item) for (key, item), (_, old) in zip(new, entries, strict=True) if item is not old]
        if not changed:
            return value
        made = value if owned else copy.copy(value)
        for key, item in changed:
            made[key] = item
        if not owned:
            self._copies[id(value)] = made
        return made

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        self._seen[id(function)] = function  # which may close over itself
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults, keywords = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        same = all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True))
        if same and defaults is function.__defaults__ and keywords is function.__kwdefaults__:
            return function
        itself = types.CellType()
        closure = tuple(itself if contents(cell) is function else cell for cell in cells)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure or None)
        itself.cell_contents = made
        made.__kwdefaults__, made.__qualname__, made.__module__ = keywords, function.__qualname__, function.__module__
        vars(made).update(vars(function))
        self._copies[id(function)] = made
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._cells:
            old = contents(cell)
            new = self.of(old)
            self._cells[id(cell)] = cell if new is old else types.CellType(new)
        return self._cells[id(cell)]
