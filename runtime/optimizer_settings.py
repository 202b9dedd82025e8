"""What the optimisers of a module's parameters are set to, noted at each of their steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_PLAIN = (bool, int, float, str, type(None))


class OptimizerSettings:
    """Notes of every optimiser that steps one of some parameters: its kind, its settings, and how often it stepped."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """parameters: those that are looked for."""
        self._parameters = parameters
        self._ids: frozenset[int] = frozenset()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._groups: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        me = weakref.ref(self)

        def noted(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (own := me()) is not None:
                own._note(optimizer)

        handle = register_optimizer_step_pre_hook(noted)
        weakref.finalize(self, handle.remove)

    def made(self) -> str | None:
        """How the optimiser was made, and its steps so far; None before the first, and of several.

        Of several, ranks of other pipeline stages may have fewer.
        """
        if len(self._steps) != 1:
            return None
        ((own, steps),) = self._steps.items()
        return f"{type(own).__name__}({_plain(own.defaults)}) after {steps} steps"

    def groups(self) -> str | None:
        """Settings of their groups of parameters at their last steps, which schedules change."""
        return "; ".join(self._groups.values()) or None

    def _note(self, optimizer: Optimizer) -> None:
        if optimizer not in self._steps:
            self._ids = self._ids or frozenset(map(id, self._parameters()))
            if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
                return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._groups[optimizer] = "; ".join(map(_plain, optimizer.param_groups))


def _plain(settings: dict[str, Any]) -> str:
    found = []
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        plain = all(isinstance(part, _PLAIN) for part in (value if isinstance(value, tuple) else (value,)))
        if name != "params" and plain:
            found.append(f"{name}={value}")
    return ", ".join(found)
