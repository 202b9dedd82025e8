"""A thread of a supervised rank that says, once a step takes long, in which collective the rank waits."""

from __future__ import annotations

import json
import threading
import time

from autopar.runtime.flight_recorder import stand
from autopar.training.place import Watched

_EVERY_S = 1.0
# Of the time that collectives are given: what all ranks say is there before the first one of them gives up.
_LONG = 0.5


def tell_if_it_stands_still(progress: Watched, timeout_s: float) -> None:
    """From now on. timeout_s: after which a collective fails."""

    def watch() -> None:
        told = False
        while True:
            time.sleep(_EVERY_S)
            still = progress.silent_s > _LONG * timeout_s
            if still or told:
                progress.say(json.dumps(stand().to_plain()).encode() if still else b"")
            told = still

    threading.Thread(target=watch, name="stands still", daemon=True).start()
