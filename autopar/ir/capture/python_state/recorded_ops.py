"""The ops of a call of forward, as they are compared with those of another call.

    first call     arange, sin          self.table is made, once
                   linear, add          reads what arange and sin give
    second call    linear, add          the same: the table is told by how it was made

A tensor that is made of nothing but numbers and of tensors that no call writes is a *constant*: it is told by its ops,
which are left out. All others are told by the order in which they are met.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.capture.functional_twins import is_write
from autopar.ir.source import line_here
from autopar.ir.torch_private import FakeTensor, TorchDispatchMode, no_modes, pytree, schema_of, storage_of

# Elements up to which a tensor is told by its values.
_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a call, compared without ``line``, where the user's code calls it."""

    name: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    line: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor as an op meets it. data: a digest of its values, of a small one that has values."""

    tensor: Tensor
    storage: int
    view: tuple[Any, ...]
    data: Hashable = None

    @classmethod
    def of(cls, tensor: Tensor) -> _Leaf:
        # Sizes that depend on values have other names in every call.
        shape, stride = (
            tuple(n if type(n) is int else type(n) for n in sizes) for sizes in (tensor.shape, tensor.stride())
        )
        view = (shape, stride, tensor.storage_offset(), tensor.dtype)
        return cls(tensor, storage_of(tensor), view, _data(tensor))


@dataclass(frozen=True, slots=True)
class _Event:
    func: Any
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    written: tuple[int, ...]
    line: str


class Recorder(TorchDispatchMode):
    """Keeps the ops of one call, and every tensor that they meet, so that its storage stands for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[_Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # what a fake tensor asks itself, and remembers
            return func(*args, **kwargs)
        operands = tuple(map(_leaf, pytree.tree_leaves((args, kwargs))))
        result = func(*args, **kwargs)
        written = [
            kwargs.get(argument.name, args[place] if place < len(args) else None)
            for place, argument in enumerate(schema_of(func).arguments)
            if is_write(argument)
        ]
        storages = tuple(storage_of(t) for t in pytree.tree_leaves(written) if isinstance(t, Tensor))
        results = tuple(map(_leaf, pytree.tree_leaves(result)))
        self.events.append(_Event(func, operands, results, storages, line_here()))
        return result

    def written(self) -> set[int]:
        """Storages that are written to."""
        return {storage for event in self.events for storage in event.written}


@dataclass(slots=True)
class Comparison:
    """Makes of the events of several calls, one after another, ops that can be compared.

    known: tensors that are there before the first call. fixed: those of them that no call changes. reads_left: whether
    a call read what an earlier one had made of anything but constants.
    """

    known: Sequence[Tensor]
    fixed: Sequence[Tensor]
    reads_left: bool = False
    _constants: dict[int, Hashable] = field(default_factory=dict)
    _made: set[int] = field(default_factory=set)
    _left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._constants = {storage_of(t): ("fixed", n) for n, t in enumerate(self.fixed)}

    def ops(self, call: Recorder) -> list[Op]:
        """The ops of one call, in a form that equals that of an equal call; calls in the order in which they ran."""
        self._left |= self._made
        self._made = set()
        return list(self._ops(call))

    def _ops(self, call: Recorder) -> Iterator[Op]:
        numbers = {id(tensor): number for number, tensor in enumerate(self.known)}

        def told(leaf: Any) -> Any:
            if not isinstance(leaf, _Leaf):
                return leaf
            if leaf.storage in self._constants:
                return self._constants[leaf.storage], leaf.view
            return numbers.setdefault(id(leaf.tensor), len(numbers)), leaf.view[0], leaf.view[3]

        for event in call.events:
            tensors = [leaf for leaf in event.operands if isinstance(leaf, _Leaf)]
            for leaf in tensors:
                if leaf.data is not None:
                    self._constants.setdefault(leaf.storage, ("data", leaf.data))
                self.reads_left |= leaf.storage in self._left
            operands = tuple(map(told, event.operands))
            made = [leaf.storage for leaf in event.results if isinstance(leaf, _Leaf)]
            if _is_function(event.func) and all(leaf.storage in self._constants for leaf in tensors):
                how = hash((str(event.func), operands))
                for place, storage in enumerate(made):
                    if storage not in self._constants or storage in event.written:
                        self._constants[storage] = (how, place)
                continue
            for storage in event.written:
                if self._constants.pop(storage, None) is not None:
                    self._made.add(storage)
            shared = {leaf.storage for leaf in tensors}
            self._made.update(s for s in made if s not in shared and s not in self._constants)
            yield Op(str(event.func), operands, tuple(map(told, event.results)), event.line)


def _data(tensor: Tensor) -> Hashable:
    if isinstance(tensor, (FakeTensor, torch.nn.Parameter)):
        return None
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not 0 < tensor.numel() <= _SMALL:
        return None
    with no_modes():
        return hash(tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes())


def _is_function(func: Any) -> bool:
    """Whether equal operands give equal results."""
    return torch.Tag.nondeterministic_seeded not in func.tags


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(leaf)  # by another name in each call
    return _Leaf.of(leaf) if isinstance(leaf, Tensor) else str(leaf)
