"""Python state that a forward can change besides tensors: attributes, containers, globals, closures and Python's random
numbers.

A snapshot holds a shallow copy of every container that forward may reach. Comparing the copies says what changed, and
putting them back undoes it.

    self.count += 1             the entry 'count' of vars(model)
    self.seen["a"] = x          the entry 'a' of the dict that the attribute 'seen' holds
    global CALLS; CALLS += 1    the entry 'CALLS' of the globals of the model's file
    random.random()             the state of the generator
"""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import io
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.ir.capture.module_equality import is_plain
from autopar.ir.capture.python_state.containers import PLAIN, Change, Held, attributes_of, contents, is_array
from autopar.ir.source import file_of, is_library, is_users
from autopar.ir.torch_private import BUFFERS, FORWARD_HOOKS, MODULES, PARAMETERS

# What globals and class attributes may hold for them to be watched, besides objects of the user's.
_KEPT = (*PLAIN, Tensor, list, dict, set, deque, random.Random, threading.local, contextvars.ContextVar)
# ``Change.slot`` of a generator of random numbers.
RANDOM = "random"
# Dicts of a module that are watched by themselves.
_PARTS = (BUFFERS, PARAMETERS, MODULES)
_OWN = frozenset(vars(nn.Module())) - {"training", *_PARTS}
# Of a larger container only the entries themselves are compared, not what they hold.
_LARGE = 4096
_DEEP = 12


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

    held: list[Held] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    """Names of what cannot be looked into: each use of it may give something else."""
    _generators: list[_Generator] = field(default_factory=list)
    # Functions under ``functools.lru_cache``, by name, and how often each was run.
    _remembering: list[tuple[str, Any, int]] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def take(cls, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Snapshot:
        """The Python state of a model and its loss function now."""
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
        """Entries that differ from the snapshot; the random numbers of Python and numpy last."""
        found = [change for held in self.held for change in held.changes()]
        found += [change for own in self._generators for change in own.changes()]
        return found

    def restore_buffers(self) -> None:
        """Put the buffers back that were replaced."""
        for held in self.held:
            if held.slot == BUFFERS:
                held.restore()

    def filled(self) -> list[str]:
        """The names of functions that remember results and have remembered more, unless all of it is plain data."""
        return [
            name
            for name, function, misses in self._remembering
            if function.cache_info().misses != misses and not _remembers_data(function)
        ]

    def replace(self, container: Any, other: Any) -> bool:
        """Put ``other`` in the place of a container, wherever one holds it; whether there is such a place."""
        places = [(held, key) for held in self.held for key, value in held.read().items() if value is container]
        for held, key in places if other is not None else ():
            held.put(key, other)
        return bool(places) and other is not None

    def restore(self) -> None:
        """Put everything back."""
        for held in self.held:
            held.restore()
        for _, function, misses in self._remembering:
            if function.cache_info().misses != misses:
                function.cache_clear()  # what it remembers may be tensors of a trace
        for own in self._generators:
            if any(True for _ in own.changes()):
                own.set(own.state)

    def tensors(self) -> list[Tensor]:
        """Tensors that the containers held."""
        found = (value for held in self.held for value in held.entries.values())
        return [value for value in found if isinstance(value, Tensor)]

    # The containers.

    def _module(self, name: str, path: str | None, module: nn.Module) -> None:
        """path: in the model; None of a module that is no part of it."""
        self._seen[id(module)] = module
        for slot in _PARTS:
            self.held.append(Held(getattr(module, slot), lambda key: f"{name}.{key}", module=path, slot=slot))
        self.held.append(
            Held(
                vars(module),
                lambda key: f"{name}.{key}",
                module=path,
                slot="attributes",
                only=lambda k, _: k not in _OWN,
            )
        )
        for key, value in vars(module).items():
            if key not in _OWN and key not in _PARTS:
                self._value(f"{name}.{key}", value)
        for kind in FORWARD_HOOKS:
            for hook in getattr(module, kind).values():
                self._value(f"a hook of {name}", hook)

    def _value(self, name: str, value: Any) -> None:
        """A container, or an object with attributes, and what it holds."""
        if isinstance(value, (*PLAIN, Tensor, types.ModuleType)) or id(value) in self._seen:
            return
        if name.count(".") + name.count("[") > _DEEP:
            return
        if isinstance(value, nn.Module):
            self._module(name, None, value)
        elif isinstance(value, types.FunctionType):
            self._code(value)
        elif isinstance(value, type):
            if is_users(file_of(value)):
                self._code(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._seen[id(value)] = value
            self._remembering.append((name, value, value.cache_info().misses))
            self._value(name, value.__wrapped__)
        elif isinstance(value, types.MethodType):
            self._code(value.__func__)
            self._value(f"{name}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self._inside(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
        elif isinstance(value, random.Random):
            self._generators.append(_Generator(name, value.getstate, value.setstate))
        elif hasattr(type(value), "bit_generator"):
            self._generators.append(_numpy_own(name, value))
        elif hasattr(type(value), "__next__"):
            self.iterators.append(name)
        elif isinstance(value, (dict, list, deque, set, tuple, frozenset)):
            self._seen[id(value)] = value
            held = Held(value, lambda key: f"{name}[{key!r}]")
            self.held.append(held)
            if len(held.entries) <= _LARGE:
                for key, item in held.entries.items():
                    self._value(f"{name}[{key!r}]", item)
        elif is_array(value) or isinstance(value, contextvars.ContextVar):
            self._seen[id(value)] = value
            self.held.append(Held(value, lambda _: name))
        elif (attributes := attributes_of(value)) is not None:
            self._seen[id(value)] = value
            own = getattr(value, "__dict__", None)
            containers = [own] if isinstance(own, dict) else []
            containers += [value] if len(attributes) > len(own or ()) else []
            self.held += [Held(container, lambda key: f"{name}.{key}") for container in containers]
            self._inside(name, attributes)

    def _inside(self, name: str, attributes: Mapping[str, Any]) -> None:
        for key, value in list(attributes.items()):
            self._value(f"{name}.{key}", value)

    def _code(self, code: Any) -> None:
        """What a class or function of the user's may write to: globals, closures, defaults, attributes of its own."""
        code = getattr(code, "__func__", code)
        if id(code) in self._seen:
            return
        if isinstance(code, type):
            if is_library(file_of(code)):
                return
            self._seen[id(code)] = code
            self._namespace(code, lambda key: f"{code.__name__}.{key}")
            for value in vars(code).values():
                function = getattr(value, "fget", getattr(value, "__func__", value))
                if isinstance(function, (types.FunctionType, functools._lru_cache_wrapper)):
                    self._value(f"{code.__name__}.{function.__name__}", function)
        elif isinstance(code, types.FunctionType):
            if is_library(file_of(code)):
                return
            self._seen[id(code)] = code
            for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
                if name != "__class__":
                    self.held.append(Held(cell, lambda _, name=name: name))  # type: ignore[misc]
                    self._value(name, contents(cell))
            self.held.append(Held(vars(code), lambda key: f"{code.__name__}.{key}"))
            self._inside(code.__name__, vars(code))
            self._value(f"{code.__name__}.__defaults__", (code.__defaults__, code.__kwdefaults__))
            self._globals(code.__globals__)

    def _globals(self, namespace: dict[str, Any]) -> None:
        """Those of a file, and of what of the user's it names."""
        if id(namespace) in self._seen:
            return
        self._seen[id(namespace)] = namespace
        self._namespace(namespace, str)
        for key, value in list(namespace.items()):
            if isinstance(value, functools._lru_cache_wrapper):
                self._value(key, value)
            elif isinstance(value, types.ModuleType) and is_users(getattr(value, "__file__", None)):
                self._globals(vars(value))
            elif isinstance(value, (types.FunctionType, type)) and is_users(file_of(value)):
                self._code(value)

    def _namespace(self, namespace: Any, name: Callable[[str], str]) -> None:
        """The data among the names of a class or a file."""
        held = Held(namespace, name, only=lambda key, value: not key.startswith("__") and _is_data(value))
        self.held.append(held)
        for key, value in held.entries.items():
            self._value(name(key), value)


def _is_data(value: Any) -> bool:
    # The class is asked: where a package is not there, a library may have classes that raise at every attribute.
    if isinstance(value, _KEPT) or is_array(value) or hasattr(type(value), "bit_generator"):
        return True
    iterates = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    return iterates or is_users(file_of(type(value)))


def _remembers_data(function: Any) -> bool:
    """Whether all arguments and results that a function under ``functools.lru_cache`` remembers are plain data."""
    known = (vars(function), function.__wrapped__)
    found = [value for value in gc.get_referents(function) if not any(value is own for own in known)]
    tables = [value for value in found if isinstance(value, dict)]
    others = [value for value in found if not isinstance(value, (dict, type)) and type(value) is not object]
    remembered = [leaf for table in tables for leaf in table.items()]
    return all(map(_is_plain_data, others)) and all(
        _is_plain_data(key) and (_is_plain_data(value) or type(value).__name__ == "_lru_list_elem")
        for key, value in remembered
    )


def _is_plain_data(value: Any) -> bool:
    return all(map(_is_plain_data, value)) if isinstance(value, tuple) else is_plain(value)
