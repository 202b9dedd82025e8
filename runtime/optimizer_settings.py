"""Hyperparameters of the optimisers of a module's parameters, recorded at each of their steps."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from autopar.runtime.step_hooks import watch_steps

_PLAIN = (bool, int, float, str, type(None))


class OptimizerSettings:
    """Notes of every optimiser that steps one of some parameters: its kind, its settings, and how often it stepped."""

    def __init__(self, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """parameters: those that are looked for, by name."""
        self._parameters = parameters
        self._names: Mapping[int, str] = {}
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._groups: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._of: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], tuple[str, ...]]]
        self._of = weakref.WeakKeyDictionary()  # how many parameters its groups have, and which
        watch_steps(self)

    def before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note its settings, and that it steps once more."""
        self._note(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing is noted then."""

    def made(self) -> str | None:
        """How the optimiser was made, and its steps so far; None before the first, and of several.

        Of several, ranks of other pipeline stages may have fewer.
        """
        if len(self._steps) != 1:
            return None
        ((own, steps),) = self._steps.items()
        return f"{type(own).__name__}({_plain(own.defaults)}) after {steps} steps"

    def groups(self) -> str | None:
        """Settings of their groups of parameters at their last steps, which schedules change, and what has a gradient.

        Gradients that are still there are added to.
        """
        if not self._groups:
            return None
        tensors = [p for optimizer in self._groups for group in optimizer.param_groups for p in group["params"]]
        left = "gradients are kept" if any(p.grad is not None for p in tensors) else "no gradients are kept"
        return "; ".join((*self._groups.values(), left))

    def _note(self, optimizer: Optimizer) -> None:
        self._names = self._names or {id(p): name for name, p in self._parameters().items()}
        if optimizer not in self._steps and not any(map(self._held, optimizer.param_groups)):
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        known, parameters = self._of.get(optimizer, ((), ()))
        if known != sizes:
            parameters = tuple(_counted(self._held(group)) for group in optimizer.param_groups)
            self._of[optimizer] = sizes, parameters
        settings = map(_plain, optimizer.param_groups)
        self._groups[optimizer] = "; ".join(f"{own}, {of}" for own, of in zip(settings, parameters, strict=True))

    def _held(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the parameters in a group."""
        return tuple(self._names[id(p)] for p in group["params"] if id(p) in self._names)


def _counted(names: tuple[str, ...]) -> str:
    digest = zlib.crc32("/".join(names).encode())
    which = f" from {names[0]} to {names[-1]}, check sum {digest:08x}" if names else ""
    return f"{len(names)} parameters{which}"


def _plain(settings: dict[str, Any]) -> str:
    found = []
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        plain = all(isinstance(part, _PLAIN) for part in (value if isinstance(value, tuple) else (value,)))
        if name != "params" and plain:
            found.append(f"{name}={value}")
    return ", ".join(found)
