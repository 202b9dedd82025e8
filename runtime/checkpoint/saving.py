"""Saving: each rank writes its own parts, once for all copies; a crash leaves the checkpoint before it."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import Optimizer

from autopar.ir.errors import InvalidInput
from autopar.runtime.agreement import agree, from_first
from autopar.runtime.checkpoint.background import Saving, write_failed
from autopar.runtime.checkpoint.contents import state_bytes
from autopar.runtime.checkpoint.failures import FAILURES
from autopar.runtime.checkpoint.finite import check_finite
from autopar.runtime.checkpoint.folder import new_name, remove_incomplete
from autopar.runtime.checkpoint.free_space import check_free_space
from autopar.runtime.checkpoint.frozen import changes, frozen_sum
from autopar.runtime.checkpoint.optimizers import ByName, OptimizerState
from autopar.runtime.checkpoint.verification import FORMAT
from autopar.runtime.checkpoint.writer import AtomicWriter
from autopar.runtime.module import ParallelModule


class Stateful(Protocol):
    """A learning-rate scheduler, a loss scaler: something with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """The state to be saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a saved state."""


def save(
    pm: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: str | os.PathLike[str],
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
    step: int = 0,
    data: Any = None,
    asynchronous: bool = False,
    trainable_only: bool = False,
    keep: int = 1,
) -> Saving:
    """Write a checkpoint to the folder ``path``; the newest ``keep`` stay, older ones go once the new one is complete.

    All ranks call together, on a file system that they share. Saved are parameters, buffers, optimiser and
    generators of random numbers of all ranks, and of rank 0 ``scheduler``, ``scaler``, ``step`` and ``data``: where
    the data stands, as plain values or tensors. ``load`` reads it under any plan for the same model.

    trainable_only: leave out frozen parameters, which a model with adapters has most of, and buffers that forward does
    not write. ``load`` then wants a model whose frozen parameters are the same, and checks that they are.
    asynchronous: return once everything is copied to the CPU, and write it beside training; of state that the plan
    keeps on disk, for which host memory has no room, once it is written. If a write beside training fails, the next
    call of ``pm`` raises CheckpointError, or the next ``save``, or ``wait()``, which the program must call before it
    ends the process group.
    Raises InvalidInput or CheckpointError, on every rank, and without writing anything CheckpointError if the disk has
    no room, NotFinite if a number that training would go on from is not finite. What was saved before is kept then.
    """
    background, folder = pm.engine.background, Path(path)
    what = [type(one).__name__ for one in (*as_list(optimizer), *as_list(scheduler), *as_list(scaler))]
    options = f"step={step}, asynchronous={asynchronous}, trainable_only={trainable_only}, keep={keep}"
    pm.engine.agree_to(f"save({', '.join(('pm', *what, repr(str(path))))}, {options})")
    if keep < 1:
        raise InvalidInput(f"keep={keep}: expected at least 1, the checkpoint that is written")
    agree(background.finish)
    optimizers = agree(lambda: OptimizerState(as_list(optimizer), dict(pm.named_parameters())))
    of_optimizers = flat(optimizers.tensors())
    check_finite(pm, path, step, optimizer=of_optimizers, buffers=_written_buffers(pm))
    tensors = tensors_of(pm, changes(pm) if trainable_only else None) | of_optimizers | history_tensors(pm)
    own = random_tensors()
    frozen = frozen_sum(pm) if trainable_only else None
    state = _state(pm, optimizers, scheduler, scaler, step, data, frozen)
    agree(lambda: remove_incomplete(folder) if dist.get_rank() == 0 else None)
    check_free_space(pm, folder, tensors, own, state)
    name = from_first(lambda: new_name(step))
    writer = AtomicWriter(folder, name, state, keep, frozenset(background.damaged))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    group, everything = background.group(), tensors | own
    if asynchronous and pm.engine.disk is None:
        future = dcp.async_save(everything, storage_writer=writer, planner=planner, process_group=group)
        assert isinstance(future, Future), "of a writer that stages by itself"
        future.add_done_callback(lambda ended: _clear(writer) if ended.exception() is not None else None)
        background.saving = Saving(str(path), future)
        return background.saving
    try:
        dcp.save(everything, storage_writer=writer, planner=planner, process_group=group)
    except FAILURES as error:
        _clear(writer)
        raise write_failed(str(path), error) from error
    return Saving(str(path), None)


def _written_buffers(pm: ParallelModule) -> dict[str, torch.Tensor]:
    """The buffers of this rank that forward writes."""
    written = {buffer.name for buffer in pm.engine.captured.buffers.values() if buffer.updated_by is not None}
    return {name: value for name, value in pm.named_buffers() if name in written}


def _clear(writer: AtomicWriter) -> None:
    """Give back the room of a write that has failed, of which all ranks know by now."""
    if dist.get_rank() == 0:
        writer.discard()


def _state(
    pm: ParallelModule,
    optimizers: OptimizerState,
    scheduler: Stateful | Sequence[Stateful] | None,
    scaler: Stateful | None,
    step: int,
    data: Any,
    frozen: int | None,
) -> bytes:
    """Everything else, on rank 0; nothing on the others."""
    engine = pm.engine
    own: tuple[ByName, ByName] = (optimizers.settings(), optimizers.values())
    # Ranks at one place of each stage have all parameters between them.
    parts: list[Any] = [None] * engine.mesh.num_pipeline_ranks
    dist.all_gather_object(parts, own, group=engine.mesh.pipeline_group())
    settings: ByName = {}
    values: ByName = {}
    for some_settings, some_values in parts:
        settings.update(some_settings)
        values.update(some_values)
    content = {
        "format": FORMAT,
        "model": engine.captured.name,
        "fingerprint": engine.captured.fingerprint,
        "plan": engine.plan.to_yaml(),
        "step": step,
        "data": data,
        "scheduler": [one.state_dict() for one in as_list(scheduler)],
        "scaler": None if scaler is None else scaler.state_dict(),
        "settings": settings or None,
        "values": values,
        "random": engine.randomness.state(),
        "frozen": frozen,
    }
    return agree(lambda: state_bytes(content) if dist.get_rank() == 0 else b"")


def tensors_of(pm: ParallelModule, only: Container[str] | None = None) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of this rank, detached. only: names of those that are wanted; None for all."""
    tensors = own_tensors(pm).items()
    return {key: value.detach() for key, value in tensors if only is None or key.removeprefix("model/") in only}


def own_tensors(pm: ParallelModule) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of this rank themselves."""
    persistent = set(pm.engine.state_order)
    buffers = {name: value for name, value in pm.named_buffers() if name in persistent}
    own = {**dict(pm.named_parameters()), **buffers}
    return {f"model/{name}": value for name, value in own.items()}


def history_tensors(pm: ParallelModule) -> dict[str, torch.Tensor]:
    """Histories of maxima of this rank's stages, which a plan without delayed scaling has not."""
    return {f"history/{name}": value for name, value in pm.engine.histories.tensors.items()}


def flat(by_name: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of an optimiser under one key each."""
    return {f"optimizer/{name}/{key}": value for name, state in by_name.items() for key, value in state.items()}


def random_tensors() -> dict[str, torch.Tensor]:
    """The states of torch's own generators on this rank."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"random/{dist.get_rank()}/{device}": state for device, state in states.items()}


def as_list(given: Any) -> list[Any]:
    """None as an empty list, a single object as a list of it."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
