"""What a copy of the state holds: the tensors of a checkpoint, each rank's parts, and what belongs to the step."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.checkpoint.optimizers import OptimizerState
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
        self._parts: dict[str, tuple[torch.Tensor, Part]] = {}

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
        pm = self._pm
        parts: list[Part] = []
        tensors: list[torch.Tensor] = []
        for key, tensor in (own_tensors(pm) | flat(self._state.tensors())).items():
            local = local_of(tensor)
            # A forward writes buffers, and a step's end histories: these may change before they are copied.
            steady = isinstance(tensor, nn.Parameter) or key.startswith("optimizer/")
            parts.append(self._part(key, tensor, local))
            tensors.append(local if steady else local.clone())
        for key, tensor in (random_tensors() | history_tensors(pm)).items():
            parts.append(part_of(key, tensor, tensor.shape, (0,) * tensor.dim()))
            tensors.append(tensor.clone())
        return Snapshot(step, parts, tensors, self._values(step, data))

    def _part(self, key: str, tensor: torch.Tensor, local: torch.Tensor) -> Part:
        """What this rank's part, which may be empty, is. Found once for each tensor: it takes longer than copying a
        small one."""
        known = self._parts.get(key)
        if known is None or known[0] is not tensor:
            (chunk,) = chunks_of(tensor)
            known = self._parts[key] = tensor, part_of(key, local, tensor.shape, chunk.offsets)
        return known[1]

    def _values(self, step: int, data: Any) -> bytes:
        content = {
            "step": step,
            "data": data,
            "scheduler": [one.state_dict() for one in as_list(self._scheduler)],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "values": self._state.values(),
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


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
