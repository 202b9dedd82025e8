"""What a forward can change besides tensors: attributes, containers, globals, closures and Python's random numbers.

A snapshot holds a shallow copy of every container that forward may reach. Comparing the copies says what changed, and
putting them back undoes it.

    self.count += 1             the entry 'count' of vars(model)
    self.seen["a"] = x          the entry 'a' of the dict that the attribute 'seen' holds
    global CALLS; CALLS += 1    the entry 'CALLS' of the globals of the model's file
    random.random()             the state of the generator
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.source import is_library

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
# What globals and class attributes may hold for them to be watched.
_KEPT = (*_PLAIN, Tensor, list, dict, set, deque)
# ``Change.slot`` of a generator of random numbers.
RANDOM = "random"
_OWN = frozenset(vars(nn.Module())) - {"training", "_buffers", "_parameters"}
# Of a larger container only the entries themselves are compared, not what they hold.
_LARGE = 4096
_DEEP = 12
# An entry that is not there.
MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry, under ``key``, of a container that is not what it was.

    name: as the user would write it. module: path of the module whose attributes, ``_buffers`` or ``_parameters`` these
    are, as ``slot`` says.
    now: the entry at any time; what it holds later is compared with ``old`` to find the line that changes it.
    """

    name: str
    old: Any
    new: Any
    now: Callable[[], Any]
    module: str | None = None
    slot: str = ""
    key: Any = None

    def happened(self) -> bool:
        return not same(self.old, self.now())


def same(old: Any, new: Any) -> bool:
    """Whether two entries are equal, if they are plain values, or one object."""
    if old is new:
        return True
    if isinstance(old, _PLAIN) and isinstance(new, _PLAIN):
        return type(old) is type(new) and (old == new or (old != old and new != new))
    return isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) and all(map(same, old, new))


@dataclass(frozen=True, slots=True)
class _Held:
    """A container, as it was. name: how its entries are called; module and slot: of a module's own dicts."""

    container: Any
    copy: Any
    name: Callable[[Any], str]
    module: str | None = None
    slot: str = ""
    only: frozenset[str] | None = None

    def entries(self, of: Any) -> dict[Any, Any]:
        if isinstance(of, dict):
            # Not through methods of a subclass, which may make what is asked for.
            entries = dict(dict.items(of))
            if self.only is not None:
                return {key: value for key, value in entries.items() if key in self.only}
            return {key: value for key, value in entries.items() if self.slot != "attributes" or key not in _OWN}
        if isinstance(of, (set, frozenset)):
            return dict.fromkeys(of, True)
        if isinstance(of, types.CellType):
            return {0: _contents(of)}
        if isinstance(of, type):
            return {key: value for key, value in vars(of).items() if self.only is not None and key in self.only}
        return dict(enumerate(of))

    def changes(self) -> Iterator[Change]:
        before, after = self.entries(self.copy), self.entries(self.container)
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key, MISSING), after.get(key, MISSING)
            if not same(old, new):
                yield Change(
                    name=self.name(key),
                    old=old,
                    new=new,
                    now=lambda key=key: self.entries(self.container).get(key, MISSING),  # type: ignore[misc]
                    module=self.module,
                    slot=self.slot,
                    key=key,
                )

    def restore(self) -> None:
        before, after = self.entries(self.copy), self.entries(self.container)
        changed = [key for key, value in before.items() if not same(value, after.get(key, MISSING))]
        added = [key for key in after if key not in before]
        if not changed and not added:
            return
        if isinstance(self.container, dict):
            kind = OrderedDict if isinstance(self.container, OrderedDict) else dict
            for key in added:
                kind.__delitem__(self.container, key)  # type: ignore[arg-type]
            for key in changed:
                kind.__setitem__(self.container, key, before[key])  # type: ignore[arg-type]
        elif isinstance(self.container, type):
            for key in changed:
                setattr(self.container, key, before[key])
        elif isinstance(self.container, types.CellType):
            if before[0] is MISSING:
                del self.container.cell_contents
            else:
                self.container.cell_contents = before[0]
        elif isinstance(self.container, set):
            self.container.clear()
            self.container.update(self.copy)
        elif isinstance(self.container, (list, deque)):
            self.container.clear()
            self.container.extend(self.copy)


@dataclass(slots=True)
class _Generator:
    """A generator of random numbers that are not torch's, as it was."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any = None

    def __post_init__(self) -> None:
        self.state = self.get()

    def changes(self) -> Iterator[Change]:
        if (new := self.get()) != self.state:
            yield Change(name=self.name, old=self.state, new=new, now=self.get, slot=RANDOM)


def _numpy_global(module: Any) -> _Generator:
    def state() -> Any:
        kind, keys, *rest = module.get_state()
        return (kind, tuple(keys.tolist()), *rest)

    return _Generator("numpy.random", state, lambda own: module.set_state((own[0], list(own[1]), *own[2:])))


def _numpy_own(name: str, generator: Any) -> _Generator:
    bits = generator.bit_generator
    saved = copy.deepcopy(bits.state)
    return _Generator(name, lambda: repr(bits.state), lambda _: setattr(bits, "state", saved))


@dataclass(slots=True)
class Snapshot:
    """The Python state that a call of ``model``, and of a loss function, may change."""

    held: list[_Held] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    """Names of what cannot be looked into: each use of it may give something else."""
    _generators: list[_Generator] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def take(cls, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Snapshot:
        found = cls()
        found._generators.append(_Generator("random", random.getstate, random.setstate))
        if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
            found._generators.append(_numpy_global(numpy.random))
        roots = [("self", model)] + ([("loss_fn", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
        code: list[Any] = [loss_fn]
        found._seen = {id(module): module for _, top in roots for module in top.modules()}
        for root, top in roots:
            for path, module in top.named_modules():
                name = f"{root}.{path}" if path else root
                found._module(name, path, module)
                code += [vars(module).get("forward"), *type(module).__mro__]
        for one in dict.fromkeys(filter(None, code)):
            found._code(one)
        return found

    def changes(self) -> list[Change]:
        """What is no longer as it was; the random numbers of Python and numpy last."""
        found = [change for held in self.held for change in held.changes()]
        found += [change for own in self._generators for change in own.changes()]
        return found

    def restore_buffers(self) -> None:
        """Put the buffers back that were replaced."""
        for held in self.held:
            if held.slot == "_buffers":
                held.restore()

    def restore(self) -> None:
        """Put everything back."""
        for held in self.held:
            held.restore()
        for own in self._generators:
            if any(True for _ in own.changes()):
                own.set(own.state)

    def tensors(self) -> list[Tensor]:
        """Those that the containers held."""
        found = (value for held in self.held for value in held.entries(held.copy).values())
        return [value for value in found if isinstance(value, Tensor)]

    # The containers.

    def _module(self, name: str, path: str | None, module: nn.Module) -> None:
        """path: in the model; None of a module that is no part of it."""
        self._seen[id(module)] = module
        for slot, own in (("_buffers", module._buffers), ("_parameters", module._parameters)):
            self.held.append(_Held(own, dict(own), lambda key: f"{name}.{key}", path, slot))
        own = vars(module)
        self.held.append(_Held(own, dict(own), lambda key: f"{name}.{key}", path, "attributes"))
        for key, value in own.items():
            if key not in _OWN and key not in ("_buffers", "_parameters"):
                self._value(f"{name}.{key}", value)

    def _value(self, name: str, value: Any) -> None:
        """A container, or an object with attributes, and what it holds."""
        if isinstance(value, (*_PLAIN, Tensor, type, types.ModuleType)) or id(value) in self._seen:
            return
        if name.count(".") + name.count("[") > _DEEP:
            return
        if isinstance(value, nn.Module):
            self._module(name, None, value)
            return
        if isinstance(value, types.FunctionType):
            self._code(value)
            return
        if isinstance(value, random.Random):
            self._generators.append(_Generator(name, value.getstate, value.setstate))
            return
        if hasattr(value, "bit_generator"):
            self._generators.append(_numpy_own(name, value))
            return
        if hasattr(value, "__next__"):
            self.iterators.append(name)
            return
        if isinstance(value, dict):
            entries = dict(dict.items(value))
            items = entries.items()
            self.held.append(_Held(value, entries, lambda key: f"{name}[{key!r}]"))
        elif isinstance(value, (list, deque, set)):
            kept = set(value) if isinstance(value, set) else list(value)
            self.held.append(_Held(value, kept, lambda key: f"{name}[{key!r}]"))
            items = dict(enumerate(value)).items()
        elif isinstance(value, (tuple, frozenset)):
            items = dict(enumerate(value)).items()
        elif isinstance(getattr(value, "__dict__", None), dict):
            own = vars(value)
            self.held.append(_Held(own, dict(own), lambda key: f"{name}.{key}"))
            self._seen[id(value)] = value
            for key, item in list(own.items()):
                self._value(f"{name}.{key}", item)
            return
        else:
            return
        self._seen[id(value)] = value
        if len(items) <= _LARGE:
            for key, item in list(items):
                self._value(f"{name}[{key!r}]", item)

    def _code(self, code: Any) -> None:
        """What a class or function of the user's may write to: its globals, closures and class attributes."""
        code = getattr(code, "__func__", code)
        if isinstance(code, type):
            if is_library(getattr(sys.modules.get(code.__module__), "__file__", None) or "<"):
                return
            own = {k: v for k, v in vars(code).items() if isinstance(v, _KEPT) and not k.startswith("__")}
            self.held.append(_Held(code, own, lambda key: f"{code.__name__}.{key}", only=frozenset(own)))
            for key, value in own.items():
                self._value(f"{code.__name__}.{key}", value)
            functions = [getattr(v, "__func__", v) for v in vars(code).values()]
            for function in functions:
                if isinstance(function, types.FunctionType):
                    self._code(function)
        elif isinstance(code, types.FunctionType) and id(code) not in self._seen:
            if is_library(code.__code__.co_filename):
                return
            self._seen[id(code)] = code
            for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
                if name != "__class__":
                    self.held.append(_Held(cell, (_contents(cell),), lambda _, name=name: name))  # type: ignore[misc]
                    self._value(name, _contents(cell))
            self._globals(code.__globals__)

    def _globals(self, namespace: dict[str, Any]) -> None:
        if id(namespace) in self._seen:
            return
        self._seen[id(namespace)] = namespace
        watched = frozenset(k for k, v in namespace.items() if isinstance(v, _KEPT) and not k.startswith("__"))
        self.held.append(_Held(namespace, {k: namespace[k] for k in watched}, str, only=watched))
        for key in watched:
            self._value(key, namespace[key])


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
