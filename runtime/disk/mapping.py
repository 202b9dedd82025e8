"""What memory there is at a range of addresses: calls of Linux that Python's ``mmap`` has no words for.

Each replaces what is at a range in one step, so that whoever reads there meanwhile sees the one or the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

READ, READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


def new_memory(num_bytes: int) -> int:
    """The address of new memory, of zeros, in large pages where the system has them. Raises OSError."""
    found = _address("mmap", None, num_bytes, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    # A hint, whose failure costs page faults alone.
    _function("madvise")(found, num_bytes, mmap.MADV_HUGEPAGE)
    return found


def free_memory(address: int, num_bytes: int) -> None:
    """Give memory of ``new_memory`` back. Raises OSError."""
    _checked("munmap", address, num_bytes)


def move_memory(source: int, target: int, num_bytes: int) -> None:
    """Have memory of ``new_memory`` at ``target``, where it replaces what is there, and no longer at ``source``."""
    _address("mremap", source, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)


def map_file(address: int, num_bytes: int, descriptor: int) -> None:
    """Have the beginning of a file at ``address``: it is read and written as it is touched. Raises OSError."""
    _address("mmap", address, num_bytes, READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)


def protect(address: int, num_bytes: int, protection: int) -> None:
    """Have a write end the process with SIGSEGV, under ``READ``; ``READ_WRITE`` allows it. Raises OSError."""
    _checked("mprotect", address, num_bytes, protection)


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """What is there, as bytes."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


_ARGUMENTS = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t),
    "mremap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "mprotect": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
}


@cache
def _function(name: str) -> Any:
    found = getattr(ctypes.CDLL(None, use_errno=True), name)
    found.argtypes = _ARGUMENTS[name]
    found.restype = ctypes.c_void_p if name in ("mmap", "mremap") else ctypes.c_int
    return found


def _address(name: str, *arguments: Any) -> int:
    found = _function(name)(*arguments)
    if found == _FAILED:
        raise _error()
    return int(found)


def _checked(name: str, *arguments: Any) -> None:
    if _function(name)(*arguments):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
