"""Copies of the state beside a training loop, and what its supervisor is told of it."""

from __future__ import annotations

from typing import Any

from autopar.runtime.copies.copier import Copier
from autopar.runtime.copies.snapshot import Snapshots
from autopar.runtime.module import ParallelModule
from autopar.training.place import Place


class Copies:
    """Of one rank. All ranks make them together."""

    def __init__(self, parallel: ParallelModule, optimizer: Any, scaler: Any, place: Place) -> None:
        self._copier = Copier(Snapshots(parallel, optimizer, scaler=scaler), place.copies)
        self._progress = place.progress

    def before_update(self) -> None:
        """The optimiser is about to change the state."""
        self._copier.wait_copied()

    def after_update(self, steps: int, data: dict[str, Any], own_s: float) -> int:
        """So many steps are made; returns how many are safe. data: where the data stands. own_s: of the last step."""
        self._copier.begin(steps, data)
        safe = self._copier.safe
        self._progress.made(steps, safe, own_s)
        return safe

    def finish(self) -> int:
        """Wait until the last step is safe; returns how many are."""
        safe = self._copier.finish()
        self._progress.made(safe, safe)
        return safe

    def forget(self) -> None:
        """The state goes back to an earlier one: those of later steps count no more."""
        self._copier.forget()
