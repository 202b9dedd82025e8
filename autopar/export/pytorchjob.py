"""Kubeflow: a PyTorchJob (training operator, kubeflow.org/v1) that runs ``autopar.launching`` under the plan.

A pod has the ranks of a node. The operator tells torchrun by its environment (PET_NNODES, PET_NODE_RANK and so on) how
many pods there are and which one it is in. There is no elasticPolicy: supervisors go on without a pod that is lost, and
take it up again, under its number, once it has been started again.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.export.exported import Exported, Options
from autopar.export.jobs import GRACE_S, RESTARTS, SHUTDOWN_S, as_argument, job_name, training_job
from autopar.export.kubernetes import (
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
from autopar.export.nodes import nodes_of
from autopar.export.strategy import Strategy


def write(strategy: Strategy, options: Options) -> Exported:
    """Nothing of the plan is lost: the job runs it. Raises InvalidInput if there is no model to train."""
    plan = strategy.plan
    nodes, name = nodes_of(plan), job_name(plan)
    job = replace(training_job(plan, options, "pytorchjob", job_folder(name)), plan=PLAN_PATH)
    notes = [*image_notes(options, job.model), *claim_notes(options, nodes, name)]
    claim = claim_of(options, name)
    container: Json = {
        "name": "pytorch",  # the operator looks for this name
        "image": image_of(options),
        # Kubernetes puts variables in for $(NAME); $$( is left as $(.
        "command": [
            *("torchrun", "--max-restarts", str(RESTARTS), "-m", "autopar.launching"),
            as_argument(job).replace("$(", "$$("),
        ],
        # torchrun passes on what a pod is told before it is taken away, and gives its ranks so long to save.
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(SHUTDOWN_S)},
        ],
        "resources": resources(plan, nodes),
    }

    def replicas(count: int) -> Json:
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": pod(name, container, claim, grace_s=GRACE_S),
        }

    specs = {"Master": replicas(1)}
    if nodes.count > 1:
        specs["Worker"] = replicas(nodes.count - 1)
    found: Json = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(nodes.ranks_each),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS},
            "pytorchReplicaSpecs": specs,
        },
    }
    heading = (
        f"{plan.model.name} under an autopar plan: {strategy.in_words()}.\nWritten by autopar export --to pytorchjob."
    )
    text = documents(notes, heading, config_map(name, {"plan.yaml": plan.to_yaml()}), found)
    return Exported(target="pytorchjob", name="pytorchjob.yaml", text=text, notes=tuple(notes))
