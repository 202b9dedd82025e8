"""Which data-parallel engine the search takes, left free, as memory and links change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import Disk
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan, InvalidCluster
from autopar.ir.graph import CapturedModel
from autopar.ir.offload import Offload
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, predict_plan, search_captured
from autopar.search.problem.constraints import Constraints

WIDTH, DEPTH = 4096, 24
NUMEL = WIDTH * WIDTH * DEPTH
DATA_ONLY = Constraints(pp=1, tp=1, cp=1, ep=1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, target)


@cache
def captured() -> CapturedModel:
    with torch.device("meta"):
        inputs = torch.zeros(64, 256, WIDTH), torch.zeros(64, 256, WIDTH)
        return normalise(capture(Chain(), inputs))


def cluster(bytes_a_parameter: float, num_gpus: int = 8, network: float = 1.0) -> Cluster:
    """Nodes of 8; ``network``: share of the usual bandwidth between them."""
    usual = make_cluster("a100-80gb", num_gpus, 8).with_memory(int(bytes_a_parameter * NUMEL))
    return replace(usual, inter_node=replace(usual.inter_node, bandwidth=usual.inter_node.bandwidth * network))


def found(cluster: Cluster, constraints: Constraints = DATA_ONLY) -> Plan:
    plan = search_captured(captured(), cluster, constraints).plan
    assert plan.prediction is not None
    again = predict_plan(captured(), cluster, plan)
    assert again.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    assert int(again.peak_bytes) == plan.prediction.peak_memory_bytes
    return plan


def test_optimiser_state_that_does_not_fit_is_sharded() -> None:
    # Whole, 16 bytes a parameter of state and 2 of activations; at stage 2, 4 + 12 / 8 and 2.
    assert found(cluster(15)).zero
    assert found(cluster(6)).zero == 3


def test_a_model_that_fits_easily_is_replicated() -> None:
    with torch.device("meta"):
        rows = torch.zeros(32768, 512)
        layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())))
        small = normalise(capture(layers, rows, loss_fn=F.mse_loss, example_target=rows))
    plan = search_captured(small, make_cluster("a100-80gb", 8, 8), DATA_ONLY).plan
    assert plan.zero == 0 and plan.data_parallel_size == 8


def test_what_fits_no_other_way_is_offloaded() -> None:
    # 16 / 8 bytes a parameter sharded eight ways, 2 of activations and the blocks gathered: not in 2.9.
    lean = replace(DATA_ONLY, remat="none")
    plan = found(cluster(2.9), lean)
    assert [stage.offload for stage in plan.stages] == [True]
    with pytest.raises(InfeasiblePlan):
        search_captured(captured(), cluster(2.9), replace(lean, offload=Offload.NONE))
    roomy = found(cluster(80), lean)
    assert not any(stage.offload for stage in roomy.stages)
    pinned = found(cluster(80), replace(lean, offload=Offload.HOST))
    assert all(stage.offload for stage in pinned.stages)
    assert pinned.prediction is not None and roomy.prediction is not None
    assert pinned.prediction.step_time_s > roomy.prediction.step_time_s
    assert pinned.prediction.peak_memory_bytes < roomy.prediction.peak_memory_bytes


def with_host(usual: Cluster, bytes_a_parameter: float, *, disk: float = 0.0) -> Cluster:
    """Host memory, and a disk of so many bytes, of one device's share."""
    host = replace(usual.device.host, memory_bytes=bytes_a_parameter * NUMEL)
    own = Disk(read_bandwidth=5e9, write_bandwidth=3e9, capacity=disk * NUMEL) if disk else None
    return replace(usual, device=replace(usual.device, host=host, disk=own))


def test_what_host_memory_has_no_room_for_is_on_disk() -> None:
    # 16 bytes a parameter of eight ranks: 2 of a rank.
    lean = replace(DATA_ONLY, remat="none")
    roomy = found(with_host(cluster(2.9), 2.1, disk=8), lean)
    assert [(stage.offload, stage.on_disk) for stage in roomy.stages] == [(True, None)]
    half = found(with_host(cluster(2.9), 1.1, disk=8), lean)
    (stage,) = half.stages
    assert stage.on_disk is not None and DEPTH / 2 - 1 <= stage.on_disk <= DEPTH / 2 + 1
    none = found(with_host(cluster(2.9), 0.01, disk=8), lean)
    assert none.stages[0].on_disk == none.stages[0].last + 1
    assert roomy.prediction and half.prediction and none.prediction
    assert roomy.prediction.step_time_s < half.prediction.step_time_s < none.prediction.step_time_s
    there = half.prediction.offloaded_bytes
    assert there is not None and there["host"] <= 1.1 * NUMEL and there["disk"] <= 1.1 * NUMEL
    assert sum(there.values()) == pytest.approx(2 * NUMEL, rel=1e-3)


def test_what_has_room_nowhere_says_how_much_there_would_have_to_be() -> None:
    lean = replace(DATA_ONLY, remat="none")
    with pytest.raises(InfeasiblePlan, match="GiB a rank to host memory, of which there are"):
        found(with_host(cluster(2.9), 1.1), lean)
    with pytest.raises(InfeasiblePlan, match="to disk, of which there are"):
        found(with_host(cluster(2.9), 0.01, disk=1.0), lean)


def test_a_disk_is_asked_for_where_there_is_one() -> None:
    pinned = found(with_host(cluster(80), 100, disk=8), replace(DATA_ONLY, offload=Offload.DISK))
    assert pinned.stages[0].on_disk == pinned.stages[0].last + 1
    with pytest.raises(InvalidCluster, match=r"disk: \{read_gb_s"):
        found(with_host(cluster(80), 100), replace(DATA_ONLY, offload=Offload.DISK))


def test_a_cpu_has_no_host_memory_beside_its_own() -> None:
    usual = make_cluster("cpu", 8).with_memory(int(2.9 * NUMEL))
    with pytest.raises(InfeasiblePlan):
        search_captured(captured(), usual, replace(DATA_ONLY, remat="none"))
    plan = found(with_host(usual, 100, disk=8), replace(DATA_ONLY, remat="none"))
    assert plan.stages[0].on_disk


def test_pins_of_level_three() -> None:
    held = found(cluster(80), replace(DATA_ONLY, dp=8, zero=3, num_microbatches=2, reshard_after_forward=False))
    resharded = found(cluster(80), replace(DATA_ONLY, dp=8, zero=3, num_microbatches=2, prefetch=1))
    ahead = found(cluster(80), replace(DATA_ONLY, dp=8, zero=3, num_microbatches=2, prefetch=3))
    assert not held.reshard_after_forward and resharded.reshard_after_forward and ahead.prefetch == 3
    assert held.prediction and resharded.prediction and ahead.prediction
    assert held.prediction.step_time_s < resharded.prediction.step_time_s
    assert ahead.prediction.step_time_s <= resharded.prediction.step_time_s
    peaks = [p.prediction.peak_memory_bytes for p in (resharded, ahead, held) if p.prediction]
    assert peaks[0] < peaks[1] < peaks[2]


def test_slow_network_shards_inside_nodes() -> None:
    plan = found(cluster(7, num_gpus=32, network=0.1), replace(DATA_ONLY, zero=3))
    assert plan.shard_axes is not None
    assert [plan.mesh[name] for name in plan.shard_axes] == [8]
    assert plan.data_parallel_size == 32
    pinned = found(cluster(7, num_gpus=32, network=0.1), replace(DATA_ONLY, zero=3, shard=32))
    assert plan.prediction is not None and pinned.prediction is not None
    assert plan.prediction.step_time_s < 0.8 * pinned.prediction.step_time_s


def test_the_number_of_shards_can_be_pinned() -> None:
    constraints = replace(DATA_ONLY, dp=32, zero=3, shard=4)
    plan = estimate_captured(captured(), cluster(80, num_gpus=32), constraints).plan
    assert dict(plan.mesh) == {"dp_replicate": 8, "dp_shard": 4}
    assert plan.shard_axes == ["dp_shard"] and set(plan.inputs) == {"dp_replicate", "dp_shard"}


@pytest.mark.parametrize("wrong", [{"shard": 3}, {"shard": 8, "zero": 0}, {"shard": 0}])
def test_a_wrong_number_of_shards_is_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(InfeasiblePlan, match="shard is"):
        search_captured(captured(), cluster(80), Constraints(**wrong))  # type: ignore[arg-type]
