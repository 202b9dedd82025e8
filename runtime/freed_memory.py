"""What the C library does with memory of the host that tensors have freed: keep it for the next ones, or give it back.

Left alone, glibc gives back what is free at the end of its heap, and takes the largest tensors outside of it. So a step
that frees what it has kept for backward is given new pages by the kernel in the next one, each of which is filled with
zeros first: a tenth of a step on CPUs (docs/launching.md). Another C library has no such choice.
"""

from __future__ import annotations

import ctypes
import os

import torch

# Parameters of mallopt(3): from how many free bytes on the end of the heap is given back; from how many bytes on a
# tensor is outside of it; how many of those there may be.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# With these variables the user has chosen.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
# As glibc has them at first.
_TRIMMED_BYTES, _MANY = 1 << 17, 1 << 16
# From here on memory of a tensor is given back.
_LARGE_BYTES = 1 << 20
# Not empty once this process gives memory back.
_given_back: list[bool] = []


def keep_freed_memory() -> None:
    """Have glibc keep it on a machine without GPUs, unless it is given back already or the environment says what it is
    to do.

    Memory that was kept once is used for large tensors ever after, and its pages stay with the process. So this is for
    a process that has decided against state on disk.
    """
    chosen = _given_back or any(name in os.environ for name in _VARIABLES)
    if not (chosen or torch.cuda.is_available()):
        _set({_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0})


def give_back_freed_memory() -> None:
    """Have glibc give memory of large tensors back to the system as they are freed.

    Where state is on disk there is little memory. Left alone, glibc raises the size from which it gives memory back
    with every tensor that is freed, to 32 MiB; with blocks below that a process on a CPU held 2 GiB where 0.5 were in
    use. What was kept until now goes, too.
    """
    _given_back.append(True)
    _set({_TRIM_THRESHOLD: _TRIMMED_BYTES, _MMAP_MAX: _MANY, _MMAP_THRESHOLD: _LARGE_BYTES})
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(choices: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in choices.items():
            mallopt(parameter, value)
