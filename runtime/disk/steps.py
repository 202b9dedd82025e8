"""Steps of optimisers over parameters on disk: block by block, so that no more than a few blocks are in memory.

An optimiser steps as it would, called once for each block on disk with the parameters of that block alone, and then
once for all others. What its settings are after the last call they were before each.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from autopar.ir.errors import InvalidInput
from autopar.runtime.disk.blocks import DiskBlock
from autopar.runtime.disk.mover import Mover
from autopar.runtime.step_hooks import watch_steps

# Blocks that are prefetched while one steps.
_PREFETCH = 1


class BlockSteps:
    """Has every optimiser of some blocks step them one after the other."""

    def __init__(self, blocks: Sequence[DiskBlock], mover: Mover) -> None:
        self._blocks, self._mover = blocks, mover
        self._of = {id(parameter): block for block in blocks for parameter in block.parameters.values()}
        self._taken: weakref.WeakKeyDictionary[Optimizer, list[list[Any]]] = weakref.WeakKeyDictionary()
        watch_steps(self)

    def before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Step all blocks on disk, and leave the optimiser with its other parameters."""
        self.after_step(optimizer)
        groups = optimizer.param_groups
        members = [group["params"] for group in groups]
        blocks = [
            block
            for block in self._blocks
            if any(self._of.get(id(p)) is block and p.grad is not None for own in members for p in own)
        ]
        if not any(id(p) in self._of for own in members for p in own):
            return
        _check(optimizer, args, kwargs)
        try:
            for number, block in enumerate(blocks):
                for later in blocks[number : number + 1 + _PREFETCH]:
                    later.fetch(optimizer)
                block.need(optimizer)
                for group, own in zip(groups, members, strict=True):
                    group["params"] = [p for p in own if self._of.get(id(p)) is block]
                settings = [_settings(group) for group in groups]
                _step(optimizer)
                for group, before in zip(groups, settings, strict=True):
                    group.update(before)
                block.release(optimizer)
            self._mover.settle()
            others = [[p for p in own if id(p) not in self._of] for own in members]
        finally:
            for group, own in zip(groups, members, strict=True):
                group["params"] = own
        self._taken[optimizer] = members
        for group, own in zip(groups, others, strict=True):
            group["params"] = own

    def after_step(self, optimizer: Optimizer) -> None:
        """Give an optimiser all its parameters back."""
        members = self._taken.pop(optimizer, None)
        if members is not None:
            for group, own in zip(optimizer.param_groups, members, strict=True):
                group["params"] = own


def _check(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInput for an optimiser that cannot step some of its parameters alone."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput(
            f"{kind.__name__} may read several parameters at once, and the plan keeps parameters on disk, which are "
            "stepped block by block.\n  try: an optimiser of torch.optim other than LBFGS, or a plan without on_disk"
        )
    if any(argument is not None for argument in (*args[1:], *kwargs.values())):  # the first is the optimiser
        raise InvalidInput(
            f"{kind.__name__}.step takes no closure here, as the plan keeps parameters on disk, which are stepped "
            "block by block.\n  try: loss = pm.step(...); optimizer.step()"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _step(optimizer: Optimizer) -> None:
    """A step without hooks, which those that others have registered see once."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
