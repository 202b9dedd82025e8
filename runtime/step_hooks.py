"""Who sees every step of an optimiser in this process, for as long as they are alive.

torch has hooks for that. One that goes with its module may go in the midst of another optimiser's step, when the module
is freed there, and torch then ends the step with an error. So there is one hook, which stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Watcher(Protocol):
    """Sees steps."""

    def before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An optimiser is about to step, called with these arguments, itself the first."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""


# In the order in which they came.
_watchers: list[weakref.ref[Watcher]] = []


def watch_steps(watcher: Watcher) -> None:
    """Have ``watcher`` see every step from here on. It is not kept alive."""
    _register()
    _watchers[:] = [one for one in _watchers if one() is not None]
    _watchers.append(weakref.ref(watcher))


@cache
def _register() -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for one in _watchers.copy():
            if (watcher := one()) is not None:
                watcher.before_step(optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for one in _watchers.copy():
            if (watcher := one()) is not None:
                watcher.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
