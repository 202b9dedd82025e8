"""Loading: each rank reads what its parts need out of the parts that others wrote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from autopar.ir.errors import CheckpointError
from autopar.ir.plan import Plan
from autopar.runtime.agreement import agree
from autopar.runtime.checkpoint.failures import reading
from autopar.runtime.checkpoint.frozen import changes, frozen_sum
from autopar.runtime.checkpoint.optimizers import OptimizerState
from autopar.runtime.checkpoint.saved import Saved
from autopar.runtime.checkpoint.saving import (
    Stateful,
    as_list,
    flat,
    history_tensors,
    random_tensors,
    tensors_of,
)
from autopar.runtime.checkpoint.verification import verified
from autopar.runtime.disk.state import DiskState
from autopar.runtime.module import ParallelModule


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training was: the ``step`` and ``data`` that were saved.

    skipped: name -> what is wrong with each newer checkpoint that is damaged, if ``load`` was to pass them over.
    """

    step: int
    data: Any
    skipped: Mapping[str, str] = field(default_factory=dict)


def load(
    pm: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: str | os.PathLike[str],
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
    fall_back: bool = False,
) -> Progress:
    """Read the latest checkpoint in the folder ``path``, whatever plan it was saved under. All ranks call together.

    Every byte of it is compared with its checksum first. fall_back: if it is damaged, read the newest one that is kept
    there (``save(..., keep=2)``) and is not; a warning says what was passed over and why, as ``Progress.skipped`` does.

    optimizer: None for the parameters and buffers alone. The state of the generators of random numbers is restored
    under the plan that it was saved under; under another one dropout goes on from the same seed and step.
    Raises CheckpointError, on every rank, before anything has changed, if the checkpoint is damaged or does not fit.
    """
    what = [type(one).__name__ for one in (*as_list(optimizer), *as_list(scheduler), *as_list(scaler))]
    pm.engine.agree_to(f"load({', '.join(('pm', *what, repr(str(path))))}, fall_back={fall_back})")
    agree(pm.engine.background.finish)
    found = verified(Path(path), fall_back=fall_back)
    pm.engine.background.damaged |= found.skipped.keys()
    return load_saved(pm, optimizer, found, scheduler=scheduler, scaler=scaler)


def load_saved(
    pm: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    found: Saved,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
) -> Progress:
    """``load`` of a state that is found. All ranks call together."""
    schedulers = as_list(scheduler)
    state = agree(lambda: OptimizerState(as_list(optimizer), dict(pm.named_parameters())))
    tensors = agree(lambda: _check(pm, state, found, schedulers, scaler))
    saved = found.state
    if saved.get("frozen") is not None:
        _check_frozen(pm, found)
    wanted = _create_state(state, saved, tensors, pm.engine.disk)
    agree(lambda: _read(pm, wanted, found))
    for one, values in zip(schedulers, saved["scheduler"], strict=False):
        one.load_state_dict(values)
    if scaler is not None:
        scaler.load_state_dict(saved["scaler"])
    return Progress(saved["step"], saved["data"], found.skipped)


def _check(
    pm: ParallelModule, state: OptimizerState, found: Saved, schedulers: list[Stateful], scaler: Stateful | None
) -> dict[str, set[str]]:
    """The names of the tensors of each parameter's optimiser state. Raises CheckpointError if anything does not fit."""
    where, saved, metadata = found.where, found.state, found.metadata
    wanted = tensors_of(pm, _names_in(pm, saved))
    _check_model(pm, wanted, found)
    if state.names and saved["settings"] is None:
        raise CheckpointError(f"{where} was saved without an optimiser.\n  try: load(pm, None, path)")
    if schedulers and len(schedulers) != len(saved["scheduler"]):
        raise CheckpointError(f"{where} has {len(saved['scheduler'])} schedulers, expected {len(schedulers)}")
    if scaler is not None and saved["scaler"] is None:
        raise CheckpointError(f"{where} was saved without a loss scaler.\n  try: load(...) without scaler=")
    tensors: dict[str, set[str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith("optimizer/"):
            name, _, leaf = key.removeprefix("optimizer/").rpartition("/")
            tensors.setdefault(name, set()).add(leaf)
    own = [f"optimizer/{name}/{leaf}" for name in state.names for leaf in tensors.get(name, ())]
    found.check([*wanted, *own])
    if state.names:
        state.check_settings(saved["settings"])
    return tensors


def _names_in(pm: ParallelModule, saved: Mapping[str, Any]) -> set[str] | None:
    """Names of the tensors that the checkpoint is to have; None for all."""
    return None if saved.get("frozen") is None else changes(pm)


def _check_frozen(pm: ParallelModule, found: Saved) -> None:
    """Raise CheckpointError unless the frozen parameters are those beside which the others were trained."""
    if frozen_sum(pm) != found.state["frozen"]:
        raise CheckpointError(
            f"{found.where} holds what trains alone, and the frozen parameters of {pm.engine.captured.name} "
            "are not those beside which it was trained.\n  expected: the same base weights, as much of them frozen\n"
            "  try: from_pretrained of the same base; or save(...) without trainable_only, which holds all of them"
        )


def _create_state(
    state: OptimizerState, saved: Mapping[str, Any], tensors: Mapping[str, set[str]], disk: DiskState | None
) -> dict[str, torch.Tensor]:
    """The tensors of the optimiser that are to be read, by key. disk: has some of them, whose gradients are not to be
    in memory together. All ranks call together, those without parameters too.

    Raises CheckpointError, on every rank, with all put back as it was.
    """
    put_back = state.undo()
    if state.names:
        state.load_settings(saved["settings"])
        # Not within agree: the step of an optimiser may communicate.
        state.create(None if disk is None else disk.names_by_block(state.names))
    try:
        return flat(agree(lambda: state.adopt(tensors, saved["values"])))
    except CheckpointError:
        put_back()
        raise


def _read(pm: ParallelModule, optimizer: Mapping[str, torch.Tensor], found: Saved) -> None:
    """On each rank by itself; nothing is sent."""
    saved, saved_tensors = found.state, found.metadata.state_dict_metadata
    wanted = {**tensors_of(pm, _names_in(pm, saved)), **optimizer}
    for name, value in history_tensors(pm).items():
        if name in saved_tensors:
            wanted[name] = value
        else:  # of another recipe: it begins anew
            value.zero_()
    generators = {}
    if is_plan(saved["plan"], pm.plan):
        generators = {name: value for name, value in random_tensors().items() if name in saved_tensors}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # It says that a single process is assumed. Each rank is to read by itself, without a word to the others.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        tensors, reader = wanted | generators, found.reader()
        disk = pm.engine.disk
        with nullcontext() if disk is None else disk.flushing():
            reading(found.where, lambda: dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True))
    for name, value in generators.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)
    pm.engine.randomness.restore(saved["random"])


def _check_model(
    pm: ParallelModule,
    wanted: Mapping[str, torch.Tensor],
    found: Saved,
) -> None:
    """Raise CheckpointError unless the checkpoint has the model's parameters and buffers, and no others."""
    saved, there, captured = found.state, found.metadata.state_dict_metadata, pm.engine.captured
    names = {p.name for p in captured.parameters.values()} | {b.name for b in captured.buffers.values() if b.persistent}
    problems = [f"{key} is missing" for key in wanted if key not in there]
    for key, value in wanted.items():
        entry = there.get(key)
        if entry is not None and not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{key} is not a tensor")
        elif entry is not None and entry.size != value.shape:
            problems.append(f"{key} has shape {tuple(entry.size)}, expected {tuple(value.shape)}")
    problems += [f"{key} is not in the model" for key in there if key[:6] == "model/" and key[6:] not in names]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{found.where} does not fit the model:\n{listed}{more}\n"
            f"  it is of {saved['model']} (fingerprint {saved['fingerprint']}), this is {captured.name} "
            f"({captured.fingerprint})\n  try: the model that was saved"
        )


def is_plan(text: str, plan: Plan) -> bool:
    """Whether a saved plan is this one; predictions aside."""
    saved = Plan.from_yaml(text, source="the plan in the checkpoint")
    return saved.model_copy(update={"prediction": None}) == plan.model_copy(update={"prediction": None})
