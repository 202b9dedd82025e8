"""Bytes that tensors of this process hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def held_bytes() -> int:
    """Of every storage on the CPU that some tensor of Python uses, each counted once.

    A thread of gloo lets go of what it sent a moment after that has arrived, so the least of a few counts.
    """
    counts = [_held_bytes()]
    for _ in range(2):
        time.sleep(0.02)
        counts.append(_held_bytes())
    return min(counts)


def _held_bytes() -> int:
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Gives what autograd keeps for backward an object in Python, as long as ``kept`` is not cleared."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        super().__init__(self._pack, lambda value: value)

    def _pack(self, value: Tensor) -> Tensor:
        self.kept.append(value.detach())
        return value


def kept_by_a_step(parallel: Any, inputs: Mapping[str, Tensor]) -> int:
    """Bytes that the forward of a step keeps for its backward on this rank. inputs: of the rank."""
    saved, kept = Saved(), list[int]()
    hook = parallel.engine.stage.register_forward_hook(lambda *_: kept.append(held_bytes() - before))
    before = held_bytes()
    with saved:
        parallel.step(**inputs)
    hook.remove()
    return kept[0]
