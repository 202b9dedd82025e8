"""Stand-ins for a number or a collection that forward only writes: reading one ends the call.

self.calls += 1                  goes on
if self.calls % 10 == 0: ..      raises IsRead
self.log.append(loss.detach())   goes on
torch.stack(self.log)            raises
"""

from __future__ import annotations

from collections import deque
from typing import Any


class IsRead(Exception):
    """Something comes of what was taken to be only written."""


def write_only(value: Any) -> Any:
    """A stand-in for a number, a list, a deque, a set or a dict; None for anything else."""
    if type(value) in (int, float):
        return COUNT
    return _Collection() if type(value) in (list, deque, set, dict) else None


def _is_read(self: object, *args: object, **kwargs: object) -> Any:
    raise IsRead


def _counted(self: object, other: object) -> Any:
    if type(other) in (int, float) or other is self:
        return self
    raise IsRead


def _ignored(self: object, *args: object, **kwargs: object) -> None:
    pass


# What Python itself does with every object, and what tells of it in a log.
_ALLOWED = frozenset(
    ("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__", "__getattribute__")
    + ("__setattr__", "__delattr__", "__dir__", "__sizeof__", "__getstate__", "__repr__", "__str__", "__format__")
)
_COUNTING = ("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__")
_REFUSED = {
    name: _is_read
    for kind in (int, float, list, dict, set, object)
    for name in vars(kind)
    if name.startswith("__") and name not in _ALLOWED
}

# It is no number itself, or ``table[count]`` would go unnoticed.
COUNT = type("Count", (), {**_REFUSED, **dict.fromkeys(_COUNTING, _counted), "__format__": lambda self, spec: "0"})()

_COLLECTING = ("append", "appendleft", "extend", "add", "update", "clear", "__setitem__")
_Collection = type(
    "Collection", (), {**_REFUSED, **dict.fromkeys(_COLLECTING, _ignored), "__iadd__": lambda self, other: self}
)
