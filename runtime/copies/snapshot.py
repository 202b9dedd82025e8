"""What a copy of the state holds: the tensors of a checkpoint, each rank's parts, and what belongs to the step."""

from __future__ import annotations

import io
import operator
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.checkpoint.optimizers import ByName, OptimizerState
from autopar.runtime.checkpoint.saving import as_list, flat, history_tensors, own_tensors, random_tensors
from autopar.runtime.copies.slot import Part, part_of
from autopar.runtime.module import ParallelModule
from autopar.runtime.torch_private import chunks_of


@dataclass(slots=True)
class Snapshot:
    """The state after a step. tensors: this rank's, in the order of parts, which may not change until they are copied.
    values: as bytes."""

    step: int
    parts: list[Part]
    tensors: list[torch.Tensor]
    values: bytes


class Snapshots:
    """Takes snapshots of one module and its optimisers."""

    def __init__(self, pm: ParallelModule, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> None:
        self._pm, self._scheduler, self._scaler = pm, scheduler, scaler
        self._optimizers: list[Optimizer] = as_list(optimizer)
        self._state = OptimizerState(self._optimizers, dict(pm.named_parameters()))
        self._settings: tuple[Any, bytes] | None = None
        self._tensors: list[torch.Tensor] = []
        self._parts: list[Part] = []

    def header(self) -> dict[str, Any]:
        """What is the same after every step, for JSON."""
        engine = self._pm.engine
        return {
            "model": engine.captured.name,
            "fingerprint": engine.captured.fingerprint,
            "plan": engine.plan.to_yaml(),
        }

    def take(self, step: int, data: Any) -> Snapshot:
        """The state after ``step`` steps. data: where the data stands."""
        state, values = self._state.both()
        own = own_tensors(self._pm)
        found = [*own.values(), *(tensor for of_one in state.values() for tensor in of_one.values())]
        if len(found) != len(self._tensors) or not all(map(operator.is_, found, self._tensors)):
            # Found once for all steps with the same tensors: it takes longer than copying small ones.
            self._tensors, self._parts = found, list(starmap(_part, (own | flat(state)).items()))
        parts, tensors = list(self._parts), [local_of(tensor) for tensor in found]
        for place, tensor in enumerate(found[: len(own)]):
            # A forward writes buffers, which may change before they are copied.
            if not isinstance(tensor, nn.Parameter):
                tensors[place] = tensors[place].clone()
        # A step's end writes histories.
        for key, tensor in (random_tensors() | history_tensors(self._pm)).items():
            parts.append(part_of(key, tensor, tensor.shape, (0,) * tensor.dim()))
            tensors.append(tensor.clone())
        return Snapshot(step, parts, tensors, self._values(step, data, values))

    def _values(self, step: int, data: Any, optimizer: ByName) -> bytes:
        content = {
            "step": step,
            "data": data,
            "scheduler": [one.state_dict() for one in as_list(self._scheduler)],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "values": optimizer,
            "settings": self._saved_settings(),
            "random": self._pm.engine.randomness.state(),
        }
        return _saved(content)

    def _saved_settings(self) -> bytes:
        """Hyperparameters as bytes. They are many and seldom change, and writing them takes longer than comparing."""
        now = self._state.settings()
        if self._settings is None or self._settings[0] != now:
            self._settings = now, _saved(now)
        return self._settings[1]


def _part(key: str, tensor: torch.Tensor) -> Part:
    """What this rank's part, which may be empty, is."""
    (chunk,) = chunks_of(tensor)
    return part_of(key, local_of(tensor), tensor.shape, chunk.offsets)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
