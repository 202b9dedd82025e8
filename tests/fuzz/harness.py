"""Runs a reader on many inputs, in a process of its own, and says on which of them it failed.

An input is read, or refused with one message: an AutoparError, or for a command line exit code 2. Anything else that is
raised is a failure; so are more than 5 seconds of CPU time, and more than 1 GiB of memory.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from autopar.ir.errors import AutoparError

SECONDS, MEMORY = 5.0, 1 << 30
# A process that asks for more is refused by the system, and does not bring down the machine.
_ADDRESS_SPACE = 8 << 30
# Messages of people are short.
_MESSAGE = 20_000


@dataclass(frozen=True)
class Failure:
    """What went wrong with the input of a number: ``random.Random(f"{kind} {number}")`` makes it again."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"input {self.number}: {self.what}"


Read = Callable[[random.Random, Path], object]
"""Makes an input by the random numbers, in the folder if it is a file, and reads it."""


def failures(kind: str, read: Read, count: int, folder: Path) -> list[Failure]:
    """The inputs 0 to ``count`` - 1 of a kind that are neither read nor refused with an AutoparError."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, kind, read, count, folder))
    process.start()
    theirs.close()
    found: list[Failure] = []
    at = -1
    try:
        while True:
            received = ours.recv()
            if isinstance(received, Failure):
                found.append(received)
            else:
                at = received
    except EOFError:
        process.join()
    if process.exitcode:
        found.append(Failure(at, f"ends the process: exit code {process.exitcode}"))
    elif at != count:
        found.append(Failure(at, "ended the process"))
    return found


def _run(pipe: Connection, kind: str, read: Read, count: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a pool of threads that the test's process has computed with is not copied
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + _ADDRESS_SPACE,) * 2)
    _mute()
    for number in range(count):
        pipe.send(number)
        what = _failure(lambda number=number: read(random.Random(f"{kind} {number}"), folder))  # type: ignore[misc]
        if what is not None:
            pipe.send(Failure(number, what))
    pipe.send(count)
    pipe.close()
    os._exit(0)


def _failure(work: Callable[[], object]) -> str | None:
    memory, began = _peak_bytes(), time.process_time()
    try:
        work()
    except AutoparError as error:
        if len(str(error)) > _MESSAGE:
            return f"has a message of {len(str(error)):,} characters: {str(error)[:100]} …"
    except BaseException:
        return traceback.format_exc()
    spent, grown = time.process_time() - began, _peak_bytes() - memory
    if spent > SECONDS:
        return f"takes {spent:.1f} s"
    if grown > MEMORY:
        return f"takes {grown / 2**30:.1f} GiB"
    return None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _mute() -> None:
    """What commands print is nobody's to read."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115


def none_of(found: list[Failure]) -> None:
    """Fail with the first of the failures, one for each place in the code."""
    places: dict[str, Failure] = {}
    for failure in found:
        places.setdefault("\n".join(failure.what.splitlines()[-3:]), failure)
    assert not found, f"{len(found)} inputs fail, at about {len(places)} places\n" + "\n".join(
        map(str, list(places.values())[:8])
    )
