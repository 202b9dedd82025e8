"""A call in a process of its own, for code that may not survive what it is given.

A kernel that trusts the sizes of its operands reads and writes past their ends when they are wrong. In a copy of this
process (a fork, which knows every op that was registered here) the worst that it does is end the copy.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from autopar.ir.fork import fork

T = TypeVar("T")

_CHUNK = 1 << 16


def isolated(function: Callable[[], T], *, limit_s: float) -> T | None:
    """The result of ``function`` in a copy of this process; None if it fails there, dies or takes over ``limit_s``.

    ``limit_s``: seconds. What ``function`` returns has to be picklable. What it changes and prints is lost.
    """
    if not hasattr(os, "fork"):
        return None
    read_end, write_end = os.pipe()
    child = fork()
    if child == 0:
        os.close(read_end)
        _answer(function, write_end)
    os.close(write_end)
    try:
        answer = _read(read_end, time.monotonic() + limit_s)
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    try:
        return pickle.loads(answer)  # type: ignore[no-any-return]  # what ``function`` returned
    except (EOFError, pickle.UnpicklingError):
        return None  # the copy died before it had written all


def _answer(function: Callable[[], object], write_end: int) -> None:
    """Write what ``function`` returns and end this process, without a word, a core file or anything at exit."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # threads of a pool are not copied, and waited for in vain
        answer = memoryview(pickle.dumps(function()))
        while answer:
            answer = answer[os.write(write_end, answer) :]
    finally:
        os._exit(0)


def _read(read_end: int, deadline: float) -> bytes:
    """All that comes before the other end closes; nothing if that is after ``deadline``."""
    answer = bytearray()
    while True:
        ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        chunk = os.read(read_end, _CHUNK)
        if not chunk:
            return bytes(answer)
        answer += chunk
