"""Loading: each rank reads what its parts need out of the parts that others wrote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from autopar.runtime.checkpoint.folder import SafeReader, check_files, latest, read_metadata, read_state
from autopar.runtime.checkpoint.frozen import changes, frozen_sum
from autopar.runtime.checkpoint.optimizers import OptimizerState
from autopar.runtime.checkpoint.saving import (
    FORMAT,
    Stateful,
    as_list,
    flat,
    history_tensors,
    random_tensors,
    tensors_of,
)
from autopar.runtime.module import ParallelModule


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training was: the ``step`` and ``data`` that were saved."""

    step: int
    data: Any


def load(
    pm: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: str | os.PathLike[str],
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
) -> Progress:
    """Read the latest checkpoint in the folder ``path``, whatever plan it was saved under. All ranks call together.

    optimizer: None for the parameters and buffers alone. The state of the generators of random numbers is restored
    under the plan that it was saved under; under another one dropout goes on from the same seed and step.
    Raises CheckpointError, on every rank, before anything has changed if the checkpoint does not fit the model.
    """
    what = [type(one).__name__ for one in (*as_list(optimizer), *as_list(scheduler), *as_list(scaler))]
    pm.engine.agree_to(f"load({', '.join(('pm', *what, repr(str(path))))})")
    pm.engine.background.finish()
    schedulers = as_list(scheduler)
    state = agree(lambda: OptimizerState(as_list(optimizer), dict(pm.named_parameters())))
    folder, saved, tensors = agree(lambda: _check(pm, state, Path(path), schedulers, scaler))
    if saved.get("frozen") is not None:
        _check_frozen(pm, saved, folder)
    if state.names:
        state.create()  # not within agree: the step of an optimiser may communicate
    agree(lambda: _read(pm, state, folder, saved, tensors))
    for one, values in zip(schedulers, saved["scheduler"], strict=False):
        one.load_state_dict(values)
    if scaler is not None:
        scaler.load_state_dict(saved["scaler"])
    return Progress(saved["step"], saved["data"])


def _check(
    pm: ParallelModule, state: OptimizerState, path: Path, schedulers: list[Stateful], scaler: Stateful | None
) -> tuple[Path, dict[str, Any], dict[str, set[str]]]:
    """The folder, what is in ``state.pt``, and the names of the tensors of each parameter's optimiser state."""
    folder = latest(path)
    saved, metadata = read_state(folder), read_metadata(folder)
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {saved.get('format')!r}; this version of autopar reads {FORMAT}")
    wanted = tensors_of(pm, _names_in(pm, saved))
    _check_model(pm, wanted, metadata.state_dict_metadata, saved, folder)
    if state.names and saved["settings"] is None:
        raise CheckpointError(f"{folder} was saved without an optimiser.\n  try: load(pm, None, path)")
    if schedulers and len(schedulers) != len(saved["scheduler"]):
        raise CheckpointError(f"{folder} has {len(saved['scheduler'])} schedulers, expected {len(schedulers)}")
    if scaler is not None and saved["scaler"] is None:
        raise CheckpointError(f"{folder} was saved without a loss scaler.\n  try: load(...) without scaler=")
    tensors: dict[str, set[str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith("optimizer/"):
            name, _, leaf = key.removeprefix("optimizer/").rpartition("/")
            tensors.setdefault(name, set()).add(leaf)
    own = [f"optimizer/{name}/{leaf}" for name in state.names for leaf in tensors.get(name, ())]
    check_files(folder, metadata, [*wanted, *own])
    if state.names:
        state.load_settings(saved["settings"])
    return folder, saved, tensors


def _names_in(pm: ParallelModule, saved: Mapping[str, Any]) -> set[str] | None:
    """Names of the tensors that the checkpoint is to have; None for all."""
    return None if saved.get("frozen") is None else changes(pm)


def _check_frozen(pm: ParallelModule, saved: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError unless the frozen parameters are those beside which the others were trained."""
    if frozen_sum(pm) != saved["frozen"]:
        raise CheckpointError(
            f"the checkpoint {folder} holds what trains alone, and the frozen parameters of {pm.engine.captured.name} "
            "are not those beside which it was trained.\n  expected: the same base weights, as much of them frozen\n"
            "  try: from_pretrained of the same base; or save(...) without trainable_only, which holds all of them"
        )


def _read(
    pm: ParallelModule, state: OptimizerState, folder: Path, saved: dict[str, Any], tensors: Mapping[str, set[str]]
) -> None:
    """On each rank by itself; nothing is sent."""
    wanted = tensors_of(pm, _names_in(pm, saved)) | flat(state.adopt(tensors, saved["values"]))
    saved_tensors = read_metadata(folder).state_dict_metadata
    for name, value in history_tensors(pm).items():
        if name in saved_tensors:
            wanted[name] = value
        else:  # of another recipe: it begins anew
            value.zero_()
    generators = {}
    if _without_prediction(saved["plan"]) == _without_prediction(pm.plan.to_yaml()):
        generators = {name: value for name, value in random_tensors().items() if name in saved_tensors}
    try:
        with warnings.catch_warnings():
            # It says that a single process is assumed. Each rank is to read by itself, without a word to the others.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(wanted | generators, storage_reader=SafeReader(folder), planner=planner, no_dist=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"reading {folder} failed: {error}\n  try: an earlier checkpoint") from error
    for name, value in generators.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)
    pm.engine.randomness.restore(saved["random"])


def _check_model(
    pm: ParallelModule,
    wanted: Mapping[str, torch.Tensor],
    found: Mapping[str, Any],
    saved: dict[str, Any],
    folder: Path,
) -> None:
    """Raise CheckpointError unless the checkpoint has the model's parameters and buffers, and no others."""
    captured = pm.engine.captured
    names = {p.name for p in captured.parameters.values()} | {b.name for b in captured.buffers.values() if b.persistent}
    problems = [f"{key} is missing" for key in wanted if key not in found]
    for key, value in wanted.items():
        entry = found.get(key)
        if entry is not None and not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{key} is not a tensor")
        elif entry is not None and entry.size != value.shape:
            problems.append(f"{key} has shape {tuple(entry.size)}, expected {tuple(value.shape)}")
    problems += [f"{key} is not in the model" for key in found if key[:6] == "model/" and key[6:] not in names]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint {folder} does not fit the model:\n{listed}{more}\n"
            f"  it is of {saved['model']} (fingerprint {saved['fingerprint']}), this is {captured.name} "
            f"({captured.fingerprint})\n  try: the model that was saved"
        )


def _without_prediction(text: str) -> Plan:
    return Plan.from_yaml(text, source="the plan in the checkpoint").model_copy(update={"prediction": None})
