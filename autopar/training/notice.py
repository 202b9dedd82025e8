"""A signal that says that the process is to end soon: the step is finished, the state saved, and the job left.

Slurm, Kubernetes and clouds send SIGTERM before they take a machine away, or whatever they were asked to send. The
second signal ends the process at once, unless it is the same notice on another way: Slurm may signal every process of a
step, and torchrun and supervisors pass on what they get.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LEFT = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that has saved its state and left, as shells report the signal."""
SAME_NOTICE_S = 5.0
"""A signal so soon after the first is the same notice."""


class Notice:
    """Listens for the signals from when it is made. ``code``: the exit code to leave with; 0 while there is none."""

    def __init__(self) -> None:
        self.code, self._since = 0, 0.0
        for number in SIGNALS:
            signal.signal(number, self._come)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if not self.code:
            self.code, self._since = 128 + number, time.monotonic()
        elif time.monotonic() - self._since > SAME_NOTICE_S:
            os._exit(self.code)
