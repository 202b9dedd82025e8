"""Where in the user's code an op or an error comes from."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(torch.__file__).parent), _OWN)
# Part of the path of every installed package.
_INSTALLED = "-packages"
_STANDARD = sysconfig.get_path("stdlib")

# The module that capture wraps around the user's model calls it so.
WRAPPED = "model"


def is_library(file: str) -> bool:
    """Whether a file of code is torch's, this package's, of Python's standard library, or no file at all."""
    if file.startswith(_STANDARD):
        return _INSTALLED not in file
    return file.startswith((*_LIBRARIES, "<"))


def is_users(file: str | None) -> bool:
    """Whether a file of code is the user's own: no library, nor an installed package."""
    return file is not None and not is_library(file) and _INSTALLED not in file


def file_of(code: type | FunctionType) -> str:
    """The file in which a class or a function is defined, as far as that is known."""
    if isinstance(code, FunctionType):
        return code.__code__.co_filename
    return getattr(sys.modules.get(code.__module__), "__file__", None) or "<unknown>"


def origin_of(node: fx.Node) -> tuple[str, str]:
    """(module path, source line) of a node of an exported graph, "" where unknown."""
    return _path_of(node), _line_of(node.meta.get("stack_trace") or "")


def _path_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return path.removeprefix(WRAPPED).removeprefix(".") if path.split(".")[0] == WRAPPED else path


@functools.lru_cache(maxsize=4096)
def _line_of(stack_trace: str) -> str:
    """The innermost frame outside torch: ``file.py:12 in forward: x = self.up(x)``."""
    frames = _FRAME.findall(stack_trace)
    for file, line, function, code in reversed(frames):
        if not is_library(file):
            return f"{Path(file).name}:{line} in {function}: {code.strip()}"
    return ""


def line_here() -> str:
    """The innermost line outside torch that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_library(file):
            return f"{Path(file).name}:{line} in {frame.f_code.co_name}: {linecache.getline(file, line).strip()}"
        frame = frame.f_back
    return ""


def user_frame(error: BaseException) -> str:
    """The innermost frame of an error, or of its causes, outside torch; "" if there is none.

    Where that is in an installed package, the innermost line that is not, and was called by the trace, follows it.
    """
    innermost, own = "", ""
    for trace in _tracebacks(error):
        for frame in traceback.extract_tb(trace):
            if frame.filename.startswith(_OWN):
                own = ""  # what calls the trace
            elif not is_library(frame.filename):
                code = linecache.getline(frame.filename, frame.lineno or 0).strip()
                innermost = f"{frame.filename}:{frame.lineno} in {frame.name}: {code}"
                own = own if _INSTALLED in frame.filename else innermost
        if innermost:
            return innermost if own in ("", innermost) else f"{innermost}\n  called at {own}"
    return innermost


def _tracebacks(error: BaseException) -> Iterator[TracebackType | None]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current.__traceback__
        current = current.__cause__ or current.__context__


def user_line() -> str:
    """The innermost frame outside torch and this package that is running; "" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return ""


def line_of_code(function: Callable[..., Any]) -> str:
    """Where a function, a bound method or a partial is defined: ``file.py:12 in backward``; its name if unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno} in {name}"
