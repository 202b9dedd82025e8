"""Equality of modules: the same code on parameters of the same shapes.

Two siblings are alike if their whole trees are equal: classes, shapes and dtypes of parameters and buffers, and plain
attributes. Only integers that count them (``self.layer_idx``) may differ. Anything that cannot be compared makes them
different, which costs time and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.ir.torch_private import own_buffers, own_parameters
from autopar.ir.torch_private_symbols import expression_of_symbol, is_symbolic

# Attributes of every nn.Module that say nothing about what it computes, or are compared on their own.
_OWN = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_COUNTED = "counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Siblings that are alike.

    members: (path, module). counts: attributes that count them, as ``attention.layer_idx``.
    """

    members: tuple[tuple[str, nn.Module], ...]
    counts: frozenset[str]


def groups_alike(model: nn.Module, *, at_least: int) -> list[Group]:
    """Groups of at least so many, from the top of the module tree; none within another."""
    used = Counter(id(tensor) for tensor in _tensors(model))
    return list(_groups("", model, at_least, used))


def _groups(path: str, module: nn.Module, at_least: int, used: Counter[int]) -> Iterator[Group]:
    children = list(module.named_children())
    by_class: dict[type, list[tuple[int, nn.Module]]] = {}
    for position, (_, child) in enumerate(children):
        by_class.setdefault(type(child), []).append((position, child))
    found: dict[Hashable, list[tuple[str, nn.Module]]] = {}
    counts: dict[Hashable, frozenset[str]] = {}
    for siblings in by_class.values():
        counted = _counted(siblings) if len(siblings) >= at_least else frozenset()
        for position, child in siblings:
            name = children[position][0]
            key: Hashable = position
            if len(siblings) >= at_least and not _is_primitive(child) and not _shares(child, used):
                key = (type(child), _signature(child, counted))
            found.setdefault(key, []).append((f"{path}.{name}" if path else name, child))
            counts[key] = counted
    for key, members in found.items():
        if len(members) >= at_least:
            yield Group(members=tuple(members), counts=counts[key])
        else:
            for own, child in members:
                yield from _groups(own, child, at_least, used)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer, as often as the module tree holds it."""
    for part in module.modules():
        for tensor in (*own_parameters(part).values(), *own_buffers(part).values()):
            if tensor is not None:
                yield tensor


def _is_primitive(module: nn.Module) -> bool:
    """Whether it is a Linear, a Dropout or the like, which is traced at once."""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _shares(module: nn.Module, used: Counter[int]) -> bool:
    """Whether a parameter or buffer of ``module`` is also another module's."""
    return any(used[key] > count for key, count in Counter(id(tensor) for tensor in _tensors(module)).items())


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                yield f"{path}.{name}", value


def _counted(siblings: list[tuple[int, nn.Module]]) -> frozenset[str]:
    """Attributes that hold, in every sibling, its position, or that plus a constant."""
    offsets: dict[str, list[int]] = {}
    for position, child in siblings:
        for name, value in _attributes(child):
            if type(value) is int:
                offsets.setdefault(name, []).append(value - position)
    return frozenset(name for name, own in offsets.items() if len(own) == len(siblings) and len(set(own)) == 1)


def _signature(module: nn.Module, counted: frozenset[str]) -> Hashable:
    parts: list[Hashable] = []
    for path, part in module.named_modules():
        for name in _HOOKS:
            parts += [("hook", path, name, id(hook)) for hook in vars(part)[name].values()]
        tensors = (*own_parameters(part).items(), *own_buffers(part).items())
        parts.append((path, type(part), tuple((name, shape_key(tensor)) for name, tensor in tensors)))
    parts += [(name, _COUNTED if name in counted else plain(value)) for name, value in _attributes(module)]
    return tuple(parts)


def shape_key(tensor: Tensor | None) -> Hashable:
    """Shape, strides, dtype and requires_grad of a tensor; None for None."""
    if tensor is None:
        return None
    sizes = (*tensor.shape, *tensor.stride())
    keys = tuple(expression_of_symbol(size) if is_symbolic(size) else size for size in sizes)
    return keys, tensor.dtype, tensor.requires_grad


_DATA = (int, float, str, bytes, complex, torch.dtype, torch.device, type, type(None))


def is_plain(value: object) -> bool:
    """Whether a value says all about itself, and cannot change."""
    return isinstance(value, _DATA)


def state_of(module: nn.Module) -> Hashable:
    """State of a module tree: values of its attributes and of objects there, and the identity of its buffers.

    The same before and after a call that changes nothing but tensors.
    """
    found: list[Hashable] = [id(buffer) for buffer in module.buffers()]
    objects: dict[int, object] = {}
    for name, value in _attributes(module):
        found.append((name, plain(value)))
        if hasattr(value, "__dict__") and not isinstance(value, (type, Tensor, nn.Module)):
            objects[id(value)] = value
    for key, value in objects.items():
        found.append((key, tuple((name, plain(item)) for name, item in vars(value).items())))
    return tuple(found)


def plain(value: object) -> Hashable:
    """A hashable twin of an attribute; of what is not plain data, its identity."""
    if is_plain(value):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(plain, value)))
    if isinstance(value, dict):
        return (type(value), tuple((plain(key), plain(item)) for key, item in value.items()))
    return (type(value), id(value))
