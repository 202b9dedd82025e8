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
from typing import Any

from torch import Tensor, nn

from autopar.ir.capture.python_state.containers import MISSING, Change, attributes_of, is_array, same
from autopar.ir.capture.python_state.first_change import first_change
from autopar.ir.capture.python_state.recorded_ops import Comparison, Op, Recorder
from autopar.ir.capture.python_state.state import RANDOM, Snapshot
from autopar.ir.capture.python_state.write_only import write_only
from autopar.ir.errors import CaptureError
from autopar.ir.torch_private import BUFFERS, MODULES, PARAMETERS, FakeTensorMode, storage_of

_SEQUENCES = (list, tuple, set, frozenset, deque)


class UnkeptStateWarning(UserWarning):
    """Forward leaves tensors in attributes, which a parallel module does not."""


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
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    others = {id(t): t for t in (*model.buffers(), *initial.tensors()) if id(t) not in parameters}
    culprit: Change | None = None
    before = initial
    settles = False  # calls after the second do what the second did
    try:
        first = _recorded(run, mode)
        moved, changes = _split(initial.changes())
        initial.restore_buffers()
        culprit = next((change for change in changes if change.slot in (BUFFERS, PARAMETERS, MODULES)), None)
        if culprit is None:
            middle = Snapshot.take(model, loss_fn)
            second = _recorded(run, mode)
            growing = [change for change in _split(middle.changes())[1] if not _alike(change.old, change.new)]
            written = first.written() | second.written()
            replaced = {id(change.old) for change in moved}
            fixed = [t for t in others.values() if id(t) not in replaced and storage_of(t) not in written]
            comparison = Comparison([*parameters.values(), *others.values()], fixed)
            ops = [comparison.ops(call) for call in (first, second)]
            if growing and not _only_written(growing, middle, run, mode, comparison, ops[-1]):
                same_name = [change for change in changes if change.name == growing[0].name]
                culprit, before = (same_name[0], initial) if same_name else (growing[0], middle)
            elif comparison.reads_left or ops[0] != ops[1]:
                opaque = [*initial.iterators, *initial.filled()]
                if not changes:
                    where = next((a.line for a, b in zip(*ops) if a != b), "")
                    raise CaptureError(_iterated(title, opaque, where))
                culprit = min(changes, key=lambda change: isinstance(change.new, Tensor))
                settles = not comparison.reads_left
        if culprit is None:
            kept = [change.name for change in changes if any(True for _ in _tensors(change.new))]
            _say(title, list(dict.fromkeys((*kept, *(change.name for change in growing)))))
            return
        before.restore()
        with mode:
            line = first_change(run, culprit.happened)
    finally:
        initial.restore()
    raise CaptureError(_message(title, culprit, line, settles))


def _recorded(run: Callable[[], Any], mode: FakeTensorMode) -> Recorder:
    recorder = Recorder()
    with mode, recorder:
        run()
    return recorder


def _split(changes: Iterable[Change]) -> tuple[list[Change], list[Change]]:
    """The changes that are updates of buffers, and the others."""
    found = list(changes)
    return [change for change in found if is_update(change)], [change for change in found if not is_update(change)]


def _only_written(
    growing: Sequence[Change],
    middle: Snapshot,
    run: Callable[[], Any],
    mode: FakeTensorMode,
    comparison: Comparison,
    wanted: list[Op],
) -> bool:
    """Whether a call does the same where all that grows from call to call may only be written."""
    for change in growing:
        if change.held is None:
            return False
        stand_in = write_only(change.old)
        if stand_in is not None and not is_array(change.held.container):
            change.held.put(change.key, stand_in)
        elif not middle.replace(change.held.container, write_only(change.held.container)):
            return False
    try:
        third = _recorded(run, mode)
    except Exception:  # whatever becomes of a stand-in that is read
        return False
    return comparison.ops(third) == wanted and not comparison.reads_left


def is_update(change: Change) -> bool:
    """Whether a change is that of a buffer to another tensor of its shape and dtype, which a plan can follow."""
    old, new = change.old, change.new
    return (
        change.slot == BUFFERS
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
    elif change.slot == PARAMETERS:
        what = f"forward replaces the parameter {change.name}"
        remedy = "the replacement outside of forward, before the model is made parallel"
    elif change.slot == MODULES:
        what = f"forward changes the module {change.name}{_from_to(change)}"
        remedy = "modules that are made in __init__ and stay where they are"
    elif change.slot == BUFFERS:
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
