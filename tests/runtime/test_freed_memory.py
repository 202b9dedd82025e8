"""Memory that tensors have freed is kept for the next ones, or given back where state is on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Prints the fewest new pages that any of the last steps asked the kernel for, each of 32 MiB that the one before freed.
PROGRAM = """
import ctypes, resource, sys, torch
from autopar.runtime.freed_memory import give_back_freed_memory, keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of one size, on every machine
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    before = faults()
    tensors = [torch.ones(1 << 20) for _ in range(8)]
    return faults() - before
keep_freed_memory()
if sys.argv[1] == "disk":
    give_back_freed_memory()
print(min([step() for _ in range(8)][3:]))
"""
# Prints how many MiB of 64 that were freed, below a tensor that is there, the process no longer holds.
FREED_BEFORE = """
import torch
from autopar.runtime.freed_memory import give_back_freed_memory, keep_freed_memory
def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1024
keep_freed_memory()
freed = [torch.ones(1 << 18) for _ in range(64)]
last = torch.ones(1 << 18)
del freed
before = held()
give_back_freed_memory()
print(round(before - held()))
"""
PAGES = (32 << 20) // os.sysconf("SC_PAGE_SIZE")


def new_pages(place: str, **variables: str) -> int:
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | variables
    run = subprocess.run([sys.executable, "-c", PROGRAM, place], env=env, check=True, capture_output=True, text=True)
    return int(run.stdout)


# mallopt, malloc_trim and page faults by size are of glibc on Linux; with another C library ``freed_memory`` does
# nothing, by design, so that there is nothing to count.
of_glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library decides for itself"
)


@of_glibc
def test_new_pages_of_a_step() -> None:
    assert new_pages("memory") < 0.01 * PAGES
    assert new_pages("memory", MALLOC_MMAP_THRESHOLD_=str(1 << 20)) >= 0.9 * PAGES, "the user has chosen"
    assert new_pages("disk") >= 0.9 * PAGES


@of_glibc
def test_what_was_kept_before_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", FREED_BEFORE], check=True, capture_output=True, text=True)
    assert int(run.stdout) >= 60
