"""A signal that says that the process is to end soon: the step is finished, the state saved, and the job left.

Slurm, Kubernetes and clouds send SIGTERM before they take a machine away, or whatever they were asked to send. The
second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LEFT = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that has saved its state and left, as shells report the signal."""


class Notice:
    """Listens for the signals from when it is made. ``code``: the exit code to leave with; 0 while there is none."""

    def __init__(self) -> None:
        self.code = 0
        for number in SIGNALS:
            signal.signal(number, self._come)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.code:
            os._exit(self.code)
        self.code = 128 + number
