"""The public functions: ``parallelize`` a model over the ranks of this job, ``search`` a plan for any cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from autopar.cost_model.hardware.cluster import Cluster
from autopar.huggingface.pretrained import format_of, open_pretrained
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.annotations import ParameterAnnotation
from autopar.ir.bounded_text import read_text
from autopar.ir.capture.capture import capture
from autopar.ir.capture.example_inputs import at_sizes
from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import InfeasiblePlan, InvalidInput, InvalidPlan, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.lengths import LengthHistogram
from autopar.ir.offload import offload_of
from autopar.ir.placed.placed_model import PlacedModel, place
from autopar.ir.plan import Plan
from autopar.ir.precision import parse_precision
from autopar.ir.program import StageProgram
from autopar.ir.recipe_pins import pins_of
from autopar.ir.rematerialisation import parse_bytes, parse_remat
from autopar.local_cluster import local_cluster, with_disk
from autopar.modes import Modes
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.planning import find_plan
from autopar.planning_lengths import Dataset, with_lengths
from autopar.planning_rows import search_rows
from autopar.runtime.agreement import agree, agree_same, from_first
from autopar.runtime.engine import Engine
from autopar.runtime.launch import ensure_process_group, this_device
from autopar.runtime.mesh import check_world_size
from autopar.runtime.module import ParallelModule
from autopar.runtime.same_start import check_same_start
from autopar.search.api import search_captured
from autopar.search.problem.constraint_options import SHORT, ConstraintOptions
from autopar.search.problem.constraints import Constraints

__all__ = ["ParallelModule", "constraints_of", "from_pretrained", "parallelize", "search"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Cluster | int,
    *,
    example_inputs: Any = None,
    example_target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    plan: Plan | str | Path | None = None,
    compile: bool = False,
    disk: str | Path | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> ParallelModule:
    """``model`` as a module that trains on all ranks of this job. Every rank calls it with the same arguments.

    mesh: the number of ranks, a Cluster that says what they are, or a DeviceMesh whose named axes (pp, dp, tp,
        cp, ep) the plan is held to.
    example_inputs: a *global* batch, as ``capture`` takes it; only shapes count. Without any, the model's own
        ``dummy_inputs`` serve, or else capture waits for the first call, which is then given a global batch.
    loss_fn: ``loss_fn(output, target)``, for a model that does not return its loss.
    plan: a plan or the path of one; else rank 0 searches one under ``constraints`` (``ConstraintOptions``: dp, tp,
        pp, cp, ep, sp, zero, schedule, virtual_stages, num_microbatches, microbatch, precision, remat,
        activation_memory, fit_probability, expert_capacity, expert_load, annotations).
    compile: run each distinct block through ``torch.compile``, once however often it repeats. Blocks that draw random
        numbers (dropout) are left as they are, since the compiler would draw others; under a schedule that splits the
        backward also those whose ops depend on values (experts, rings, documents in a row).
    disk: folder on a local disk of every node, for what the plan keeps there (``on_disk`` of its stages). Its files
        have no names and end with the process.

    The model is not changed: each rank copies its part of the parameters, or initialises them if the model is on
    the meta device. The result is in the mode that the model is in, train or eval, and a plan is always made for train
    mode: from_pretrained of transformers gives a model in eval mode, and ``train()`` of it or of the result turns its
    dropout on. Errors on one rank (AutoparError) are raised on all.
    """
    ensure_process_group()
    request = _Request(model, mesh, loss_fn, plan, constraints, compile, disk=disk)
    agree(lambda: request.check(dist.get_world_size()))
    form = format_of(model)
    if example_inputs is None:
        example_inputs = getattr(model, "dummy_inputs", None)
    if example_inputs is not None:
        return ParallelModule(request.build(example_inputs, example_target), pretrained=form, training=model.training)

    def build(args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Engine:
        example: Any = args
        if kwargs:
            example = inspect.signature(model.forward).bind(*args, **kwargs).arguments if args else dict(kwargs)
        return request.build(example, target)

    return ParallelModule(build, pretrained=form, training=model.training)


def from_pretrained(
    path: str | Path,
    mesh: DeviceMesh | Cluster | int,
    *,
    example_inputs: Any,
    example_target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    plan: Plan | str | Path | None = None,
    compile: bool = False,
    dtype: torch.dtype = torch.float32,
    disk: str | Path | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> ParallelModule:
    """The model in a checkpoint folder of transformers, each rank reading what it holds of the weights and no more.

    path: of a local folder with config.json, which names the architecture, and model.safetensors or several files with
        an index, seen by every rank.
    dtype: of parameters, converted from that of the files. The plan says what computation is done in.
    The other arguments are those of ``parallelize``, and every rank calls it with the same ones.

    Raises CheckpointError, on every rank, if tensors are missing, unknown or of another shape; InvalidModelFile if
    the config names no architecture of the installed transformers.
    """
    ensure_process_group()
    opened = agree(lambda: open_pretrained(str(path), dtype))
    try:
        request = _Request(opened.model, mesh, loss_fn, plan, constraints, compile, opened.values, disk)
        agree(lambda: request.check(dist.get_world_size()))
        return ParallelModule(request.build(example_inputs, example_target), pretrained=opened.form)
    finally:
        opened.files.close()


def search(
    model: nn.Module,
    cluster: Cluster | int,
    *,
    example_inputs: Any = None,
    example_target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    lengths: LengthHistogram | str | Path | None = None,
    pack: bool | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> Plan:
    """The fastest plan for training ``model`` on ``cluster``; needs neither its devices nor the model's weights.

    cluster: or a number of devices like that of this machine.
    lengths: a histogram of the lengths of documents, or the file of one that ``autopar lengths`` has written: the plan
        is chosen for rows of such documents, if they are packed, and its prediction says how long steps on them take
        (``plan.prediction.lengths``). pack: into rows as long as those of ``example_inputs``; else one document a row;
        None: where the model's attention keeps documents apart.
    The other arguments are those of ``parallelize``, which takes the plan. Raises CaptureError, InfeasiblePlan or
    InvalidInput.
    """
    if example_inputs is None:
        example_inputs = getattr(model, "dummy_inputs", None)
    if example_inputs is None:
        raise InvalidInput(
            f"{type(model).__name__} has no dummy_inputs.\n  try: example_inputs=..., one global batch of any values"
        )
    limits = constraints_of(constraints)
    if isinstance(cluster, int):
        cluster = local_cluster(cluster, this_device())
    dataset = None
    if lengths is not None:
        histogram = lengths if isinstance(lengths, LengthHistogram) else LengthHistogram.load(lengths)
        dataset = Dataset(histogram=histogram, packed=pack)
    planned = find_plan(
        model, cluster, example_inputs, constraints=limits, loss_fn=loss_fn, example_target=example_target,
        documents_of=None if dataset is None else dataset.documents_of,
    )  # fmt: skip
    plan, captured = planned.plan, planned.captured
    if dataset is None:
        return plan
    inputs, target = at_sizes(model, example_inputs, loss_fn, example_target, {BATCH: plan.planned_rows})
    return with_lengths(plan, dataset, captured, cluster, model, inputs, loss_fn=loss_fn, example_target=target)


def constraints_of(given: Mapping[str, Any]) -> Constraints:
    """Constraints from keywords. Raises InvalidInput for one that there is not."""
    known = {field.name for field in dataclasses.fields(Constraints)}
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = SHORT.get(name, name)
        if field not in known:
            raise InvalidInput(f"unknown constraint {name!r}; there are {', '.join(sorted(known | set(SHORT)))}")
        if field == "sequence_parallel" and isinstance(value, str):
            value = {"on": True, "off": False}[value]
        if field == "offload" and value is not None:
            value = offload_of(value)
        if field == "precision":
            fields["precision"], recipes = parse_precision(value)
            fields |= {} if recipes == (None,) else {"recipes": recipes}
            continue
        if isinstance(value, str) and field in ("remat", "activation_memory"):
            value = parse_remat(value) if field == "remat" else parse_bytes(value)
        read = {"annotations": _annotations, "expert_load": _loads, "recipe_pins": pins_of}.get(field)
        fields[field] = value if read is None else read(value)
    return Constraints(**fields)


def _annotations(given: Any) -> tuple[ParameterAnnotation, ...]:
    found = (given,) if isinstance(given, ParameterAnnotation) else tuple(given)
    for one in found:
        if not isinstance(one, ParameterAnnotation):
            raise InvalidInput(
                f"annotations: {one!r} says of no parameter where it is.\n"
                "  expected: what autopar.constrain(pattern, placements) returns, or a list of them\n"
                "  try: annotations=[autopar.constrain('*.up.weight', {'tp': Shard(0)})]"
            )
    return found


def _loads(given: Any) -> tuple[tuple[int, ...], ...]:
    try:
        layers = given.values() if isinstance(given, Mapping) else given
        return tuple(tuple(int(count) for count in load) for load in layers)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"expert_load: {type(given).__name__} does not say how many tokens experts got: {error}\n"
            "  expected: the result of expert_load() of a module, or for each layer the tokens of its experts"
        ) from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """What ``parallelize`` works out of a model and a plan before a rank is there: a process that forks ranks does it
    once for all of them."""

    captured: CapturedModel
    plan: Plan
    placed: PlacedModel
    programs: tuple[StageProgram, ...]

    @classmethod
    def of(cls, captured: CapturedModel, plan: Plan, analysis: Analysis | None = None) -> Prepared:
        """The programs of a plan, proved to be right. Raises PlanMismatch or InvalidPlan."""
        placed = place(Analysis.for_plan(captured, plan) if analysis is None else analysis, plan)
        programs = partition(placed, outputs="loss" if captured.has_loss else "model")
        verify_placements(placed.captured, programs, plan)
        return cls(captured, plan, placed, programs)


def assemble(
    model: nn.Module, example_inputs: Any, prepared: Prepared, *, disk: str | Path | None = None
) -> ParallelModule:
    """``parallelize`` of a model that is prepared, under its plan."""
    ensure_process_group()
    request = _Request(model, dist.get_world_size(), None, prepared.plan, {}, False, disk=disk)
    engine = request.build(example_inputs, None, prepared)
    return ParallelModule(engine, pretrained=format_of(model), training=model.training)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the caller of ``parallelize`` wants, before there are inputs to capture with."""

    model: nn.Module
    mesh: DeviceMesh | Cluster | int
    loss_fn: Callable[..., Any] | None
    plan: Plan | str | Path | None
    constraints: Mapping[str, Any]
    compile: bool
    values: Mapping[str, torch.Tensor] | None = None
    """Parameters and buffers that are not those of the model, by its names."""
    disk: str | Path | None = None

    def check(self, world_size: int) -> None:
        """Raise on a request that is wrong by itself. The same on every rank; nothing is sent."""
        if isinstance(self.mesh, DeviceMesh):
            ranks = self.mesh.size()
        else:
            ranks = self.mesh if isinstance(self.mesh, int) else self.mesh.num_gpus
        if ranks != world_size:
            raise PlanMismatch(
                f"the mesh has {ranks} ranks, this job has {world_size}.\n"
                f"  try: torchrun --nproc-per-node {ranks}, or a mesh of {world_size}"
            )
        constraints_of(self.constraints)

    def build(self, example_inputs: Any, example_target: Any, prepared: Prepared | None = None) -> Engine:
        """The engine of this rank. All ranks call together. prepared: all of them have it, or none."""
        captured = agree(
            lambda: self.capture(example_inputs, example_target) if prepared is None else prepared.captured
        )
        check_same_start(self.model, captured)
        agree_same(self._said(), "parallelize")
        known: list[Analysis] = []
        planned = partial(self._plan, captured, known, example_inputs, example_target)
        sent = from_first(lambda: f"{torch.initial_seed()}\n{planned().to_yaml()}")
        seed, _, text = sent.partition("\n")
        plan = Plan.from_yaml(text)
        if prepared is None and plan.planned_rows != captured.batch_size == plan.batch.global_size:
            example_inputs, example_target = self._with_rows(plan.planned_rows, example_inputs, example_target)
            captured = agree(lambda: self.capture(example_inputs, example_target))
            known.clear()
        check_world_size(plan, dist.get_world_size())
        if not captured.has_loss and plan.num_stages > 1:
            raise PlanMismatch(
                f"{captured.name} has no loss, and a pipeline of {plan.num_stages} stages only runs training steps.\n"
                "  try: loss_fn=..., labels among the example inputs, or pp=1"
            )

        analysis = known[0] if known else None
        ready = agree(lambda: Prepared.of(captured, plan, analysis) if prepared is None else prepared)
        return Engine(
            self.model,
            captured,
            plan,
            ready.programs,
            more=Modes.of(self.model, example_inputs, self.loss_fn, example_target, ready.placed),
            seed=int(seed),
            compile_blocks=self.compile,
            values=self.values,
            disk=self.disk,
        )

    def capture(self, example_inputs: Any, example_target: Any, *, symbolic: bool = False) -> CapturedModel:
        """The model as a graph. Raises CaptureError."""
        options = {"loss_fn": self.loss_fn, "example_target": example_target, "symbolic": symbolic}
        return normalise(capture(self.model, example_inputs, **options), check=False)

    def _with_rows(self, rows: int, example_inputs: Any, example_target: Any) -> tuple[Any, Any]:
        """Example inputs and target of a batch of another size."""
        return at_sizes(self.model, example_inputs, self.loss_fn, example_target, {BATCH: rows})

    def _said(self) -> dict[str, object]:
        """What has to be the same on every rank. Of a plan's file, where it is there: rank 0 reads it."""
        plan = self.plan
        if plan is not None and not isinstance(plan, Plan):
            plan = read_text(plan, "plan", InvalidPlan) if Path(plan).is_file() else None
        text = plan.to_yaml() if isinstance(plan, Plan) else plan
        digest = None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]
        said: dict[str, object] = {name: repr(value) for name, value in sorted(self.constraints.items())}
        said["constraints"] = ", ".join(said) or "none"
        return said | {"the plan (digest of its file)": digest, "compile": self.compile}

    def _plan(self, captured: CapturedModel, known: list[Analysis], example_inputs: Any, example_target: Any) -> Plan:
        """On rank 0: the given plan, or the best one, for which ``captured`` is analysed; ``known`` gets that."""
        if isinstance(self.plan, Plan):
            return self.plan
        if self.plan is not None:
            return Plan.load(self.plan)
        limits = constraints_of(self.constraints)
        cluster = self.mesh if isinstance(self.mesh, Cluster) else local_cluster(dist.get_world_size(), this_device())
        cluster = with_disk(cluster, self.disk)
        if isinstance(self.mesh, DeviceMesh):
            limits = self._within_mesh(limits, self.mesh)
        batch = captured.batch_size

        def captured_rows(rows: int) -> CapturedModel:
            if rows == batch:
                return captured
            return self.capture(*self._with_rows(rows, example_inputs, example_target))

        found = search_rows(
            batch,
            cluster.num_gpus,
            limits,
            search=lambda rows, limits: search_captured(captured_rows(rows), cluster, limits, samples=batch),
            symbolic=lambda: self.capture(example_inputs, example_target, symbolic=True),
        )
        known.append(found.workload.analysis)
        return found.plan

    def _within_mesh(self, limits: Constraints, mesh: DeviceMesh) -> Constraints:
        names = mesh.mesh_dim_names
        if names is None:
            return limits
        sizes = {name: mesh.size(number) for number, name in enumerate(names)}
        named = Constraints.of_mesh(sizes)
        for role in ("pp", "dp", "tp", "cp", "ep"):
            pinned, here = getattr(limits, role), named.pp if role == "pp" else named.degree(role)
            if pinned is not None and pinned != here:
                raise InfeasiblePlan(f"{role}={pinned} contradicts the mesh, where it is {here}: {sizes}")
        return replace(
            limits,
            pp=named.pp,
            axes=named.axes,
            **dict.fromkeys(("dp", "tp", "cp", "ep"), None),  # type: ignore[arg-type]
        )
