"""autopar: a compiler that finds the fastest way to train a PyTorch model on a cluster, and trains it that way.

    pm = autopar.parallelize(model, 8, example_inputs=batch)     # an nn.Module, spread over 8 ranks
    loss = pm.step(*rows)                                        # forward, backward and gradient sync
    autopar.save(pm, optimizer, path)                            # and load, under this plan or another

    plan = autopar.search(model, cluster, example_inputs=batch)  # the plan alone; needs no GPU

Public names are resolved when they are first used, so that importing one layer (``autopar.passes``) does not
import those above it.
"""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.ir.plan_page import PlanPage, draw_with

if TYPE_CHECKING:
    from autopar.api import ParallelModule as ParallelModule
    from autopar.api import from_pretrained as from_pretrained
    from autopar.api import parallelize as parallelize
    from autopar.api import search as search
    from autopar.cost_model.cluster_file import cluster_from_yaml as cluster_from_yaml
    from autopar.cost_model.hardware.cluster import Cluster as Cluster
    from autopar.ir.annotations import constrain as constrain
    from autopar.ir.errors import AutoparError as AutoparError
    from autopar.ir.errors import CaptureError as CaptureError
    from autopar.ir.errors import CheckpointError as CheckpointError
    from autopar.ir.errors import CopiesDiffer as CopiesDiffer
    from autopar.ir.errors import DiskError as DiskError
    from autopar.ir.errors import Diverged as Diverged
    from autopar.ir.errors import InexpressiblePlan as InexpressiblePlan
    from autopar.ir.errors import InfeasiblePlan as InfeasiblePlan
    from autopar.ir.errors import InvalidCluster as InvalidCluster
    from autopar.ir.errors import InvalidInput as InvalidInput
    from autopar.ir.errors import InvalidModelFile as InvalidModelFile
    from autopar.ir.errors import InvalidPlan as InvalidPlan
    from autopar.ir.errors import LaunchError as LaunchError
    from autopar.ir.errors import NotFinite as NotFinite
    from autopar.ir.errors import PlanMismatch as PlanMismatch
    from autopar.ir.errors import UnprovenProgram as UnprovenProgram
    from autopar.ir.errors import UnsupportedOp as UnsupportedOp
    from autopar.ir.plan import Plan as Plan
    from autopar.launching.on_ray import run_on_ray as run_on_ray
    from autopar.runtime.checkpoint.loading import load as load
    from autopar.runtime.checkpoint.saving import save as save
    from autopar.runtime.loss_scaler import LossScaler as LossScaler

__version__ = "0.1.0"

_PUBLIC = {
    "AutoparError": "autopar.ir.errors",
    "CaptureError": "autopar.ir.errors",
    "CheckpointError": "autopar.ir.errors",
    "Cluster": "autopar.cost_model.hardware.cluster",
    "CopiesDiffer": "autopar.ir.errors",
    "DiskError": "autopar.ir.errors",
    "Diverged": "autopar.ir.errors",
    "InexpressiblePlan": "autopar.ir.errors",
    "InfeasiblePlan": "autopar.ir.errors",
    "InvalidCluster": "autopar.ir.errors",
    "InvalidInput": "autopar.ir.errors",
    "InvalidModelFile": "autopar.ir.errors",
    "InvalidPlan": "autopar.ir.errors",
    "LaunchError": "autopar.ir.errors",
    "LossScaler": "autopar.runtime.loss_scaler",
    "NotFinite": "autopar.ir.errors",
    "ParallelModule": "autopar.api",
    "Plan": "autopar.ir.plan",
    "PlanMismatch": "autopar.ir.errors",
    "UnprovenProgram": "autopar.ir.errors",
    "UnsupportedOp": "autopar.ir.errors",
    "cluster_from_yaml": "autopar.cost_model.cluster_file",
    "constrain": "autopar.ir.annotations",
    "from_pretrained": "autopar.api",
    "load": "autopar.runtime.checkpoint.loading",
    "parallelize": "autopar.api",
    "run_on_ray": "autopar.launching.on_ray",
    "save": "autopar.runtime.checkpoint.saving",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "CopiesDiffer",
    "DiskError",
    "Diverged",
    "InexpressiblePlan",
    "InfeasiblePlan",
    "InvalidCluster",
    "InvalidInput",
    "InvalidModelFile",
    "InvalidPlan",
    "LaunchError",
    "LossScaler",
    "NotFinite",
    "ParallelModule",
    "Plan",
    "PlanMismatch",
    "UnprovenProgram",
    "UnsupportedOp",
    "__version__",
    "cluster_from_yaml",
    "constrain",
    "from_pretrained",
    "load",
    "parallelize",
    "run_on_ray",
    "save",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _SearchPackage(types.ModuleType):
    """``autopar.search`` is both the package of the search and, called, ``autopar.api.search``.

    Python sets the attribute ``autopar.search`` to the package as soon as anything in it is imported, so the
    function cannot live under that name beside it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("autopar.api").search(*args, **kwargs)


# Cheap: the package itself imports nothing.
importlib.import_module("autopar.search").__class__ = _SearchPackage


def _write_page(plan: Plan, path: str | Path) -> None:
    importlib.import_module("autopar.report.page").plan_report(plan, path)


def _render_page(plan: Plan) -> str:
    return str(importlib.import_module("autopar.report.page").render_plain(plan))


draw_with(PlanPage(write=_write_page, render=_render_page))
