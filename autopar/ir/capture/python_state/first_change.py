"""The line of the user's code that changes something, found by running it line by line."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.ir.source import is_library


def first_change(run: Callable[[], Any], happened: Callable[[], bool]) -> str:
    """``file.py:12 in forward: self.count += 1``: the first line that ``run`` executes after which ``happened()``.

    Lines of torch and of this package are part of the line that calls them. "" if nothing happens.
    """
    last: list[tuple[str, int, str]] = []
    found: list[tuple[str, int, str]] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found:
            return None
        code = frame.f_code
        if event == "call":
            return None if is_library(code.co_filename) else trace
        if last and happened():
            found.append(last[0])
            return None
        if event == "line":
            last[:] = [(code.co_filename, frame.f_lineno, code.co_name)]
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it calls functions of others between any two lines
    sys.settrace(trace)
    try:
        run()
    except Exception:  # the trace that comes after this says what is wrong
        pass
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    if not found and last and happened():
        found.append(last[0])
    if not found:
        return ""
    file, line, function = found[0]
    return f"{Path(file).name}:{line} in {function}: {linecache.getline(file, line).strip()}"
