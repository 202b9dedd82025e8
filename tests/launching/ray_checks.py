"""What ``run_on_ray`` does on a Ray cluster of two machines, which are processes of this one. Prints JSON.

A program of its own: Ray leaves threads and sockets behind, and the tests count warnings as errors.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

import autopar
from autopar.ir.errors import AutoparError, InvalidInput
from tests.launching.plans import plan_of


def where() -> dict[str, Any]:
    """Where this rank is, and what the ranks add up to."""
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    return {"host": ray.get_runtime_context().get_node_id(), "total": total.item()} | {n: os.environ[n] for n in names}


def refuse() -> None:
    if dist.get_rank() == 1:
        raise InvalidInput("this rank does not like it")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def break_down() -> None:
    if dist.get_rank() == 1:
        raise KeyError("not there")
    dist.barrier()


def refusal(*arguments: Any, **options: Any) -> dict[str, Any]:
    """The error of a call, and how long it took."""
    start = time.monotonic()
    try:
        autopar.run_on_ray(*arguments, **options)
    except AutoparError as error:
        return {"type": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    return {}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        pair = plan_of(2, 2)
        found: dict[str, Any] = {"where": autopar.run_on_ray(where, plan_of(4, 2))}
        found["no room"] = refusal(where, plan_of(4, 4))
        for function in (refuse, die, break_down):
            found[function.__name__] = refusal(function, pair)
        deadline = time.monotonic() + 600
        while (free := ray.available_resources().get("CPU", 0)) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        found["free"] = free
        found["groups"] = [group["state"] for group in ray.util.placement_group_table().values()]
        taken = ray.util.placement_group([{"CPU": 2}])
        taken.wait(600)
        found["busy"] = refusal(where, plan_of(4, 2), wait_s=1)
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
