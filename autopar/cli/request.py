"""One ``search`` or ``estimate``: from flags to the cluster, the constraints, the plan and what is printed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pydantic
import typer

from autopar.cli.json_output import print_json
from autopar.cli.options import OffloadPlace, ScheduleName, SequenceLayoutName, Switch
from autopar.cli.outputs import Outputs, check_files
from autopar.cli.progress import progress_on_stderr
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.cost_model.compute.expert_imbalance import Loads
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.annotations import parse_annotation
from autopar.ir.bounded_text import parse_json, parse_yaml, read_text
from autopar.ir.errors import InfeasiblePlan, InvalidCluster, InvalidInput
from autopar.ir.lengths import LengthHistogram
from autopar.ir.offload import offload_of
from autopar.ir.plan import Plan
from autopar.ir.precision import parse_precision
from autopar.ir.recipe_pins import parse_pin
from autopar.ir.rematerialisation import parse_bytes, parse_remat
from autopar.load_model import load_model_file
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.constraints_of_plan import constraints_like, forbidden_like, with_axes_of
from autopar.search.problem.forbidden_placements import parse_forbidden

_DEFAULT_GPU = "h100-sxm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The flags as given; None is not given."""

    model: str
    gpus: int | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    stack: str | None = None
    cluster_file: Path | None = None
    global_batches: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    lengths: Path | None = None
    pack: bool | None = None
    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    sp: Switch | None = None
    zero: int | None = None
    shard: int | None = None
    sequence_layout: SequenceLayoutName | None = None
    reshard: Switch | None = None
    prefetch: int | None = None
    offload: OffloadPlace | None = None
    schedule: ScheduleName | None = None
    virtual_stages: int | None = None
    microbatch: int | None = None
    num_microbatches: int | None = None
    expert_capacity: float | None = None
    expert_load: Path | None = None
    precision: str | None = None
    remat: str | None = None
    activation_memory: str | None = None
    fit_probability: float | None = None
    constrain: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    like: Path | None = None
    forbid: tuple[str, ...] = ()
    output: Path | None = None
    report: Path | None = None
    vary: bool = True
    trace: Path | None = None
    json: bool = False
    pin_degrees: bool = False

    @property
    def has_several_sizes(self) -> bool:
        """Whether plans for several batches or lengths are asked for."""
        return len(self.global_batches) > 1 or len(self.seqs) > 1 or bool(self.shares)

    @property
    def global_batch(self) -> int | None:
        """The one global batch; None for the model's own."""
        return self.global_batches[0] if self.global_batches else None

    @property
    def seq(self) -> int | None:
        """The one sequence length; None for the model's own."""
        return self.seqs[0] if self.seqs else None

    def cluster(self) -> Cluster:
        """The cluster file, overridden by flags. Raises InvalidCluster."""
        described: Any = {"gpu": _DEFAULT_GPU}
        source = "the cluster"
        if self.cluster_file is not None:
            source = str(self.cluster_file)
            described = read_yaml(self.cluster_file)
            if not isinstance(described, dict):
                return cluster_from_dict(described, source=source)
        elif self.like is not None:
            reference = Plan.load(self.like).cluster
            described = reference.model_dump(include={"gpu", "num_gpus", "gpus_per_node", "stack"})
        flags = {"gpu": self.gpu, "num_gpus": self.gpus, "gpus_per_node": self.gpus_per_node, "stack": self.stack}
        described = {**described, **{name: value for name, value in flags.items() if value is not None}}
        if "num_gpus" not in described and "nodes" not in described:
            raise InvalidCluster("how many GPUs?\n  try: --gpus 8, or --cluster with a YAML file that says num_gpus")
        return cluster_from_dict(described, source=source)

    def _histogram(self) -> LengthHistogram | None:
        """Of ``--lengths``. Raises InvalidInput."""
        if self.lengths is not None:
            return LengthHistogram.load(self.lengths)
        if self.pack is not None:
            raise InvalidInput(f"--{'pack' if self.pack else 'pad'} is about documents.\n  try: --lengths, too")
        return None

    def constraints(self, cluster: Cluster) -> Constraints:
        """The constraints that the flags state; precision is fp32 on CPUs and else bf16 if none is given."""
        usual = "fp32" if cluster.device.name.lower() == "cpu" else "bf16"
        precision, recipes = parse_precision(self.precision or usual)
        given = Constraints(
            pp=self.pp,
            dp=self.dp,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            sequence_parallel=None if self.sp is None else self.sp is Switch.on,
            zero=self.zero,
            shard=self.shard,
            sequence_layout=None if self.sequence_layout is None else self.sequence_layout.value,  # type: ignore[arg-type]
            reshard_after_forward=None if self.reshard is None else self.reshard is Switch.on,
            prefetch=self.prefetch,
            offload=None if self.offload is None else offload_of(self.offload.value),
            schedule=None if self.schedule is None else self.schedule.value,  # type: ignore[arg-type]
            virtual_stages=self.virtual_stages,
            microbatch_size=self.microbatch,
            num_microbatches=self.num_microbatches,
            expert_capacity=self.expert_capacity,
            expert_load=() if self.expert_load is None else read_loads(self.expert_load),
            precision=precision,
            recipes=recipes,
            activation_memory=None if self.activation_memory is None else parse_bytes(self.activation_memory),
            fit_probability=self.fit_probability,
            remat=None if self.remat is None else parse_remat(self.remat),
            recipe_pins=tuple(map(parse_pin, self.recipe)),
            annotations=tuple(map(parse_annotation, self.constrain)),
            forbidden=tuple(map(parse_forbidden, self.forbid)),
        )
        return given if self.like is None else self._like(Plan.load(self.like), given)

    def _like(self, plan: Plan, given: Constraints) -> Constraints:
        """What ``plan`` has, and of ``given`` what it leaves open."""
        twice = [f"--{name}" for name in ("pp", "dp", "tp", "cp", "ep", "sp") if getattr(self, name) is not None]
        if twice:
            raise InvalidInput(f"--like {self.like} says what {' and '.join(twice)} would say too\n  try: one of them")
        own = constraints_like(plan)
        pinned = {
            field.name: getattr(given, field.name)
            for field in fields(Constraints)
            if getattr(given, field.name) not in (None, ()) and field.name not in ("precision", "recipes")
        }
        forbidden = tuple(forbidden_like(plan, one) for one in given.forbidden)
        if self.precision is not None:
            pinned |= {"precision": given.precision, "recipes": given.recipes}
        return replace(own, **{**pinned, "forbidden": forbidden})

    def run(self) -> None:
        """Search, write the files that were asked for, print. Raises AutoparError."""
        check_files(self.output, self.report, self.trace)
        cluster = self.cluster()
        constraints = self.constraints(cluster)
        histogram = self._histogram()
        source = load_model_file(self.model)
        # Imported here so that a mistyped flag or file is answered at once.
        from autopar.cli.summary import infeasible_summary, summary
        from autopar.planning import find_plan
        from autopar.planning_lengths import Dataset, with_lengths
        from autopar.report.terminal import print_plan

        dataset = None if histogram is None else Dataset(histogram=histogram, packed=self.pack)
        try:
            with progress_on_stderr(quiet=self.json) as progress:
                progress("building the model")
                model, inputs = source.meta_model(), source.meta_inputs(self.global_batch, self.seq)
                planned = find_plan(
                    model,
                    cluster,
                    inputs,
                    inputs_of=lambda size: source.meta_inputs(size, self.seq),
                    constraints=constraints,
                    pin_degrees=self.pin_degrees,
                    documents_of=None if dataset is None else dataset.documents_of,
                    name=source.name,
                    progress=progress,
                )
                if dataset is not None:
                    progress("packing documents" if dataset.packs(planned.captured) else "padding documents")
                    inputs = source.meta_inputs(planned.plan.planned_rows, self.seq)
                    plan = with_lengths(
                        planned.plan, dataset, planned.captured, cluster, model, inputs, name=source.name
                    )
                    planned = replace(planned, result=replace(planned.result, plan=plan))
        except InfeasiblePlan as error:
            if not self.json:
                raise
            print_json(infeasible_summary(str(error)))
            raise typer.Exit(2) from error
        found = planned.plan if self.like is None else with_axes_of(planned.plan, Plan.load(self.like))
        named = found.model.model_copy(update={"source": self.model, "seq": self.seq})
        planned = replace(planned, result=replace(planned.result, plan=found.model_copy(update={"model": named})))
        outputs = Outputs()
        outputs.write("plan", self.output, planned.plan.save)
        if self.report is not None:
            from autopar.report.page import plan_report
            from autopar.report.study import study_found

            with progress_on_stderr(quiet=self.json) as progress:
                study = study_found(planned, vary=self.vary, progress=progress)
            outputs.write("report", self.report, lambda path: plan_report(study, path))
        if self.trace is not None:
            from autopar.report.trace import write_trace

            predicted = planned.result.predicted
            outputs.write("trace", self.trace, lambda path: write_trace(planned.plan, predicted, path))
        if self.json:
            print_json(summary(planned))
        else:
            print_plan(planned.plan, planned)
            for what, path in outputs.written:
                typer.echo(f"{what} written to {path}")
        outputs.finish(planned.plan.to_yaml())


def read_loads(path: Path) -> Loads:
    """Tokens that the experts of each layer got. Raises InfeasiblePlan."""
    data = parse_json(read_text(path, "expert load", InfeasiblePlan), str(path), InfeasiblePlan)
    try:
        found = pydantic.TypeAdapter(dict[str, tuple[int, ...]]).validate_python(data)
    except pydantic.ValidationError as error:
        raise InfeasiblePlan(
            f"{path} does not say how many tokens experts got\n"
            '  expected {"path of the layer": [tokens of expert 0, tokens of expert 1, ...], ...}'
        ) from error
    return tuple(found.values())


def read_yaml(path: Path) -> Any:
    """The contents of a YAML cluster file. Raises InvalidCluster if it cannot be read or is not YAML."""
    return parse_yaml(read_text(path, "cluster", InvalidCluster), str(path), InvalidCluster)
