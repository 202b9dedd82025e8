"""Jobs have the structure that Kubeflow's and Kubernetes' own models of it have, down to every field of a pod.

KubeRay has no models on the package index; the fields around its pods are those of its API reference (ray.io/v1).
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
import yaml

from autopar.export import Options, export
from autopar.export.kubernetes import PLAN_PATH
from autopar.ir.plan import Plan
from autopar.training.job import TrainingJob
from tests.export.plans import decoder_plan

kubernetes = pytest.importorskip("kubernetes.client.models")
kubeflow = pytest.importorskip("kubeflow.training.models")

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def check(value: Any, kind: str, where: str = "") -> None:
    """Raise where ``value`` has not the fields, or their types, that the model ``kind`` has."""
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, kind[5:-1], f"{where}[{number}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, kind[5:-1].split(", ", 1)[1], f"{where}.{key}")
    elif kind in ("str", "int", "bool", "object"):
        plain = {"str": str, "int": int, "bool": bool, "object": object}[kind]
        assert isinstance(value, plain), f"{where}: {value!r} is no {kind}"
    else:
        model = getattr(kubeflow, kind, None) or getattr(kubernetes, kind)
        names = {model.attribute_map[attribute]: of for attribute, of in model.openapi_types.items()}
        assert isinstance(value, dict), where
        unknown = set(value) - set(names)
        assert not unknown, f"{where}: {kind} has no {unknown}"
        for key, item in value.items():
            check(item, names[key], f"{where}.{key}")
        own = {attribute: value.get(name) for attribute, name in model.attribute_map.items()}
        model(**own)  # raises for a field that has to be there


def documents(plan: Plan, target: str, options: Options | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config map and the job."""
    config_map, job = yaml.safe_load_all(export(plan, target, options).text)
    check(config_map, "V1ConfigMap")
    assert Plan.from_yaml(config_map["data"]["plan.yaml"]) == plan
    for document in (config_map, job):
        assert NAME.fullmatch(document["metadata"]["name"])
    return config_map, job


def claims(template: dict[str, Any]) -> list[str]:
    """The claims of the volumes that the container mounts at /checkpoints."""
    (container,) = template["spec"]["containers"]
    mounted = {one["name"] for one in container["volumeMounts"] if one["mountPath"] == "/checkpoints"}
    return [one["persistentVolumeClaim"]["claimName"] for one in template["spec"]["volumes"] if one["name"] in mounted]


@pytest.mark.parametrize(("ranks", "pods", "each"), [(1, 1, 1), (8, 1, 8), (32, 4, 8), (12, 2, 6)])
def test_pytorchjob(ranks: int, pods: int, each: int) -> None:
    _, job = documents(decoder_plan(dp=ranks), "pytorchjob", Options(image="trainer:1", steps=7))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check(job, "KubeflowOrgV1PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert sum(spec["replicas"] for spec in specs.values()) == pods
    assert job["spec"]["nprocPerNode"] == str(each)
    for spec in specs.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert (container["name"], container["image"]) == ("pytorch", "trainer:1")
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(each)}
        assert container["command"][:5] == ["torchrun", "--max-restarts", "3", "-m", "autopar.launching"]
        given = TrainingJob(**json.loads(container["command"][5]))
        folder = "/checkpoints/autopar-decoder"
        assert given == TrainingJob(
            model="examples/gpt.py", plan=PLAN_PATH, steps=7, seq_len=1024, job=folder, keep=2, keep_alive=True
        )
        own = {one["name"]: one["value"] for one in container["env"]}
        assert int(own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < spec["template"]["spec"]["terminationGracePeriodSeconds"]
        assert claims(spec["template"]) == ["autopar-decoder"]


@pytest.mark.parametrize("gpu", ["h100-sxm", "mi300x", "cpu"])
def test_rayjob(gpu: str) -> None:
    config_map, job = documents(decoder_plan(dp=16, gpu=gpu), "rayjob")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == {
        "entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec",
    }  # fmt: skip
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in (cluster["headGroupSpec"], workers):
        check(group["template"], "V1PodTemplateSpec")
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    (container,) = workers["template"]["spec"]["containers"]
    device = {"h100-sxm": "nvidia.com/gpu", "mi300x": "amd.com/gpu"}.get(gpu)
    assert container["resources"].get("limits") == (None if device is None else {device: "8"})
    program = ast.parse(config_map["data"]["train.py"])
    (call,) = (node for node in ast.walk(program) if isinstance(node, ast.Call))
    assert ast.unparse(call.func) == "run_program"
    given = TrainingJob(**json.loads(ast.literal_eval(call.args[0])))
    assert (given.keep_alive, given.job) == (True, "/checkpoints/autopar-decoder")
    assert [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords] == [("ray", "auto")]
    assert claims(workers["template"]) == ["autopar-decoder"]
    assert claims(cluster["headGroupSpec"]["template"]) == []


@pytest.mark.parametrize("target", ["pytorchjob", "rayjob"])
def test_checkpoints_are_in_a_claim_that_several_pods_write_to(target: str) -> None:
    plan = decoder_plan(dp=16)
    assert "claim autopar-decoder, which has to be there (ReadWriteMany" in " ".join(export(plan, target).notes)
    _, job = documents(plan, target, Options(claim="disk"))
    specs = job["spec"]["pytorchReplicaSpecs"]["Worker"] if target == "pytorchjob" else None
    template = specs["template"] if specs else job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    assert claims(template) == ["disk"]


@pytest.mark.parametrize("target", ["pytorchjob", "rayjob"])
def test_names_are_data(target: str) -> None:
    odd = "a\n---\nkind: Secret\n# 'b' \"c\" $(HOSTNAME).py"
    plan = decoder_plan(dp=2, name="Ä\n---\nkind: Secret", source=odd)
    config_map, job = documents(plan, target)
    if target == "pytorchjob":
        argument = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"][-1]
        # Kubernetes makes $( of $$(.
        assert json.loads(argument.replace("$$(", "$("))["model"] == odd
    else:
        program = config_map["data"]["train.py"]
        values = [node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)]
        assert any(isinstance(v, str) and v.startswith("{") and json.loads(v)["model"] == odd for v in values)
