"""Plans in the terms of other systems: configurations, code and jobs that people run today.

    exported = export(Plan.load("plan.yaml"), "deepspeed")
    Path(exported.name).write_text(exported.text)
    print(*exported.notes, sep="\\n")       # what of the plan is lost, and what else the target needs

A target says what it cannot express, or refuses the plan where nothing near it can be said. Targets are modules with a
function ``write``, imported when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from autopar.cost_model.stacks.known import MEGATRON_CORE_2025, TORCHTITAN
from autopar.export.exported import Exported, Options
from autopar.export.strategy import Strategy
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan

__all__ = ["TARGETS", "Exported", "Options", "Target", "export"]


@dataclass(frozen=True, slots=True)
class Target:
    """module: in ``autopar.export``. summary: what is written. stack: the software whose kernels it runs, where those
    are not of the plan's own stack. runs_plans: whether the plan itself is run, or shown.
    """

    module: str
    summary: str
    stack: str | None = None
    runs_plans: bool = False


TARGETS: dict[str, Target] = {
    "megatron": Target("megatron", "Megatron-LM: flags of pretrain_gpt.py in a shell script", MEGATRON_CORE_2025.name),
    "torchtitan": Target("torchtitan", "torchtitan: a module of its configurations", TORCHTITAN.name),
    "deepspeed": Target("deepspeed", "DeepSpeed: ds_config.json"),
    "fsdp": Target("fsdp", "PyTorch FSDP2 or DDP: code that wraps the model"),
    "accelerate": Target("accelerate", "Hugging Face Accelerate: its configuration file"),
    "slurm": Target("slurm", "Slurm: an sbatch script that trains under the plan", runs_plans=True),
    "pytorchjob": Target("pytorchjob", "Kubeflow: a PyTorchJob that trains under the plan", runs_plans=True),
    "rayjob": Target("rayjob", "KubeRay: a RayJob, with its cluster, that trains under the plan", runs_plans=True),
    "perfetto": Target("perfetto", "the predicted step as a trace for Perfetto or Chrome", runs_plans=True),
}


def export(plan: Plan, target: str, options: Options | None = None) -> Exported:
    """``plan`` in the terms of ``target``, a key of ``TARGETS``.

    Raises InvalidInput for an unknown target, InexpressiblePlan where the target has nothing like the plan.
    """
    if target not in TARGETS:
        near = get_close_matches(target, TARGETS, n=1)
        raise InvalidInput(
            f"unknown target {target!r}; expected {', '.join(TARGETS)}" + (f"\n  try: --to {near[0]}" if near else "")
        )
    write: Callable[[Strategy, Options], Exported] = import_module(f"autopar.export.{TARGETS[target].module}").write
    if TARGETS[target].runs_plans:
        return write(Strategy(plan), options or Options())
    return write(Strategy(plan.in_levels(), plan.kept_sets), options or Options())
