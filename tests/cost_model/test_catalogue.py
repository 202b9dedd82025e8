"""Every entry is complete, sourced and physically plausible; cluster descriptions are checked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from autopar.cost_model.catalogue import CATALOGUE, find_gpu, known_gpus, make_cluster
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.hardware.catalogue_entry import Assumed, Fit, Published
from autopar.cost_model.hardware.fitted_constants import FITTED
from autopar.cost_model.hardware.matmul_efficiency import Tile
from autopar.ir.errors import InvalidCluster
from autopar.ir.ops.scalings import RATES

NAMES = (
    *("v100", "a100-40gb", "a100-80gb", "a100-80gb-pcie", "h100-sxm", "h100-pcie", "h100-96gb", "h200"),
    *("b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x", "cpu"),
)


def constants(value: object, path: str) -> list[tuple[str, Published | Assumed | Fit]]:
    """Every sourced figure inside an entry with its path."""
    if isinstance(value, (Published, Assumed, Fit)):
        return [(path, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in constants(item, f"{path}[{key}]")]
    if is_dataclass(value):
        return [found for f in fields(value) for found in constants(getattr(value, f.name), f"{path}.{f.name}")]
    if isinstance(value, tuple) and all(isinstance(part, Tile) for part in value):
        return []  # the entry says beside them what they rest on
    assert value is None or isinstance(value, (str, bool)), f"{path} is a bare number without a source: {value!r}"
    return []


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_constant_is_sourced_and_positive(name: str) -> None:
    for path, constant in constants(CATALOGUE[name], name):
        text = constant.source if isinstance(constant, Published) else constant.reason
        assert constant.value > 0, path
        assert len(text.strip()) > 10, f"{path} has no source or reason"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_makes_a_device(name: str) -> None:
    cluster = make_cluster(name, 16, 8)
    device = cluster.device
    assert "fp32" in device.precisions and len(set(device.precisions) - set(RATES)) == 2
    for precision in ("fp32", "bf16"):
        rate = device.matmul_rate(precision)
        assert 0 < rate.attention_efficiency <= rate.efficiency <= 1
    assert 0 < device.usable_bytes < device.memory_bytes
    assert cluster.intra_node.ring_bandwidth(8) > cluster.inter_node.ring_bandwidth(8)


def test_datasheet_figures() -> None:
    assert make_cluster("a100-80gb", 8).device.peak_flops("bf16") == 312e12
    assert make_cluster("h100-sxm", 8).device.peak_flops("bf16") == 989e12
    for name, marketed in (("V100", 32), ("A100-40GB", 40), ("H100-SXM", 80), ("H200", 141), ("B200", 180)):
        assert 0.98 * marketed * 2**30 < make_cluster(name, 8).device.memory_bytes < marketed * 2**30
    assert make_cluster("h200", 8).device.memory_bandwidth == 4.8e12
    assert make_cluster("v100", 8).device.peak_flops("bf16") == 125e12  # the 16-bit rate it has


def test_devices_with_units_for_eight_bits_multiply_twice_as_fast_in_them() -> None:
    devices = [make_cluster(name, 8).device for name in NAMES if name != "cpu"]
    able = [device for device in devices if "fp8" in device.precisions]
    assert {"H100-SXM", "H200", "B200", "MI355X"} <= {device.name for device in able}
    assert not {"V100", "A100-80GB", "MI300X"} & {device.name for device in able}
    for device in able:
        assert device.peak_flops("fp8") == pytest.approx(2 * device.peak_flops("bf16"), rel=1e-2)


def test_only_blackwell_multiplies_small_tiles_and_only_hopper_tiles_of_128() -> None:
    have = {rate: {n for n in NAMES if n != "cpu" and rate in make_cluster(n, 8).device.precisions} for rate in RATES}
    assert have["mxfp8"] == have["nvfp4"] == {"b200", "b300", "gb200", "gb300"}
    assert have["fp8-block"] == {"h100-sxm", "h100-pcie", "h100-96gb", "h200"}
    gb300 = make_cluster("gb300", 8).device
    assert gb300.peak_flops("nvfp4") == 3 * gb300.peak_flops("mxfp8") == 15e15


def test_a_higher_power_limit_and_faster_exponentials_are_all_that_gb300_gains_on_gb200_in_16_bits() -> None:
    old, new = (make_cluster(name, 72).device.matmul_rate("bf16") for name in ("gb200", "gb300"))
    power = (1400 / 1200) ** FITTED.power
    assert new.efficiency == pytest.approx(power * old.efficiency)
    forward, backward = (
        ours / theirs
        for ours, theirs in zip(*(rate.attention_rates(8192, 128, causal=True) for rate in (new, old)), strict=True)
    )
    # The exponentials are a larger part of a forward, which has fewer products beside them.
    assert 1.05 * power < backward < forward < 1.35 * power


def test_names() -> None:
    assert set(NAMES) == set(known_gpus())
    assert find_gpu("H100") is find_gpu("h100-SXM") is find_gpu("h100_sxm")


def test_unknown_gpu_lists_the_known_and_the_closest() -> None:
    with pytest.raises(InvalidCluster, match=r"unknown GPU 'h100-smx'; did you mean 'h100-sxm'\?\n  known: .*mi300x"):
        make_cluster("h100-smx", 8)


def test_unknown_precision() -> None:
    with pytest.raises(InvalidCluster, match="A100-80GB has no fp8 rate; it has fp32, bf16"):
        make_cluster("a100", 8).device.matmul_rate("fp8")


def test_node_size_defaults() -> None:
    assert make_cluster("h200", 4).gpus_per_node == 4
    assert make_cluster("h200", 32).gpus_per_node == 8
    assert make_cluster("h200", 32, 4).num_nodes == 8
    assert make_cluster("gb200", 64).num_nodes == 1  # of a rack of 72


@pytest.mark.parametrize(
    ("num_gpus", "share", "whole"),
    [(64, 64, None), (72, 72, None), (96, 48, 72), (128, 64, 72), (144, 72, None), (256, 64, 72), (1024, 64, 72)],
)
def test_racks_give_an_equal_share(num_gpus: int, share: int, whole: int | None) -> None:
    cluster = make_cluster("gb300-nvl72", num_gpus)
    assert (cluster.gpus_per_node, cluster.shares_nodes_of) == (share, whole)


def test_a_share_that_is_given_is_not_assumed() -> None:
    cluster = make_cluster("gb300", 256, 32)
    assert (cluster.num_nodes, cluster.shares_nodes_of) == (8, None)


def test_racks_that_cannot_give_an_equal_share() -> None:
    with pytest.raises(
        InvalidCluster,
        match=r"100 GPUs do not fill racks of 72, and are not as many whole trays of 4 .*\n  try: --gpus 96",
    ):
        make_cluster("gb300", 100)
    assert make_cluster("gb300", 96).gpus_per_node == 48


def test_gpus_must_fill_the_nodes() -> None:
    with pytest.raises(InvalidCluster, match=r"12 GPUs do not fill nodes of 8.\n  try: --gpus 8, or another"):
        make_cluster("h200", 12)
    with pytest.raises(InvalidCluster, match="at least one GPU"):
        make_cluster("h200", 0)


def test_cluster_file_overrides_the_catalogue() -> None:
    cluster = cluster_from_yaml(
        """
        gpu: a100-80gb
        num_gpus: 64
        memory_gb: 40
        matmul_efficiency: 0.5
        inter_node: {bandwidth_gb_s: 12.5, efficiency: 0.8, latency_us: 8}
        """
    )
    assert cluster.num_nodes == 8
    assert cluster.device.memory_bytes == 40 * 10**9
    assert cluster.device.matmul_rate("bf16").efficiency == 0.5
    assert cluster.inter_node.ring_bandwidth(2) == pytest.approx(10e9)
    assert cluster.inter_node.hop_latency_s == pytest.approx(8e-6)
    assert cluster.intra_node == make_cluster("a100-80gb", 64).intra_node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: h200\nnum_gpus: minus one", "num_gpus: Input should be a valid integer"),
        ("gpu: h200\nnum_gpus: 8\nnvlink: fast", "nvlink: Extra inputs are not permitted"),
        ("gpu: h200\nnum_gpus: 8\nintra_node: {efficiency: 2}", "intra_node.efficiency: Input should be less than"),
        ("num_gpus: 8", "expected gpu and num_gpus, or nodes"),
        ("nodes: [{gpu: h200, num_nodes: 2}]\nnum_gpus: 8", "leave gpu and num_gpus out"),
        ("nodes: [{gpu: h200, num_nodes: 0}]", "nodes.0.num_nodes: Input should be greater than 0"),
        (
            "gpu: h200\nnum_gpus: 8\npods: {num_nodes: 2, oversubscription: 0.5}",
            "pods.oversubscription: Input should be",
        ),
        ("gpu: h200\nnum_gpus: 8\ngpus_per_node: [", "is not YAML"),
        ("- h200", "expected a mapping"),
        ("gpu: h300\nnum_gpus: 8", "unknown GPU 'h300'; did you mean 'h"),
    ],
)
def test_bad_cluster_files_name_the_field(text: str, message: str) -> None:
    with pytest.raises(InvalidCluster) as error:
        cluster_from_yaml(text, source="c.yaml")
    assert message in str(error.value)
