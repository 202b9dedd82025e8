"""Checks of values in Python, which a trace takes to pass: a plan runs without them, as without ``torch._check``.

    assert (tokens >= 0).all()                   goes on
    if tokens.max() >= size: raise ValueError    goes on

Such are an ``assert``, and an ``if`` of which one branch does nothing but raise, unless an ``except`` may catch that.
What else depends on a value is refused.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.ir.autograd.replacing import replaced
from autopar.ir.source import is_library

# What calls forward.
_CAPTURE = str(Path(__file__).with_name("capture.py"))
# First line and column, last line and column.
_Span = tuple[tuple[int, int], tuple[int, int]]


@contextmanager
def checks_pass() -> Iterator[None]:
    """Within, a truth value that the trace does not know is what lets the check pass that asks for it."""
    guard: Callable[..., bool] = SymNode.guard_bool

    def guard_bool(node: SymNode, file: Any, line: Any) -> bool:
        try:
            return guard(node, file, line)
        except GuardOnDataDependentSymNode:
            passing = _passing()
            if passing is None:
                raise
            return passing

    with replaced(SymNode, "guard_bool", guard_bool):
        yield


def _passing() -> bool | None:
    """The truth value with which the check that asks for one passes; None if it is no check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or _is_caught(frame):
        return None
    tested = _tested(frame)
    found = {
        passing for span, passing in _conditions(frame.f_code.co_filename) if tested is not None and _is(tested, span)
    }
    return found.pop() if len(found) == 1 else None


def _is_caught(frame: FrameType | None) -> bool:
    """Whether forward may catch what a check raises, and do something else."""
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_library(file) and any(first <= line <= last for first, last in _caught(file)):
            return True
        frame = frame.f_back
    return False


def _tested(frame: FrameType) -> _Span | None:
    """Where the expression is in the source whose truth value is asked for: what the last instruction but the jump
    computes, or a call of ``bool``.
    """
    code: Any = frame.f_code
    if not hasattr(code, "co_positions"):
        return None  # Python 3.10
    spans = list(islice(code.co_positions(), frame.f_lasti // 2 + 1))
    jump = spans[-1]
    before = next((span for span in reversed(spans) if span != jump), jump)
    conditions = [span for span, _ in _conditions(frame.f_code.co_filename)]
    for first, last, column, end in (jump, before):
        if first is not None and last is not None and column is not None and end is not None:
            tested = (first, column), (last, end)
            if any(_is(tested, condition) for condition in conditions):
                return tested
    return None


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=64)
def _caught(file: str) -> tuple[tuple[int, int], ...]:
    """First and last lines under each ``try`` of a file that has an ``except``."""
    tries = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Try) and node.handlers)
    return tuple((node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno) for node in tries)


@functools.lru_cache(maxsize=64)
def _conditions(file: str) -> tuple[tuple[_Span, bool], ...]:
    """Of every check in a file the parts of its condition that are no ``and``, ``or`` and ``not``, and what they are
    where it passes.
    """
    found: list[tuple[_Span, bool]] = []
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Assert):
            found += _parts(node.test, True)
        elif isinstance(node, ast.If) and _raises(node.body) != _raises(node.orelse):
            found += _parts(node.test, _raises(node.orelse))
    return tuple(found)


def _parts(test: ast.expr, passing: bool) -> Iterator[tuple[_Span, bool]]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value, passing)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not passing)
    else:
        assert test.end_lineno is not None and test.end_col_offset is not None, "parsed from source"
        yield ((test.lineno, test.col_offset), (test.end_lineno, test.end_col_offset)), passing


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements end in raising, whatever happens."""
    leaves = (ast.Return, ast.Break, ast.Continue)
    inside = (node for statement in body for node in ast.walk(statement))
    return bool(body) and isinstance(body[-1], ast.Raise) and not any(isinstance(node, leaves) for node in inside)


def _is(tested: _Span, condition: _Span) -> bool:
    """Instructions of a call over several lines begin in the line of its last name."""
    return condition[0] <= tested[0] and tested[1] == condition[1]
