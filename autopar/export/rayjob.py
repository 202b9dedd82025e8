"""KubeRay: a RayJob (ray.io/v1) with the Ray cluster that it starts, on which ``autopar.launching`` starts a supervisor
for each rank.

A worker pod has the ranks of a node; the head pod has none: it runs the program in the config map, which asks Ray for
the actors. A worker pod that is lost KubeRay starts again; until then the others go on without it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.export.exported import Exported, Options
from autopar.export.jobs import RESTARTS, as_argument, job_name, training_job
from autopar.export.kubernetes import (
    PLAN_FOLDER,
    PLAN_PATH,
    Json,
    claim_notes,
    claim_of,
    config_map,
    documents,
    image_notes,
    image_of,
    job_folder,
    pod,
    resources,
)
from autopar.export.nodes import Nodes, nodes_of
from autopar.export.rendering import render
from autopar.export.strategy import Strategy

_RAY = "2.40.0"
"""Version of Ray that the image has to have, as the extra ``ray`` asks for at least."""


def write(strategy: Strategy, options: Options) -> Exported:
    """Nothing of the plan is lost: the job runs it. Raises InvalidInput if there is no model to train."""
    plan = strategy.plan
    nodes, name = nodes_of(plan), job_name(plan)
    job = replace(training_job(plan, options, "rayjob", job_folder(name)), plan=PLAN_PATH)
    notes = [
        *image_notes(options, job.model),
        *claim_notes(options, nodes, name),
        f"The image also has Ray; set rayVersion, which is {_RAY} here, to its version.",
    ]
    program = render("ray_train.py.jinja", job=as_argument(job))
    found: Json = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"python {PLAN_FOLDER}/train.py",
            "backoffLimit": RESTARTS,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": _cluster(strategy, options, nodes, name),
        },
    }
    heading = f"{plan.model.name} under an autopar plan: {strategy.in_words()}.\nWritten by autopar export --to rayjob."
    files = {"plan.yaml": plan.to_yaml(), "train.py": program}
    text = documents(notes, heading, config_map(name, files), found)
    return Exported(target="rayjob", name="rayjob.yaml", text=text, notes=tuple(notes))


def _cluster(strategy: Strategy, options: Options, nodes: Nodes, name: str) -> Json:
    """The spec of the RayCluster."""
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    head: Json = {
        "name": "ray-head",
        "image": image_of(options),
        "resources": {"requests": {"cpu": "2", "memory": "8Gi"}},
    }
    worker: Json = {
        "name": "ray-worker",
        "image": image_of(options),
        "env": env,
        "resources": resources(strategy.plan, nodes),
    }
    return {
        "rayVersion": _RAY,
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pod(name, head)},
        "workerGroupSpecs": [
            {
                "groupName": "ranks",
                "replicas": nodes.count,
                "minReplicas": nodes.count,
                "maxReplicas": nodes.count,
                "rayStartParams": {"num-cpus": str(nodes.ranks_each)},  # Ray counts one for each rank
                "template": pod(name, worker, claim_of(options, name)),
            }
        ],
    }
