"""Common parts of jobs on Kubernetes: the plan as a config map, pods with devices, shared memory, YAML."""

from __future__ import annotations

from typing import Any

import yaml

from autopar import __version__
from autopar.export.exported import Options, commented
from autopar.export.nodes import Nodes
from autopar.ir.plan import Plan

Json = dict[str, Any]

PLAN_FOLDER = "/etc/autopar"
PLAN_PATH = f"{PLAN_FOLDER}/plan.yaml"
_CHECKPOINTS = "/checkpoints"
_AMD = ("mi2", "mi3", "mi4")


def image_of(options: Options) -> str:
    """Name of the container image: that of the options, else ``autopar:VERSION``."""
    return options.image or f"autopar:{__version__}"


def image_notes(options: Options, model: str) -> list[str]:
    """Sentences on the image: its contents and how to choose another."""
    notes = [
        f"The image {image_of(options)} has to hold torch, autopar and the model's {model}, found from its folder."
    ]
    return notes if options.image else [*notes, "Another image: --image NAME."]


def claim_of(options: Options, name: str) -> str:
    """Name of the persistent volume claim with the checkpoints: that of the options, else the job's."""
    return options.claim or name


def job_folder(name: str) -> str:
    """Where containers find the checkpoints of the job ``name``."""
    return f"{_CHECKPOINTS}/{name}"


def claim_notes(options: Options, nodes: Nodes, name: str) -> list[str]:
    """Sentences on the volume that checkpoints are in."""
    access = "ReadWriteMany, as pods on several nodes write to it" if nodes.count > 1 else "ReadWriteOnce will do"
    notes = [
        f"Checkpoints are in the volume of the claim {claim_of(options, name)}, which has to be there ({access}); a "
        "pod that starts again goes on from the newest."
    ]
    return notes if options.claim else [*notes, "Another claim: --claim NAME."]


def config_map(name: str, files: dict[str, str]) -> Json:
    """A ConfigMap of these files, by name."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}


def resources(plan: Plan, nodes: Nodes) -> Json:
    """Resources of a container with all ranks of a node."""
    if not nodes.gpus:
        return {"requests": {"cpu": str(nodes.ranks_each)}}
    device = "amd.com/gpu" if plan.cluster.gpu.startswith(_AMD) else "nvidia.com/gpu"
    return {"limits": {device: str(nodes.ranks_each)}, "requests": {device: str(nodes.ranks_each)}}


def pod(name: str, container: Json, claim: str | None = None, *, grace_s: int | None = None) -> Json:
    """A pod template of one container, which finds the files of the config map in ``PLAN_FOLDER``.

    claim: of the volume with the checkpoints, if the container writes any. grace_s: between the notice that the pod is
    to end and its end; None for Kubernetes' own.

    Shared memory is as much as there is: NCCL and data loaders need more than the 64 MiB of a container.
    """
    mounts: list[Json] = [
        {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Json] = [
        {"name": "plan", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if claim is not None:
        mounts.append({"name": "checkpoints", "mountPath": _CHECKPOINTS})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}})
    grace = {} if grace_s is None else {"terminationGracePeriodSeconds": grace_s}
    return {"spec": {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes, **grace}}


def documents(notes: list[str], heading: str, *found: Json) -> str:
    """YAML documents below a head of comments."""
    return commented(notes, heading) + "".join("---\n" + dump(document) for document in found)


def dump(document: Json) -> str:
    """A Kubernetes document as YAML."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=False)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that a plan in a config map can be read; nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
