"""Memory that tensors have freed is kept for the next ones, or given back where state is on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Pages of 32 MiB that the kernel had to give for the third tensor, whose memory the second has freed.
PROGRAM = """
import resource, torch
from autopar.runtime.freed_memory import give_back_freed_memory, keep_freed_memory
def faults():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
print(faults())
give_back_freed_memory()
print(faults())
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library decides for itself")
@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}])
def test_new_pages_of_a_step(given: dict[str, str]) -> None:
    without = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=without | given, check=True, capture_output=True, text=True
    )
    kept, given_back = map(int, run.stdout.split())
    pages = (32 << 20) // os.sysconf("SC_PAGE_SIZE")
    # Whoever has said what malloc is to do is left alone.
    assert kept >= 0.9 * pages if given else kept < 0.01 * pages
    assert given_back >= 0.9 * pages
