"""Containers that forward may change: what they hold, read and put back.

    dict, list, deque, set        their entries
    vars(object), __slots__       its attributes
    a class, a file's globals     those of their names that hold data
    a closure's cell, an array,   their contents, as entry 0
    a context variable

A ``Held`` keeps a shallow copy. Comparing it with what the container holds later says what changed.
"""

from __future__ import annotations

import contextvars
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
# An entry that is not there.
MISSING = object()

Entries = dict[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry, under ``key``, of a container that is not what it was.

    name: as the user would write it. module: path of the module whose attributes, ``_buffers`` or ``_parameters`` these
    are, as ``slot`` says. held: the container.
    now: the entry at any time; what it holds later is compared with ``old`` to find the line that changes it.
    """

    name: str
    old: Any
    new: Any
    now: Callable[[], Any]
    module: str | None = None
    slot: str = ""
    key: Any = None
    held: Held | None = None

    def happened(self) -> bool:
        """Whether the entry differs from its old value now."""
        return not same(self.old, self.now())


def same(old: Any, new: Any) -> bool:
    """Whether two entries are equal, if they are plain values, or one object."""
    if old is new:
        return True
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return type(old) is type(new) and (old == new or (old != old and new != new))
    return isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) and all(map(same, old, new))


class Held:
    """A container, as it was. name: how its entries are called; module and slot: of a module's own dicts.

    only: which of its entries count, by key and value.
    """

    def __init__(
        self,
        container: Any,
        name: Callable[[Any], str],
        *,
        module: str | None = None,
        slot: str = "",
        only: Callable[[Any, Any], bool] = lambda key, value: True,
    ) -> None:
        self.container, self.name, self.module, self.slot = container, name, module, slot
        self._only = only
        self.entries = self.read()

    def read(self) -> Entries:
        """Entries of the container now."""
        return {key: value for key, value in _read(self.container).items() if self._only(key, value)}

    def changes(self) -> Iterator[Change]:
        """The entries that were added, removed or replaced since."""
        before, after = self.entries, self.read()
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key, MISSING), after.get(key, MISSING)
            if not same(old, new):
                yield Change(
                    name=self.name(key),
                    old=old,
                    new=new,
                    now=lambda key=key: self.read().get(key, MISSING),  # type: ignore[misc]
                    module=self.module,
                    slot=self.slot,
                    key=key,
                    held=self,
                )

    def restore(self) -> None:
        """Put back what changed."""
        now = self.read()
        changed = {key: value for key, value in self.entries.items() if not same(value, now.get(key, MISSING))}
        added = dict.fromkeys((key for key in now if key not in self.entries), MISSING)
        if changed or added:
            _write(self.container, {**changed, **added}, self.entries)

    def put(self, key: Any, value: Any) -> None:
        """Put ``value`` in the place of an entry."""
        _write(self.container, {key: value}, {**self.read(), key: value})


def attributes_of(value: Any) -> Entries | None:
    """Attributes of an object, by name, in its ``__dict__`` and its slots; None if it has neither."""
    if isinstance(value, (type, types.ModuleType)):
        return None
    own = getattr(value, "__dict__", None)
    slots = [name for name in _slots(type(value)) if hasattr(value, name)]
    if not isinstance(own, dict) and not slots:
        return None
    return {**(own if isinstance(own, dict) else {}), **{name: getattr(value, name) for name in slots}}


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def contents(cell: types.CellType) -> Any:
    """Contents of a closure's cell; MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        found += [name for name in names if isinstance(vars(base).get(name), types.MemberDescriptorType)]
    return found


def _read(container: Any) -> Mapping[Any, Any]:
    if isinstance(container, dict):
        # Not through methods of a subclass, which may make what is asked for.
        return dict(dict.items(container))
    if isinstance(container, (set, frozenset)):
        return dict.fromkeys(container, True)
    if isinstance(container, (list, deque, tuple)):
        return dict(enumerate(container))
    if isinstance(container, types.CellType):
        return {0: contents(container)}
    if isinstance(container, contextvars.ContextVar):
        return {0: container.get(MISSING)}
    if is_array(container):
        return {0: container.item() if container.size == 1 else container.tobytes()}
    if isinstance(container, type):
        return vars(container)
    return {name: getattr(container, name) for name in _slots(type(container)) if hasattr(container, name)}


def _write(container: Any, entries: Entries, whole: Entries) -> None:
    """Put ``entries`` in; MISSING deletes one. whole: all that it holds then."""
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        for key, value in entries.items():
            if value is not MISSING:
                kind.__setitem__(container, key, value)  # type: ignore[arg-type]
            elif key in container:
                kind.__delitem__(container, key)  # type: ignore[arg-type]
    elif isinstance(container, set):
        container.clear()
        container.update(whole)
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(whole.values())
    elif isinstance(container, types.CellType):
        if entries[0] is MISSING:
            del container.cell_contents
        else:
            container.cell_contents = entries[0]
    elif isinstance(container, contextvars.ContextVar):
        if entries[0] is not MISSING:  # which nobody can put back
            container.set(entries[0])
    elif is_array(container):
        kept = entries[0]
        container[...] = kept if container.size == 1 else _array(kept, container)
    else:
        for key, value in entries.items():
            if value is MISSING:
                delattr(container, key)
            else:
                setattr(container, key, value)


def _array(content: bytes, like: Any) -> Any:
    import numpy

    return numpy.frombuffer(content, like.dtype).reshape(like.shape)
