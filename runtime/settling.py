"""A process ends once the threads of its process groups are idle.

A thread of gloo that has sent a tensor lets go of it, for which it takes the interpreter's lock. If the interpreter is
being taken apart by then, Python ends the thread instead, within a destructor, and the process aborts ("terminate
called without an active exception", torch 2.13, Python 3.11). A rank that has finished would so end the whole job.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")  # of Linux; elsewhere a process waits once
_PREFIX = "pt_"  # of the names that torch gives to threads of its own
_AT_A_TIME_S = 0.02
_AT_MOST_S = 10.0  # of CPU time of this process: on a machine that is busy with others it takes longer by the clock


@cache
def settle_at_exit() -> None:
    """From now on this process ends that way. Called again it changes nothing."""
    atexit.register(_settle)


def _settle() -> None:
    """Wait until no thread of torch has run for a moment in which the interpreter's lock was free."""
    start = time.process_time()
    before = _switches()
    while time.process_time() - start < _AT_MOST_S:
        time.sleep(_AT_A_TIME_S)
        now = _switches()
        if now == before and None not in now.values():
            return
        before = now


def _switches() -> dict[str, str | None]:
    """How often each thread of torch has waited for something; None of one that does not wait now."""
    found: dict[str, str | None] = {}
    for thread in _THREADS.iterdir() if _THREADS.exists() else ():
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields.get("Name", "").startswith(_PREFIX):
            waits = fields.get("State", "S").startswith("S")
            found[thread.name] = fields.get("voluntary_ctxt_switches", "") if waits else None
    return found
