"""Two queues of work on a rank: the backward of one microbatch beside the forward of another (``autopar.ir.pairs``).

The backward has a thread of its own, and what the forward sends goes over process groups of its own; those of the
backward also sum gradients. While one of them waits for other ranks the other computes; torch's kernels run without
Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context

import torch

from autopar.ir.primitives.group_communication import over_other_groups
from autopar.runtime.torch_private import is_watched


class BackwardThread:
    """``with thread.running(backward): ..`` runs a backward in a thread of its own meanwhile. groups: name of a process
    group -> name of the process group that the forward, inside of ``with``, sends over instead."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._groups = groups
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-backward")

    @contextmanager
    def running(self, backward: Callable[[], None]) -> Iterator[None]:
        """An error of either pass is raised when both have ended, that of the forward first. Where a dispatch mode
        watches this thread's ops, or autocast changes them, the backward follows in this thread."""
        context = copy_context()
        with over_other_groups(self._groups):
            if is_watched() or torch.is_autocast_enabled("cpu"):
                running = None
                yield
            else:
                running = self._thread.submit(context.run, self._apart, backward, torch.get_num_threads())
                try:
                    yield
                except BaseException:
                    running.exception()
                    raise
        if running is None:
            backward()
        else:
            running.result()

    def _apart(self, backward: Callable[[], None], num_threads: int) -> None:
        # Of a new thread, torch takes as many as there are cores.
        torch.set_num_threads(num_threads)
        backward()
