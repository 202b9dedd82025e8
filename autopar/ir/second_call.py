"""Forward is called a second time from the Python state that the first call left behind.

    first call    self.length = 16     ops: embedding linear ...
    second call   self.length = 16     ops: embedding linear ...       right: every call is the one that was captured

A model that changes attributes, containers or globals is captured as it is only if a second call runs the same ops, on
no tensor that the first one left, and leaves the same values behind. Else what changes is named with its line.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.containers import MISSING, Change, attributes_of, same
from autopar.ir.errors import CaptureError
from autopar.ir.first_change import first_change
from autopar.ir.python_state import RANDOM, Snapshot
from autopar.ir.source import line_here

_SEQUENCES = (list, tuple, set, frozenset, deque)


class UnkeptStateWarning(UserWarning):
    """Forward leaves tensors in attributes, which a parallel module does not."""


@dataclass(frozen=True, slots=True)
class _Op:
    """One op of a call, compared without ``line``, where the user's code calls it."""

    name: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    line: str = field(compare=False)


class _Recorder(TorchDispatchMode):
    """The ops of one call, with tensors numbered in the order in which they are met.

    known: tensors that have the same number in every call. left: those of which ``reads_left`` says if any is read.
    """

    def __init__(self, known: Sequence[Tensor], left: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Op] = []
        self.reads_left = False
        self._left = {id(tensor) for tensor in left}
        # Tensors stay alive with it: an id stands for one of them.
        self._alive: list[Any] = [*known, *left]
        self._numbers = {id(tensor): number for number, tensor in enumerate(known)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # what a fake tensor asks itself, and remembers
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        self.reads_left |= any(isinstance(leaf, Tensor) and id(leaf) in self._left for leaf in leaves)
        described = tuple(self._of(leaf) for leaf in leaves)
        result = func(*args, **(kwargs or {}))
        results = tuple(self._of(leaf) for leaf in pytree.tree_leaves(result))
        self.ops.append(_Op(str(func), described, results, line_here()))
        return result

    def _of(self, leaf: Any) -> Any:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return type(leaf)  # by another name in each call
        if not isinstance(leaf, Tensor):
            return str(leaf)
        self._alive.append(leaf)
        return self._numbers.setdefault(id(leaf), len(self._numbers)), tuple(leaf.shape), leaf.dtype


def check_second_call(
    title: str,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    run: Callable[[], Any],
    mode: FakeTensorMode,
) -> None:
    """Raise CaptureError if a call of ``run`` after the first does something else than the first did.

    run: a call of ``model``, a stand-in, and of the loss function, on tensors of ``mode``.
    """
    initial = Snapshot.take(model, loss_fn)
    known = list({id(t): t for t in (*model.parameters(), *model.buffers(), *initial.tensors())}.values())
    culprit: Change | None = None
    before = initial
    settles = False  # calls after the second do what the second did
    try:
        first = _Recorder(known)
        with mode, first:
            run()
        changes = [change for change in initial.changes() if not is_update(change)]
        initial.restore_buffers()
        culprit = next((change for change in changes if change.slot in ("_buffers", "_parameters", "_modules")), None)
        if culprit is None:
            middle = Snapshot.take(model, loss_fn)
            original = {id(tensor) for tensor in known}
            left = [tensor for change in changes for tensor in _tensors(change.new) if id(tensor) not in original]
            second = _Recorder(known, left)
            with mode, second:
                run()
            growing = [
                change for change in middle.changes() if not (is_update(change) or _alike(change.old, change.new))
            ]
            if growing:
                same_name = [change for change in changes if change.name == growing[0].name]
                culprit, before = (same_name[0], initial) if same_name else (growing[0], middle)
            elif second.reads_left or first.ops != second.ops:
                if not changes:
                    where = next((b.line for a, b in zip(first.ops, second.ops) if a != b), "")
                    raise CaptureError(_iterated(title, initial.iterators, where))
                culprit = min(changes, key=lambda change: isinstance(change.new, Tensor))
                settles = not second.reads_left
        if culprit is None:
            _say(title, [change.name for change in changes if any(True for _ in _tensors(change.new))])
            return
        before.restore()
        with mode:
            line = first_change(run, culprit.happened)
    finally:
        initial.restore()
    raise CaptureError(_message(title, culprit, line, settles))


def is_update(change: Change) -> bool:
    """Whether a change is that of a buffer to another tensor of its shape and dtype, which a plan can follow."""
    old, new = change.old, change.new
    return (
        change.slot == "_buffers"
        and isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and (old.shape, old.dtype) == (new.shape, new.dtype)
    )


def _alike(old: Any, new: Any, depth: int = 0) -> bool:
    """Whether two values differ at most in the values of their tensors."""
    if same(old, new):
        return True
    if type(old) is not type(new) or depth > 8:
        return False
    if isinstance(old, Tensor):
        return bool(old.shape == new.shape and old.dtype == new.dtype)
    if isinstance(old, (list, tuple, deque)):
        return len(old) == len(new) and all(_alike(a, b, depth + 1) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_alike(old[key], new[key], depth + 1) for key in old)
    own = attributes_of(old)
    return own is not None and _alike(own, attributes_of(new), depth + 1)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value and in the containers and objects that it holds."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 8 and not isinstance(value, (type, nn.Module)):
        inside: Iterable[Any] = ()
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, _SEQUENCES):
            inside = value
        elif (own := attributes_of(value)) is not None:
            inside = own.values()
        for item in inside:
            yield from _tensors(item, depth + 1)


def _say(title: str, names: list[str]) -> None:
    """Tell of tensors that a call leaves behind and no call reads."""
    if names:
        warnings.warn(
            f"{title}: forward sets {', '.join(names)}; a parallel module computes the same, but does not keep them",
            UnkeptStateWarning,
            stacklevel=2,
        )


def _message(title: str, change: Change, line: str, settles: bool) -> str:
    """What changes, where, and what to do about it; ``settles``: it changes in the first call alone."""
    if change.slot == RANDOM:
        what = f"forward draws from {change.name}, and one captured graph would repeat what it drew"
        remedy = "torch's random numbers, as in torch.rand or dropout, and torch.where in place of `if`"
    elif change.slot == "_parameters":
        what = f"forward replaces the parameter {change.name}"
        remedy = "the replacement outside of forward, before the model is made parallel"
    elif change.slot == "_modules":
        what = f"forward changes the module {change.name}{_from_to(change)}"
        remedy = "modules that are made in __init__ and stay where they are"
    elif change.slot == "_buffers":
        what = f"forward changes the buffer {change.name}{_from_to(change)}"
        remedy = "a buffer that is registered with the shape and dtype that it keeps"
    else:
        what = f"forward changes {change.name}{_from_to(change)}, and the next call would not run what was captured"
        remedy = f"a buffer that is changed by tensor ops: {_buffer_for(change)}"
        if settles:
            remedy = "a call of the model on one batch before this, since later calls leave the attribute as it then is"
    return f"{title} cannot be captured: {what}.\n  at {line or 'an unknown line'}\n  try: {remedy}"


def _iterated(title: str, names: Sequence[str], line: str) -> str:
    return (
        f"{title} cannot be captured: two calls of forward run different ops, since it uses {' and '.join(names)}.\n"
        f"  at {line or 'an unknown line'}\n  try: a tensor that is changed by tensor ops, as a buffer"
    )


def _buffer_for(change: Change) -> str:
    name = repr(change.key) if change.slot == "attributes" else "name"
    value = change.new if change.old is MISSING else change.old
    made = f"torch.tensor({value!r})" if isinstance(value, (int, float)) else "value"
    return f"self.register_buffer({name}, {made})"


def _from_to(change: Change) -> str:
    if isinstance(change.old, Tensor) and _described(change.old) == _described(change.new):
        return ""
    if change.new is MISSING:
        return " by deleting it"
    old = "" if change.old is MISSING else f" from {_described(change.old)}"
    return f"{old} to {_described(change.new)}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"
